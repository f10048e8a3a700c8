"""Whole commands, interrupted from outside: signals, the machine's death, disks and memory that are too small."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from megatrain_ray.checkpoint.directory import find_problem
from megatrain_ray.cli import _Signals
from megatrain_ray.config import load_config, with_override
from megatrain_ray.control import NotLiveError, ask
from megatrain_ray.direct_io import ALIGNMENT
from megatrain_ray.errors import TrainingError
from megatrain_ray.observe.trackers import Trackers
from megatrain_ray.prepare import prepare
from megatrain_ray.run_directory import RunDirectory
from megatrain_ray.trainer import Trainer
from tests.commands import Command, run
from tests.conftest import write_tokens
from tests.runs import digest, trace

pytestmark = pytest.mark.ray

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


def numbers(run_dir: Path) -> list[int]:
    """Of the checkpoints, by their names."""
    return sorted(int(path.name.split("-")[1]) for path in run_dir.glob("checkpoint-*"))


def records(run_dir: Path) -> list[dict[str, Any]]:
    return RunDirectory(run_dir).read_metrics()


def busy_with(run_dir: Path, action: str) -> bool:
    """Whether an actor does this now."""
    with contextlib.suppress(NotLiveError, TrainingError):
        return any(actor["action"] == action for actor in ask(run_dir, "status")["actors"].values())
    return False


def is_saving(run_dir: Path) -> bool:
    return any(run_dir.glob(".checkpoint-*.partial"))


# --- signals

PHASES: dict[str, Callable[[Path], object]] = {
    "start": lambda run_dir: (run_dir / "about.json").exists(),
    "step": lambda run_dir: len(records(run_dir)) >= 3,
    "evaluation": lambda run_dir: busy_with(run_dir, "evaluate"),
    "save": lambda run_dir: is_saving(run_dir),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.usefixtures("ray_instance")
def test_a_signal_ends_a_run_with_a_complete_checkpoint_or_none(
    phase: str, model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        model_dir("llama"),
        training__max_steps=100_000,
        training__save_steps=2,
        training__eval_steps=3,
        data__eval_path=str(write_tokens(tmp_path / "eval.jsonl", [8] * 200, 97, seed=5)),
    )
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    command = Command("train", "run.yaml", cwd=tmp_path)
    run_dir = tmp_path / "run"
    command.until(lambda: run_dir.is_dir() and PHASES[phase](run_dir), poll_s=0.002)
    if phase == "step":
        os.killpg(command.pid, signal.SIGINT)  # Ctrl-C reaches everything that the terminal has started
    else:
        command.send_signal(signal.SIGTERM)
    status = command.wait(60)
    assert status == (130 if phase == "step" else 143), command.err
    assert command.leaves_nothing(), command.family()
    assert not (run_dir / "store" / ".lock").exists()
    assert not is_saving(run_dir)
    done = len(records(run_dir))
    assert all(find_problem(run_dir / f"checkpoint-{number}", deep=True) is None for number in numbers(run_dir))
    assert (numbers(run_dir)[-1:] or [0]) == [done]
    assert (done == 0) == (phase == "start")
    if phase == "evaluation":
        assert done % 3 == 0 and "eval_loss" not in records(run_dir)[-1], "the signal waited for the evaluation"
    target = done + 1
    config = with_override(config, f"training.max_steps={target}")
    sent: list[int] = []
    monkeypatch.setattr(Trackers, "publish", lambda _, record, **how: sent.append(record["step"]))
    with Trainer(config, resume=True, changed=["training.max_steps"]) as trainer:
        list(trainer.steps())
    assert sent == ([done] if phase == "evaluation" else []) + [target]
    assert [record["step"] for record in records(run_dir)] == list(range(1, target + 1))
    evaluated = [record["step"] for record in records(run_dir) if "eval_loss" in record]
    assert evaluated == sorted({*range(3, target + 1, 3), target})


@pytest.mark.usefixtures("ray_instance")
def test_a_signal_that_python_drops_ends_the_run_before_its_first_step(
    model_dir: ModelDir, make_config: MakeConfig
) -> None:
    """What a signal handler raises while a finalizer runs goes nowhere."""
    signals = _Signals()
    with pytest.raises(SystemExit):
        signals._handle(signal.SIGTERM, None)
    with Trainer(make_config(model_dir("llama"))) as trainer:
        signals.attach(trainer.request_stop)
        assert list(trainer.steps()) == []
        assert signals.received == signal.SIGTERM
        assert trainer.state == "stopped" and numbers(trainer.run.path) == []


# --- the machine, the driver


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("ray_instance")
def test_killed_while_saving_and_resumed_equals_undisturbed(
    kills: int, model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    """All processes die at once while a checkpoint is written; every second time only the driver does."""
    options = {
        "training__max_steps": 3 * kills + 3,
        "training__save_steps": 1,
        "training__save_total_limit": 2,
        "training__lr_scheduler_type": "linear",
        "tiers__placement": "nvme",
    }
    with Trainer(make_config(model_dir("llama"), training__output_dir=str(tmp_path / "plain"), **options)) as trainer:
        undisturbed = trace(trainer.steps())
    (tmp_path / "run.yaml").write_text(make_config(model_dir("llama"), **options).to_yaml())
    run_dir = tmp_path / "run"
    moments = random.Random(kills)
    interrupted = 0
    for kill in range(kills):
        before = (numbers(run_dir)[-1:] or [0])[0]
        command = Command("train", "run.yaml", "--resume", cwd=tmp_path)
        command.until(lambda before=before: (numbers(run_dir)[-1:] or [0])[0] > before)
        command.until(lambda: is_saving(run_dir), poll_s=0.001)
        time.sleep(moments.uniform(0, 0.2))
        if kill % 2:
            command.kill()
            command.wait(60)
        else:
            command.kill_family()
        assert command.leaves_nothing(), command.family()
        interrupted += is_saving(run_dir)
        assert len(numbers(run_dir)) >= 1
        if before:
            assert f"resuming from {run_dir / f'checkpoint-{before}'} " in command.err
    assert interrupted, "no save was interrupted"
    newest = numbers(run_dir)[-1]
    last = run("train", "run.yaml", "--resume", cwd=tmp_path)
    assert last.returncode == 0, last.err
    assert f"resuming from {run_dir / f'checkpoint-{newest}'} " in last.err
    assert trace(records(run_dir)) == undisturbed
    end = f"checkpoint-{options['training__max_steps']}"
    assert digest(run_dir / end) == digest(tmp_path / "plain" / end)
    assert not is_saving(run_dir)
    assert len(numbers(run_dir)) == 2
    told: list[str] = []
    with Trainer(load_config(tmp_path / "run.yaml"), resume=True, tell=told.append) as trainer:
        assert list(trainer.steps()) == []
    assert any("already complete" in message for message in told)
    assert digest(run_dir / end) == digest(tmp_path / "plain" / end)


# --- disks and memory that are too small


class SmallDisk:
    """File systems in memory of a given size, in a namespace that only commands with ``prefix`` see."""

    def __init__(self, mounts: dict[Path, int]) -> None:
        script = [f"mount -t tmpfs -o size={size} tmpfs '{path}'" for path, size in mounts.items()]
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", "; ".join([*script, "echo ready", "cat"])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        self.is_there = self._holder.stdout.readline() == "ready\n"
        pid = str(self._holder.pid)
        self.prefix = ("nsenter", "--target", pid, "--user", "--mount", "--preserve-credentials", "--")

    def path(self, path: Path) -> Path:
        """The same directory, seen from here."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    def fill(self, directory: Path, *, leave: int = 0) -> None:
        """Writes until ``leave`` bytes are free."""
        inside = self.path(directory)
        with (inside / "filler").open("wb") as file:
            file.write(bytes(max(shutil.disk_usage(inside).free - leave, 0)))

    def close(self) -> None:
        self._holder.communicate()


