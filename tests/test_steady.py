"""A long run takes what a short one takes."""

from __future__ import annotations

import gc
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.bench import default_config
from megatrain_ray.config import with_override
from megatrain_ray.control import ask
from megatrain_ray.observe.memory import private_bytes
from megatrain_ray.trainer import Trainer
from tests.runs import page

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_instance")
def test_memory_is_flat_after_the_first_steps(model_dir: ModelDir, make_config: MakeConfig) -> None:
    config = make_config(
        model_dir("llama"), training__max_steps=200, training__gradient_accumulation_steps=1, tiers__recompute=0
    )
    told: list[str] = []
    held: dict[int, dict[str, int]] = {}
    with Trainer(config, tell=told.append) as trainer:
        page(trainer, {1})
        for record in trainer.steps():
            if record["step"] in range(41, 51) or record["step"] > 190:
                gc.collect()
                assert trainer._cluster is not None
                processes = {"driver": private_bytes()}
                processes |= {str(tier): private_bytes(pid) for tier, pid in trainer._cluster.pids.items()}
                store = {"object_store": record["peak_bytes"]["object_store"], "values": len(trainer._pipeline.values)}
                held[record["step"]] = processes | store
        logs = "".join(path.read_text() for path in (trainer.run.path / "logs").iterdir())
    early = {name: min(held[step][name] for step in range(41, 51)) for name in held[50]}
    late = {name: min(held[step][name] for step in range(191, 201)) for name in held[200]}
    print(*(f"{name}: {early[name]:,} at step 50, {late[name]:,} at step 200" for name in early), sep="\n")
    for name in early:
        assert late[name] <= 1.02 * early[name], name
    assert "WARNING" not in logs and "writable" not in "".join(told)


WATCHER = """
import itertools, sys, time
from pathlib import Path
from megatrain_ray.control import ask

def timed(command, **arguments):
    started_s = time.perf_counter()
    ask(Path(sys.argv[1]), command, **arguments)
    print(command, time.perf_counter() - started_s, flush=True)

for layer in itertools.cycle(range(int(sys.argv[2]))):
    timed("inspect", layer=str(layer))
    for _ in range(8):
        timed("status")
        time.sleep(1)
"""


def timed(work: Callable[[], Any]) -> float:
    """Median seconds."""
    times = []
    for _ in range(5):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


@pytest.mark.slow
@pytest.mark.ray
def test_what_watching_costs(tmp_path: Path) -> None:
    """Blocks of steps with a `status` a second and an `inspect` each, between blocks without: printed ratios."""
    rounds, block = 2, 3
    config = default_config(tmp_path, placement="ram")
    config = with_override(config, f"training.max_steps={1 + 2 * rounds * block}")
    times: dict[bool, list[float]] = {True: [], False: []}
    said = ""
    with Trainer(config) as trainer:
        steps = trainer.steps()
        next(steps)  # warm-up
        layers = len(trainer._prepared.layers)
        for index in range(2 * rounds):
            watched = index % 4 in (1, 2)  # off, on, on, off: a drift of the machine's speed meets both
            command = [sys.executable, "-c", WATCHER, str(trainer.run.path), str(layers)]
            watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if watched else None
            if watcher is not None and watcher.stdout is not None:
                said += watcher.stdout.readline()  # it has started
            times[watched] += [next(steps)["step_time_s"] for _ in range(block)]
            if watcher is not None:
                watcher.kill()
                said += watcher.communicate()[0]
        assert list(steps) == []
        work_s = {
            "status": timed(partial(ask, trainer.run.path, "status")),
            "inspect": statistics.mean(
                timed(partial(ask, trainer.run.path, "inspect", layer=str(layer))) for layer in range(layers)
            ),
        }
    answers = {name: re.findall(rf"{name} (\S+)", said) for name in ("status", "inspect")}
    assert all(answers.values())
    for name, seconds in answers.items():
        print(f"{name}: {len(seconds)} answers, median {1e3 * statistics.median(map(float, seconds)):.1f} ms")
    share = work_s["status"] / 1 + work_s["inspect"] / 8
    print(*(f"{name} without waiting: {1e3 * seconds:.2f} ms" for name, seconds in work_s.items()), sep="\n")
    print(f"a status a second and an inspect every 8 s: {share:.2%} of the time")
    watched_s, alone_s = statistics.median(times[True]), statistics.median(times[False])
    print(f"step watched {watched_s:.3f} s, alone {alone_s:.3f} s, ratio {watched_s / alone_s:.4f}")
