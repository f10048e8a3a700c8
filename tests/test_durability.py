"""Actors die, runs stop, and the numbers stay the same to the last bit."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle
from safetensors.torch import load_file

from megatrain_ray import trainer as trainer_module
from megatrain_ray.checkpoint.directory import list_checkpoints
from megatrain_ray.errors import ActorLostError, NonFiniteError, RunDirectoryError, TrainingError
from megatrain_ray.observe.status import read_status
from megatrain_ray.schedule import Tier
from megatrain_ray.trainer import Trainer
from tests import runs
from tests.runs import Fatal, Overlapping, digest, page, trace

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_instance")]

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


class Killer(threading.Thread):
    """SIGKILL to a random actor at random moments, from beside the run, until it has killed often enough.

    At most twice a step, and no store that has lost two checkpoints in a row: a third death would rightly end the run.
    """

    def __init__(self, trainer: Trainer, kills: int, longest_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.trainer = trainer
        self.kills = kills
        self.longest_s = longest_s
        self.random = random.Random(seed)
        self.killed: list[str] = []
        self.in_step: Counter[int] = Counter()
        self.ended = threading.Event()

    def run(self) -> None:
        while len(self.killed) < self.kills and not self.ended.wait(self.random.uniform(0, self.longest_s)):
            cluster = self.trainer._cluster
            if cluster is None or len(cluster.pids) < len(Tier) or self.in_step[self.trainer.step] == 2:
                continue
            tier = self.random.choice(list(Tier))
            if tier is Tier.STORE and self.trainer._interrupted == 2:
                continue
            pipeline = getattr(self.trainer, "_pipeline", None)  # comes after the actors
            in_flight = [] if pipeline is None else pipeline.in_flight()
            action = str(in_flight[0][0]) if in_flight else "between schedules"
            try:
                os.kill(cluster.pids[tier], signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.killed.append(f"{tier} in {action}")
            self.in_step[self.trainer.step] += 1


SOAK = [
    pytest.param(0.5, {1, 3}, 3, id="clipped, mixed, 3 micro-batches"),
    pytest.param(None, {1, 3}, 1, id="eager, mixed, 1 micro-batch"),
    pytest.param(0.5, set[int](), 1, id="clipped, RAM, 1 micro-batch"),
    pytest.param(None, {0, 1, 2, 3}, 3, id="eager, all paged, 3 micro-batches"),
]


def soak(config: Any, paged: set[int], *, kills: int, spill: bool) -> list[str]:
    """Kills all along a run; returns what was killed. Whatever it was, the run ends as one that was left alone."""
    with Trainer(config, overwrite=True) as trainer:
        page(trainer, paged, spill=spill)
        undisturbed = trace(trainer.steps())
        last = f"checkpoint-{config.training.max_steps}"
        before = f"checkpoint-{config.training.max_steps - config.training.max_steps % config.training.save_steps}"
        expected = [digest(trainer.run.path / name) for name in (before, last)]
    with Trainer(config, overwrite=True) as trainer:
        page(trainer, paged, spill=spill)
        killer = Killer(trainer, kills, 6.0, seed=len(paged))
        killer.start()
        records = []
        for record in trainer.steps():
            records.append(record)
            if len(killer.killed) < kills:
                time.sleep(0.2)  # the run must not end first
        killer.ended.set()
        killer.join()
        assert trace(records) == undisturbed, killer.killed
        saved = [digest(trainer.run.path / name) for name in (before, last)]
    if config.training.max_grad_norm:
        assert saved == expected, killer.killed
    else:  # without clipping a checkpoint that its store's death has interrupted moves on by a step
        assert saved[1] == expected[1], killer.killed
    return killer.killed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("max_grad_norm", "paged", "micro_batches"), SOAK)
def test_soak(
    max_grad_norm: float | None, paged: set[int], micro_batches: int, model_dir: ModelDir, make_config: MakeConfig
) -> None:
    config = make_config(
        model_dir("llama"),
        training__max_grad_norm=max_grad_norm,
        training__gradient_accumulation_steps=micro_batches,
        training__max_steps=299,
        training__save_steps=7,
    )
    killed = soak(config, paged, kills=50, spill=micro_batches == 3)
    print(f"{len(killed)} kills:", *killed, sep="\n  ")
    assert len(killed) == 50


@pytest.mark.parametrize(
    ("max_grad_norm", "paged", "spill"), [(0.5, {1, 3}, True), (0.5, {0, 2}, False), (None, {1}, False)]
)
def test_killed_equals_not_killed(
    max_grad_norm: float | None, paged: set[int], spill: bool, model_dir: ModelDir, make_config: MakeConfig
) -> None:
    config = make_config(
        model_dir("llama"), training__max_grad_norm=max_grad_norm, training__max_steps=23, training__save_steps=4
    )
    assert soak(config, paged, kills=4, spill=spill)


def test_a_crash_that_repeats_ends_the_run(
    model_dir: ModelDir, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model_dir("llama"), training__max_steps=4, training__save_steps=1)
    told: list[str] = []
    with Trainer(config, overwrite=True, tell=told.append) as trainer:
        with pytest.raises(ActorLostError, match=r"\(gpu_worker\), \w+ of layer-000[01]: .* again and again"):
            for record in trainer.steps():
                if record["step"] == 2:
                    assert trainer._cluster is not None
                    monkeypatch.setattr(trainer._cluster, "call", poisoned(trainer._cluster))
        assert read_status(trainer.run.path)["state"] == "failed"
    # What was on its way when it died may be seen as the place, too.
    assert 3 <= sum("died" in message for message in told) <= 6
    with Trainer(config, resume=True) as trainer:
        assert trainer.step >= 1
        assert [record["step"] for record in trainer.steps()][-1] == 4


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces what the actors are made of: by tier, what is called with a builder."""
    cloudpickle.register_pickle_by_value(sys.modules[runs.__name__])
    plain = trainer_module.tier_builders

    def wrapped(wrappers: dict[Tier, Callable[..., Any]]) -> None:
        def builders(*args: Any, **kwargs: Any) -> dict[Tier, Callable[[], Any]]:
            made = plain(*args, **kwargs)
            return made | {tier: partial(wrapper, made[tier]) for tier, wrapper in wrappers.items()}

        monkeypatch.setattr(trainer_module, "tier_builders", builders)

    return wrapped