def write_config(directory: Path, config: Any) -> str:
    """Its absolute path: a command in another namespace starts at the root."""
    path = directory / "run.yaml"
    path.write_text(config.to_yaml())
    return str(path)


@pytest.fixture
def small_disk() -> Iterator[Callable[[dict[Path, int]], SmallDisk]]:
    made: list[SmallDisk] = []

    def make(mounts: dict[Path, int]) -> SmallDisk:
        made.append(SmallDisk(mounts))
        if not made[-1].is_there:
            pytest.skip("no mount namespaces for this user")
        return made[-1]

    yield make
    for disk in made:
        disk.close()


def fill_while_paused(command: Command, disk: SmallDisk, output: Path, *, leave: int = 0) -> None:
    """Holds the run that starts in ``output`` before its next step, and takes its disk away."""
    inside = disk.path(output) / "run"
    command.until((inside / "control.sock").exists)
    ask(inside, "pause")
    command.until(lambda: ask(inside, "status")["state"] == "paused")
    disk.fill(output, leave=leave)
    ask(inside, "resume")


def test_a_disk_that_fills_during_a_run(
    small_disk: Callable[[dict[Path, int]], SmallDisk], model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    output = tmp_path / "small"
    output.mkdir()
    disk = small_disk({output: 60 << 20})
    config = make_config(
        model_dir("llama"), training__output_dir=str(output / "run"), tiers__placement="nvme", training__max_steps=6
    )
    config_path = write_config(tmp_path, config)
    command = Command("train", config_path, cwd=tmp_path, prefix=disk.prefix)
    inside = disk.path(output) / "run"
    fill_while_paused(command, disk, output)
    assert command.wait(60) == 1, command.err
    assert re.search(r"\d+ (bytes )?free.*resume from the newest checkpoint", command.last_line)
    assert "Traceback" not in command.err
    assert command.leaves_nothing()
    (disk.path(output) / "filler").unlink()
    again = run("train", config_path, "--resume", cwd=tmp_path, prefix=disk.prefix)
    assert again.returncode == 0, again.err
    assert [record["step"] for record in records(inside)] == list(range(1, 7))


def test_room_for_one_and_a_half_checkpoints(
    small_disk: Callable[[dict[Path, int]], SmallDisk], model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    output = tmp_path / "small"
    output.mkdir()
    disk = small_disk({output: 60 << 20})
    config = make_config(
        model_dir("llama"),
        training__output_dir=str(output / "run"),
        training__save_total_limit=1,
        training__max_steps=100_000,
        training__lr_scheduler_type="constant",
        tiers__placement="ram",
    )
    config_path = write_config(tmp_path, config)
    command = Command("train", config_path, cwd=tmp_path, prefix=disk.prefix)
    inside = disk.path(output) / "run"
    command.until(lambda: inside.is_dir() and records(inside))
    command.send_signal(signal.SIGTERM)
    assert command.wait(60) == 143, command.err
    (first,) = numbers(inside)
    before = digest(inside / f"checkpoint-{first}")
    size = sum(path.stat().st_size for path in (inside / f"checkpoint-{first}").iterdir())
    command = Command(
        "train", config_path, "--resume", "--set", "training.save_steps=1", cwd=tmp_path, prefix=disk.prefix
    )
    fill_while_paused(command, disk, output, leave=size // 2)
    assert command.wait(60) == 1, command.err
    assert re.search(r"checkpoint-\d+: a checkpoint needs \d+ bytes, the file system has \d+ free", command.last_line)
    assert command.leaves_nothing()
    assert numbers(inside) == [first]
    assert not is_saving(inside)
    assert digest(inside / f"checkpoint-{first}") == before
    (disk.path(output) / "filler").unlink()
    target = f"training.max_steps={first + 2}"
    again = run("train", config_path, "--resume", "--set", target, cwd=tmp_path, prefix=disk.prefix)
    assert again.returncode == 0, again.err
    assert numbers(inside) == [first + 2]


def test_a_resumed_run_needs_no_room_for_what_it_has(
    small_disk: Callable[[dict[Path, int]], SmallDisk], make_config: MakeConfig, tmp_path: Path
) -> None:
    """On a disk with room for the store and three checkpoints, two of them kept."""
    LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=4000,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    output = tmp_path / "small"
    output.mkdir()
    config = make_config(
        tmp_path / "model",
        model__init="random",
        training__output_dir=str(output / "run"),
        training__save_steps=1,
        training__max_steps=3,
        tiers__placement="nvme",
    )
    plan = prepare(config, RunDirectory(output / "run")).plan
    # Records, logs and headers of files need room too; a resumed run must not ask for two checkpoints more.
    disk = small_disk({output: plan.disk_bytes + plan.checkpoint_bytes})
    config_path = write_config(tmp_path, config)
    longer = ("--resume", "--set", "training.max_steps=4")
    for options in ((), longer):
        command = run("train", config_path, *options, cwd=tmp_path, prefix=disk.prefix)
        assert command.returncode == 0, command.err
    assert numbers(disk.path(output) / "run") == [3, 4]
    disk.fill(output, leave=1 << 16)
    again = run("train", config_path, *longer, cwd=tmp_path, prefix=disk.prefix)
    assert again.returncode == 0, again.err
    assert "already complete" in again.err


def test_store_and_checkpoints_are_checked_against_their_own_disks(
    small_disk: Callable[[dict[Path, int]], SmallDisk], model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    disk = small_disk({small: 64 << 10})
    for key in ("training.output_dir", "tiers.nvme_dir"):
        dirs = {"training__output_dir": str(tmp_path / "run"), "tiers__nvme_dir": str(tmp_path / "store")}
        config = make_config(
            model_dir("llama"), **{**dirs, key.replace(".", "__"): str(small / "here")}, tiers__placement="nvme"
        )
        command = run("train", write_config(tmp_path, config), cwd=tmp_path, prefix=disk.prefix, deadline_s=60)
        assert command.returncode == 2, command.err
        assert re.search(
            rf"no space on disk: .* in {small}/here needs? .*; 0.1 MiB are free: .*set {key} to", command.last_line
        )
        assert not (small / "here").exists()


def test_a_small_shared_memory_is_refused_with_what_is_needed(
    small_disk: Callable[[dict[Path, int]], SmallDisk], model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    disk = small_disk({Path("/dev/shm"): 64 << 20})
    config_path = write_config(tmp_path, make_config(model_dir("llama")))
    command = run("train", config_path, cwd=tmp_path, prefix=disk.prefix, deadline_s=60)
    assert command.returncode == 2, command.err
    assert re.search(r"needs [\d.]+ MiB of /dev/shm, which has 64.0 MiB", command.last_line)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_written_is_refused(
    small_disk: Callable[[dict[Path, int]], SmallDisk], model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Read-only for everybody, root included."""
    output = tmp_path / "small"
    output.mkdir()
    disk = small_disk({output: 1 << 20})
    subprocess.run([*disk.prefix, "mount", "-o", "remount,ro", str(output)], check=True)
    config = make_config(model_dir("llama"), training__output_dir=str(output / "run"))
    config_path = write_config(tmp_path, config)
    command = run("train", config_path, cwd=tmp_path, prefix=disk.prefix, deadline_s=60)
    assert command.returncode == 2, command.err
    assert command.last_line == f"error: {output / 'run'}: cannot be used: Read-only file system"


@pytest.mark.usefixtures("ray_instance")
def test_reruns_leave_no_debris(model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path) -> None:
    """Three runs into one directory take the disk of one."""
    config = make_config(model_dir("llama"), training__max_steps=3, training__save_steps=2, tiers__placement="nvme")
    store, others = tmp_path / "run" / "store", []
    for _ in range(3):
        with Trainer(config, overwrite=True) as trainer:
            list(trainer.steps())
        files = {path for path in (tmp_path / "run").rglob("*") if path.is_file() and "logs" not in path.parts}
        others.append({path for path in files if path.parent != store})
        # How many spare files the store has found use for depends on who was first; it never needs more than planned.
        layers = [path.stat().st_size for path in files if path.suffix == ".safetensors" and path.parent == store]
        planned = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
        headers = len(layers) * ALIGNMENT
        assert 0 < sum(layers) - headers <= planned["store_bytes"]
    assert others[0] == others[1] == others[2]
