"""Actors die, runs stop, and the numbers stay the same to the last bit."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.errors import NonFiniteError, RunDirectoryError
from megatrain_ray.schedule import Tier
from megatrain_ray.trainer import Trainer
from tests.runs import digest, page, trace

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_instance")]

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


def kill_later(trainer: Trainer, tier: Tier, delay_s: float) -> threading.Thread:
    """SIGKILL to a tier's process, from beside the run."""
    assert trainer._cluster is not None
    pid = trainer._cluster.pids[tier]

    def kill() -> None:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize(("max_grad_norm", "paged"), [(0.5, {1, 3}), (None, set[int]())], ids=["clipped", "eager"])
def test_killed_equals_not_killed(
    max_grad_norm: float | None, paged: set[int], model_dir: ModelDir, make_config: MakeConfig
) -> None:
    config = make_config(
        model_dir("llama"), training__max_grad_norm=max_grad_norm, training__max_steps=7, training__save_steps=2
    )
    with Trainer(config, overwrite=True) as trainer:
        page(trainer, paged)
        undisturbed = trace(trainer.steps())
        expected = digest(trainer.run.path / "checkpoint-7")
    told: list[str] = []
    chance = random.Random(1)
    victims = {2: Tier.STORE, 4: Tier.OPTIMIZER, 5: Tier.WORKER}
    with Trainer(config, overwrite=True, tell=told.append) as trainer:
        page(trainer, paged)
        records, killers = [], []
        for record in trainer.steps():
            records.append(record)
            if record["step"] in victims:
                killers.append(kill_later(trainer, victims[record["step"]], chance.uniform(0.0, 0.08)))
        for killer in killers:
            killer.join()
        assert trace(records) == undisturbed
        assert digest(trainer.run.path / "checkpoint-7") == expected
    assert sum("it restarts" in message for message in told) >= 2


def test_a_stopped_actor_is_noticed_named_and_replaced(model_dir: ModelDir, make_config: MakeConfig) -> None:
    config = make_config(model_dir("llama"), training__max_steps=4, tiers__deadline_s=8)
    told: list[str] = []
    with Trainer(config, overwrite=True, tell=told.append) as trainer:
        for record in trainer.steps():
            if record["step"] == 2:
                assert trainer._cluster is not None
                os.kill(trainer._cluster.pids[Tier.OPTIMIZER], signal.SIGSTOP)
    message = next(message for message in told if "did not finish" in message)
    assert ("cpu_optimizer" in message and "8 s" in message and "layer-" in message) or "embed" in message


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
    with Trainer(whole_config, resume=True) as trainer:
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


def test_a_non_finite_norm_never_reaches_the_masters(model_dir: ModelDir, make_config: MakeConfig) -> None:
    config = make_config(
        model_dir("llama"), training__learning_rate=1e30, training__save_steps=1, training__warmup_steps=0
    )
    with Trainer(config) as trainer:
        taken = []
        with pytest.raises(NonFiniteError, match="the step was not taken"):
            for record in trainer.steps():
                taken.append(record)
        newest = max(trainer.run.path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        assert int(newest.name.split("-")[1]) <= len(taken)
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
