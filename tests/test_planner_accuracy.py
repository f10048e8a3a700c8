"""What was planned beside what processes, object store and disk really take, watched from outside."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import LlamaConfig

from megatrain_ray.actors.cpu_optimizer import arena_bytes
from megatrain_ray.config import Config
from megatrain_ray.machine import Speeds
from megatrain_ray.observe.memory import private_bytes
from megatrain_ray.speeds import measure_speeds
from megatrain_ray.trainer import Trainer

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Case:
    """One run: a Llama, its batch, its tiers."""

    layers: int
    width: int
    inner: int
    vocabulary: int
    tokens: int
    rows: int = 1
    micro_batches: int = 1
    tied: bool = True
    placement: str = "ram"
    save_steps: int | None = None
    max_grad_norm: float = 1.0
    recompute: str = "auto"
    host_memory: str = "auto"
    max_steps: int = 4
    timed: bool = False
    eval_tokens: int = 0

    def config(self, directory: Path) -> Config:
        LlamaConfig(
            num_hidden_layers=self.layers, hidden_size=self.width, intermediate_size=self.inner,
            num_attention_heads=self.width // 64, num_key_value_heads=self.width // 64, vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied, architectures=["LlamaForCausalLM"],
        ).save_pretrained(directory / "model")  # fmt: skip
        generator = np.random.default_rng(0)
        for name, tokens in (("data", self.tokens), ("eval", self.eval_tokens)):
            rows = [generator.integers(3, self.vocabulary, tokens).tolist() for _ in range(16)]
            (directory / f"{name}.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        evaluates = self.eval_tokens > 0
        return Config.from_mapping({
            "model": {"name_or_path": str(directory / "model"), "init": "random", "dtype": "float32"},
            "data": {
                "path": str(directory / "data.jsonl"),
                "eval_path": str(directory / "eval.jsonl") if evaluates else None,
                "max_length": max(self.tokens, self.eval_tokens),
            },
            "training": {
                "output_dir": str(directory / "run"), "max_steps": self.max_steps, "save_steps": self.save_steps,
                "eval_steps": 1 if evaluates else None,
                "per_device_train_batch_size": self.rows, "gradient_accumulation_steps": self.micro_batches,
                "max_grad_norm": self.max_grad_norm,
            },
            "tiers": {
                "device": "cpu", "placement": self.placement, "recompute": self.recompute,
                "host_memory": self.host_memory,
            },
            "ray": {"dashboard": False},
        })  # fmt: skip


class _Watch:
    """The most private memory of this process and all below it, at one moment, and the most of a directory's files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.peak_bytes = self.disk_bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        me = psutil.Process()
        family = [me.pid]
        for count in range(1_000_000):
            if count % 20 == 0:
                family = [me.pid, *(child.pid for child in me.children(recursive=True))]
            with suppress(OSError):
                files = sum(entry.stat().st_blocks * 512 for entry in self.directory.iterdir())
                self.disk_bytes = max(self.disk_bytes, files)
            total = 0
            for pid in family:
                with suppress(OSError, ValueError):
                    total += private_bytes(pid)
            self.peak_bytes = max(self.peak_bytes, total)
            if self.done.wait(0.02):
                return


@contextmanager
def watched(directory: Path) -> Iterator[_Watch]:
    watch = _Watch(directory)
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    yield watch
    watch.done.set()
    thread.join()