@pytest.mark.parametrize(
    ("max_grad_norm", "save_steps", "method"), [(0.5, 1, "save"), (None, 1, "save"), (0.5, None, "finish_save")]
)
def test_a_store_that_dies_of_every_save_ends_the_run(
    max_grad_norm: float | None,
    save_steps: int | None,
    method: str,
    wrap: Callable[..., None],
    model_dir: ModelDir,
    make_config: MakeConfig,
    tmp_path: Path,
) -> None:
    """Twice is an accident: the checkpoint is written again, or that of the next step."""
    config = make_config(
        model_dir("llama"),
        training__max_steps=4 if save_steps else 1,
        training__save_steps=save_steps,
        training__max_grad_norm=max_grad_norm,
    )
    told: list[str] = []
    wrap({Tier.STORE: partial(Fatal, deaths=tmp_path / "deaths", method=method, times=5)})
    with Trainer(config, overwrite=True, tell=told.append) as trainer:
        with pytest.raises(ActorLostError, match=r"\(nvme_store\), .+ for checkpoint-\d: .* again and again"):
            list(trainer.steps())
        assert read_status(trainer.run.path)["state"] == "failed"
        assert (tmp_path / "deaths").stat().st_size == 3
    what = "one of the next step takes its place" if save_steps and not max_grad_norm else "it is written again"
    assert sum("was interrupted when the store died in" in line and what in line for line in told) == 2, told
    with Trainer(config, overwrite=True) as trainer:  # which dies twice more
        assert [record["step"] for record in trainer.steps()][-1] == config.training.max_steps
        assert (tmp_path / "deaths").stat().st_size == 5


