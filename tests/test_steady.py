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
from transformers import LlamaConfig

from megatrain_ray.bench import default_config
from megatrain_ray.config import with_override
from megatrain_ray.control import ask
from megatrain_ray.observe.memory import private_bytes
from megatrain_ray.schedule import Tier
from megatrain_ray.trainer import Trainer
from tests.models import TINY, plain_model
from tests.runs import PART_NUMEL, page

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


def held_bytes(config: Any, part_numel: int, *windows: range) -> tuple[list[dict[str, int]], str]:
    """The least that each process and the object store hold in each window of steps, and what was said and logged."""
    told: list[str] = []
    least: list[dict[str, int]] = [{} for _ in windows]
    with Trainer(config, tell=told.append) as trainer:
        page(trainer, {1}, part_numel=part_numel)
        for record in trainer.steps():
            for low in (low for low, window in zip(least, windows, strict=True) if record["step"] in window):
                gc.collect()
                assert trainer._cluster is not None
                now = {"driver": private_bytes()}
                now |= {str(tier): private_bytes(pid) for tier, pid in trainer._cluster.pids.items()}
                now |= {"object_store": record["peak_bytes"]["object_store"], "values": len(trainer._pipeline.values)}
                low |= {name: min(low.get(name, nbytes), nbytes) for name, nbytes in now.items()}
        logs = "".join(path.read_text() for path in (trainer.run.path / "logs").iterdir())
    for window, low in zip(windows, least, strict=True):
        print(f"steps {window[0]} to {window[-1]}: ", *(f"{name} {nbytes:,}" for name, nbytes in low.items()))
    return least, logs + "".join(told)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_instance")
def test_nothing_of_a_step_is_kept(tmp_path: Path, make_config: MakeConfig) -> None:
    """Processes still grow by some 10 kB a step, which `test_memory_levels_off` sees end; a layer would be 1.8 MB."""
    wide = TINY | {"hidden_size": 256, "intermediate_size": 320}
    plain_model(LlamaConfig(**wide), seed=7, spread=0.02).save_pretrained(tmp_path / "wide")
    config = make_config(
        tmp_path / "wide", training__max_steps=200, training__gradient_accumulation_steps=1, tiers__recompute=0
    )
    (early, late), said = held_bytes(config, 1 << 17, range(41, 51), range(191, 201))
    layer_bytes = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 320)
    for name in set(early) - {"values"}:
        assert late[name] - early[name] < 150 * layer_bytes / 20, name
    assert late["values"] == early["values"]
    assert "WARNING" not in said and "writable" not in said


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_instance")
def test_memory_levels_off(model_dir: ModelDir, make_config: MakeConfig) -> None:
    """Processes of this model stop growing after some 1,200 steps; what a long run takes then is constant."""
    config = make_config(
        model_dir("llama"), training__max_steps=3000, training__gradient_accumulation_steps=1, tiers__recompute=0
    )
    (early, late), _ = held_bytes(config, PART_NUMEL, range(1491, 1501), range(2991, 3001))
    for name in early:
        assert late[name] - early[name] < 1500 * 1024, name
    for process in ("driver", *map(str, Tier)):
        assert late[process] <= 1.02 * early[process], process


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