def start(case: Case, directory: Path, *, in_turns: bool = False) -> subprocess.Popen[str]:
    """`run` in a process of its own, with a Ray of its own: nothing of other tests is in its memory.

    Args:
        in_turns: It writes a line after each step, the step's seconds, and reads one before it goes on.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    words = [json.dumps(dataclasses.asdict(case)), str(directory), *(["in-turns"] if in_turns else [])]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.test_planner_accuracy", *words],
        cwd=Path(__file__).resolve().parent.parent, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(directory / "stderr").open("w"),
    )  # fmt: skip


def result(process: subprocess.Popen[str], directory: Path) -> tuple[dict[str, float], dict[str, float]]:
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, (directory / "stderr").read_text()
    planned, measured = json.loads(output.splitlines()[-1])
    return planned, measured


def measure(case: Case, directory: Path) -> tuple[dict[str, float], dict[str, float]]:
    directory.mkdir(exist_ok=True)
    return result(start(case, directory), directory)


def take_turns(record: dict[str, Any]) -> None:
    print(record["step_time_s"], flush=True)
    sys.stdin.readline()


def run(
    case: Case, directory: Path, after_step: Callable[[dict[str, Any]], None] = lambda record: None
) -> tuple[dict[str, float], dict[str, float]]:
    """(planned, measured) bytes by tier, of a whole run with its last checkpoint, and seconds of a step.

    A timed case also has the machine's arithmetic beside the run: (before, after), in operations a second.
    """
    config = case.config(directory)
    # Others may use this machine: now, not when it was planned for the first time.
    before = measure_speeds(directory, "cpu") if case.timed else Speeds()
    records = []
    with watched(directory / "run" / "store") as watch, Trainer(config) as trainer:
        plan = trainer._prepared.plan
        arena = arena_bytes(trainer._prepared.layers, plan.shape.resident)
        for record in trainer.steps():
            records.append(record)
            after_step(record)
        time.sleep(0.1)
        assert trainer._cluster is not None
        object_store = trainer._cluster.memory().object_store_bytes()
    assert object_store is not None
    after = measure_speeds(directory, "cpu") if case.timed else Speeds()
    measured: dict[str, Any] = {**records[-1]["peak_bytes"], "object_store": object_store, "nvme": watch.disk_bytes}
    measured["total_ram"] = watch.peak_bytes + object_store + arena
    # A step in the middle of a run is predicted: earlier ones touch memory for the first time, and those after a save
    # write the checkpoint.
    every = case.save_steps or len(records) + 1
    plain = [record["step_time_s"] for record in records[len(records) // 2 :] if (record["step"] - 1) % every]
    assert plan.time is not None
    planned = {**plan.peak_bytes, "step_s": plan.time.step_s, "flops": before.float32_flops_per_s}
    return planned, {**measured, "step_s": statistics.median(plain), "flops": after.float32_flops_per_s}


def show(planned: dict[str, float], measured: dict[str, float]) -> str:
    units = {"step_s": (1, "s"), "flops": (1e9, "GFLOP/s")}
    return "\n".join(
        f"{what:14} planned {planned[what] / unit:8.2f} {name}, measured {measured[what] / unit:8.2f} {name}, ratio "
        f"{planned[what] / max(measured[what], 1e-9):.3f}"
        for what in planned
        for unit, name in [units.get(what, (MIB, "MiB"))]
    )


@pytest.mark.ray
def test_a_small_run_takes_what_was_planned(tmp_path: Path) -> None:
    """Mostly the fixed cost of the processes, which is why 10% is asked of the sum and more is allowed to parts."""
    case = Case(6, 256, 704, 8000, 256, rows=2, micro_batches=2, placement="nvme", save_steps=2, max_grad_norm=0.0)
    planned, measured = measure(case, tmp_path)
    table = show(planned, measured)
    assert planned["total_ram"] == pytest.approx(measured["total_ram"], rel=0.10), table
    assert planned["nvme"] == pytest.approx(measured["nvme"], rel=0.10), table  # how many spare files depends on timing
    for tier in ("driver", "cpu_optimizer", "ray"):
        assert planned[tier] == pytest.approx(measured[tier], rel=0.10), table
    for tier in ("gpu_worker", "nvme_store"):
        assert planned[tier] == pytest.approx(measured[tier], rel=0.25), table
    # An upper bound: the object store never takes more, and never spills.
    assert measured["object_store"] <= 1.1 * planned["object_store"], table


@pytest.mark.ray
def test_a_model_larger_than_its_memory_trains(tmp_path: Path) -> None:
    """Masters and moments alone are larger than what all processes together take, Ray's own included."""
    case = Case(64, 512, 1408, 1000, 64, placement="auto", recompute="all", host_memory="1900MiB", max_steps=3)
    state_bytes = 12 * (64 * (4 * 512 * 512 + 3 * 512 * 1408 + 2 * 512) + 1001 * 512)
    planned, measured = measure(case, tmp_path)
    table = show(planned, measured)
    assert planned["total_ram"] <= 1900 * MIB, table
    assert measured["total_ram"] < state_bytes, table
    assert planned["total_ram"] == pytest.approx(measured["total_ram"], rel=0.10), table
    assert measured["object_store"] <= 1.1 * planned["object_store"], table


