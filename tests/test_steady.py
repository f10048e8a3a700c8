"""A long run takes what a short one takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.observe.memory import private_bytes
from megatrain_ray.trainer import Trainer
from tests.runs import page


@pytest.mark.ray
@pytest.mark.usefixtures("ray_instance")
def test_memory_is_flat_after_the_first_steps(
    model_dir: Callable[[str], Path], make_config: Callable[..., Any]
) -> None:
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