def test_training_goes_on_while_a_checkpoint_is_written(
    wrap: Callable[..., None], model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Not a layer is written before the next step's forward pass begins; a save that held it up would never end."""
    forward = partial(Overlapping, forward=tmp_path / "forward")
    wrap({Tier.STORE: forward, Tier.WORKER: forward})
    config = make_config(
        model_dir("llama"), training__max_steps=3, training__save_steps=1, tiers__deadline_s=20, ray__dashboard=False
    )
    with Trainer(config) as trainer:
        steps = trainer.steps()
        assert [next(steps)["step"] for _ in range(3)] == [1, 2, 3]
        assert {1, 2} <= {checkpoint.step for checkpoint in list_checkpoints(trainer.run.path)}
        assert not any(trainer._cluster.restarts.values()) if trainer._cluster is not None else False


def poisoned(cluster: Any) -> Any:
    """Calls as before, but the worker dies of the forward pass of one layer."""
    call = cluster.call

    def poisoned_call(tier: Tier, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "forward" and arguments[0] == 2:
            cluster.kill(tier)
        return call(tier, method, *arguments, **options)

    return poisoned_call


def test_a_stopped_actor_is_noticed_named_and_replaced(
    model_dir: ModelDir, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them in turn, in a step and, the store, where a checkpoint begins."""
    config = make_config(model_dir("llama"), training__max_steps=7, training__save_steps=6, tiers__deadline_s=8)
    told: list[str] = []
    stops = {2: Tier.OPTIMIZER, 3: Tier.WORKER, 4: Tier.STORE, 6: Tier.STORE}
    with Trainer(config, overwrite=True, tell=told.append) as trainer:
        page(trainer, {1, 3})
        begin_save = trainer._begin_save

        def begin_save_stopped() -> None:
            os.kill(pids()[Tier.STORE], signal.SIGSTOP)
            begin_save()

        def pids() -> dict[Tier, int]:
            assert trainer._cluster is not None
            return trainer._cluster.pids

        monkeypatch.setattr(trainer, "_begin_save", begin_save_stopped)
        records = []
        for record in trainer.steps():
            records.append(record)
            if record["step"] < 5 and record["step"] in stops:
                os.kill(pids()[stops[record["step"]]], signal.SIGSTOP)
            if record["step"] == 2:  # the first in flight for a moment, when the wait begins: not to blame
                os.kill(pids()[Tier.WORKER], signal.SIGSTOP)
                threading.Timer(1.0, os.kill, (pids()[Tier.WORKER], signal.SIGCONT)).start()
        restarts = dict(trainer._cluster.restarts) if trainer._cluster is not None else {}
        stopped = digest(trainer.run.path / "checkpoint-7")
    for tier in Tier:
        assert any(re.search(rf"{tier} did not finish within 8 s .* in \w+ of (embed|layer|head)", m) for m in told), (
            told
        )
    assert not any("gpu_worker" in message and "(step 3)" in message for message in told), told
    assert sum("begin_save gave no answer within 8 s: it was killed" in message for message in told) == 2, told
    assert all(restarts[tier] >= 1 for tier in Tier)
    with Trainer(config, overwrite=True) as trainer:
        page(trainer, {1, 3})
        assert trace(trainer.steps()) == trace(records)
        assert digest(trainer.run.path / "checkpoint-7") == stopped


def test_resume_equals_uninterrupted(model_dir: ModelDir, make_config: MakeConfig) -> None:
    whole_config = make_config(model_dir("qwen3"), training__max_steps=6, training__save_steps=3)
    with Trainer(whole_config) as trainer:
        whole = trace(trainer.steps())
        expected = digest(trainer.run.path / "checkpoint-6")
        run = trainer.run.path
    # The machine dies after step 5: what counts is checkpoint-3, and the store is gone.
    for path in (run / "checkpoint-6").iterdir():
        path.unlink()
    (run / "checkpoint-6").rmdir()
    (run / ".checkpoint-6.partial").mkdir()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])
    for path in (run / "store").iterdir():
        path.unlink()
    (run / "store").rmdir()
    told: list[str] = []
    with Trainer(whole_config, resume=True, tell=told.append) as trainer:
        assert "checkpoint-6 was not complete when the run ended: ignored and removed" in told
        assert trainer.step == 3
        resumed = trace(trainer.steps())
        assert resumed == whole[3:]
        assert digest(run / "checkpoint-6") == expected
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert trace(logged) == whole
    assert not (run / ".checkpoint-6.partial").exists()
    with Trainer(whole_config, resume=True) as trainer:  # a finished run
        assert list(trainer.steps()) == []
    assert digest(run / "checkpoint-6") == expected
    with pytest.raises(RunDirectoryError, match=r"training\.learning_rate was 0\.001 and is 0\.5"):
        Trainer(make_config(model_dir("qwen3"), training__max_steps=9, training__learning_rate=0.5), resume=True)
    with pytest.raises(RunDirectoryError, match="--resume"):
        Trainer(whole_config)


def test_a_model_that_has_changed_under_its_name_is_refused(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    model = shutil.copytree(model_dir("llama"), tmp_path / "model")
    config = make_config(model, training__max_steps=1)
    with Trainer(config) as trainer:
        list(trainer.steps())
    Trainer(config, resume=True).shutdown()
    content = json.loads((model / "config.json").read_text())
    content["rope_parameters"]["rope_theta"] = 5e5
    (model / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        RunDirectoryError, match=r"rope_theta was 10000\.0 and is 500000\.0.*--set model\.name_or_path="
    ):
        Trainer(config, resume=True)
    Trainer(config, resume=True, changed=["model.name_or_path"]).shutdown()


def test_resume_at_any_step_and_with_other_settings(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The schedule goes on wherever a run is resumed; what would change its course is named, and must be meant."""
    options = {"training__lr_scheduler_type": "cosine", "training__warmup_steps": 3, "training__max_steps": 20}
    with Trainer(
        make_config(model_dir("llama"), training__save_steps=1, training__save_total_limit=20, **options)
    ) as trainer:
        records = list(trainer.steps())
        run = trainer.run.path
    rates = [record["learning_rate"] for record in records]
    assert rates[:4] == pytest.approx([0, 1e-3 / 3, 2e-3 / 3, 1e-3])
    assert rates[-1] == pytest.approx(0.5e-3 * (1 + math.cos(math.pi * 16 / 17)))

    def resumed(step: int, *, changed: tuple[str, ...] = (), **changes: Any) -> Trainer:
        copy = tmp_path / f"from-{step}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy, ignore=lambda _, names: [n for n in names if n.startswith(("checkpoint-", "store"))])
        shutil.copytree(run / f"checkpoint-{step}", copy / f"checkpoint-{step}")
        config = make_config(model_dir("llama"), training__output_dir=str(copy), **(options | changes))
        return Trainer(config, resume=True, changed=changed)

    for step in (2, 3, 4, 10):
        with resumed(step) as trainer:
            assert (trainer.step, trainer.total_steps) == (step, 20)
            assert [trainer._learning_rate(number) for number in range(step + 1, 21)] == rates[step:]
    with resumed(10) as trainer:
        assert trace(trainer.steps()) == trace(records)[10:]
    with pytest.raises(RunDirectoryError, match=r"max_steps was 20 and is 30.* --set training\.max_steps=30"):
        resumed(10, training__max_steps=30)
    with pytest.raises(RunDirectoryError, match=r"per_device_train_batch_size was 2 and is 4"):
        resumed(10, training__per_device_train_batch_size=4)
    with resumed(10, training__max_steps=30, changed=("training.max_steps",)) as trainer:
        assert trainer.total_steps == 30
        assert trainer._learning_rate(11) == pytest.approx(0.5e-3 * (1 + math.cos(math.pi * 7 / 27)))
    with resumed(10, training__max_steps=8) as trainer:  # fewer than are done
        assert list(trainer.steps()) == []
    data = tmp_path / "data.jsonl"
    before = data.read_text()
    data.write_text(before.replace(" 56,", " 57,", 1))
    with pytest.raises(RunDirectoryError, match=r"trained on other data: .*data\.jsonl .* --set data\.path="):
        resumed(10)
    assert len((tmp_path / "from-10" / "metrics.jsonl").read_text().splitlines()) == 20, "a refusal drops no records"
    resumed(10, changed=("data.path",)).shutdown()


@pytest.mark.parametrize("max_grad_norm", [0.5, None])
def test_a_non_finite_norm_never_reaches_the_masters(
    max_grad_norm: float | None, model_dir: ModelDir, make_config: MakeConfig
) -> None:
    config = make_config(
        model_dir("llama"),
        training__save_steps=1,
        training__lr_scheduler_type="constant",
        training__max_grad_norm=max_grad_norm,
    )
    with Trainer(config) as trainer:
        taken = []
        with pytest.raises(NonFiniteError, match=r"step \d+: .*(nan|inf).* the step was not taken"):
            for record in trainer.steps():
                taken.append(record)
                if record["step"] == 3:
                    trainer.change("learning_rate", 1e30)
        for spec in trainer.layers:
            for tensor in trainer.inspect(spec.name)["tensors"] if spec.tensors else ():
                assert math.isfinite(tensor["min"]) and math.isfinite(tensor["max"]), tensor
        with pytest.raises(TrainingError, match="the run has failed"):
            trainer.save_checkpoint()
        saved = sorted(trainer.run.path.glob("checkpoint-*"))
        assert saved and all(int(path.name.split("-")[1]) <= len(taken) for path in saved)
    for file in (file for path in saved for file in path.glob("*.safetensors")):
        assert all(bool(values.isfinite().all()) for values in load_file(file).values()), file
    logged = (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    assert len(logged) == len(taken)


def test_two_runs_on_one_store_and_a_stale_lock(model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path) -> None:
    store = tmp_path / "shared"
    store.mkdir()
    (store / "model.safetensors").write_text("somebody's")
    first = Trainer(make_config(model_dir("llama"), tiers__nvme_dir=str(store)))
    with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
        Trainer(make_config(model_dir("llama"), tiers__nvme_dir=str(store), training__output_dir=str(tmp_path / "b")))
    lock = json.loads((store / ".lock").read_text())
    first.shutdown()
    (store / ".lock").write_text(json.dumps({**lock, "started_s": lock["started_s"] - 100}))
    Trainer(make_config(model_dir("llama"), tiers__nvme_dir=str(store))).shutdown()
    assert not (store / ".lock").exists()
    assert (store / "model.safetensors").read_text() == "somebody's"