@pytest.mark.ray
def test_an_evaluation_of_long_rows_takes_what_was_planned(tmp_path: Path) -> None:
    case = Case(2, 256, 2816, 8000, 20, rows=2, max_steps=2, eval_tokens=4096)
    planned, measured = measure(case, tmp_path)
    table = show(planned, measured)
    # An upper bound: how much of what is freed stays with the heap depends on timing.
    assert measured["gpu_worker"] <= planned["gpu_worker"] <= 1.5 * measured["gpu_worker"], table
    assert measured["total_ram"] <= planned["total_ram"] <= 1.25 * measured["total_ram"], table


def _take_steps(process: subprocess.Popen[str], count: int) -> float:
    """Lets a run that waits after a step go on for some; returns their seconds."""
    assert process.stdin is not None and process.stdout is not None
    seconds = 0.0
    for _ in range(count):
        process.stdin.write("\n")
        process.stdin.flush()
        seconds += float(process.stdout.readline())
    return seconds


@pytest.mark.ray
@pytest.mark.slow
def test_depth_costs_time_and_no_memory(tmp_path: Path) -> None:
    """In turns of as many layers: a moment in which others use the machine is one for both depths."""
    turns = 7
    steps = {12: 8, 96: 1}  # of a turn
    processes, seconds = {}, {depth: list[float]() for depth in steps}
    for depth, count in steps.items():
        case = Case(depth, 256, 704, 1000, 256, rows=2, recompute="all", max_steps=1 + turns * count)
        (tmp_path / str(depth)).mkdir()
        processes[depth] = start(case, tmp_path / str(depth), in_turns=True)
        stdout = processes[depth].stdout
        assert stdout is not None
        stdout.readline()  # the first step has no update before it
    for _ in range(turns):
        for depth, process in processes.items():
            seconds[depth].append(_take_steps(process, steps[depth]))
    measured = {depth: result(process, tmp_path / str(depth))[1] for depth, process in processes.items()}
    print(seconds)
    ratio = statistics.median(deep / shallow for deep, shallow in zip(seconds[96], seconds[12], strict=True))
    print(f"a layer takes {ratio:.3f} times as long in 96 layers as in 12")
    inputs = 84 * 2 * 256 * 256 * 4
    growth = measured[96]["gpu_worker"] - measured[12]["gpu_worker"] - inputs
    print(f"the worker takes {growth / MIB:.0f} MiB more, besides {inputs / MIB:.0f} MiB of saved layer inputs")
    assert abs(growth) < 0.1 * measured[12]["gpu_worker"]
    assert ratio == pytest.approx(1, rel=0.10)


LLAMA_97M = {"layers": 12, "width": 768, "inner": 2048, "vocabulary": 16000, "tokens": 512}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(**LLAMA_97M),
        Case(**LLAMA_97M, recompute="all"),
        Case(**LLAMA_97M, placement="nvme", save_steps=2),
        Case(8, 256, 704, 8000, 256, rows=2, micro_batches=4, save_steps=2, recompute="all"),
        Case(8, 256, 704, 8000, 256, rows=2, micro_batches=4, tied=False, placement="nvme"),
        Case(8, 512, 1408, 32000, 512, tied=False),
        Case(4, 512, 1408, 16000, 512, placement="nvme", save_steps=2, max_grad_norm=0.0),
    ],
    ids=["97M", "97M-recompute", "97M-nvme", "micro-batches", "nvme-untied", "wide-vocabulary", "nvme-no-clipping"],
)
def test_peaks_within_ten_percent_and_steps_within_a_quarter(case: Case, tmp_path: Path) -> None:
    for attempt in range(4):
        planned, measured = measure(dataclasses.replace(case, max_steps=16, timed=True), tmp_path / str(attempt))
        table = show(planned, measured)
        print(table)
        # A step is predicted for the machine as it was measured: again, if it is another one after the run.
        if planned["flops"] == pytest.approx(measured["flops"], rel=0.15):
            break
    assert planned["total_ram"] == pytest.approx(measured["total_ram"], rel=0.10), table
    assert planned["nvme"] == pytest.approx(measured["nvme"], rel=0.10), table
    assert measured["object_store"] <= 1.1 * planned["object_store"], table
    assert planned["step_s"] == pytest.approx(measured["step_s"], rel=0.25), table


if __name__ == "__main__":
    after_step = [take_turns] if "in-turns" in sys.argv else []
    print(json.dumps(run(Case(**json.loads(sys.argv[1])), Path(sys.argv[2]), *after_step)))
