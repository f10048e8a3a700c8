"""Depth, placement and weights kept or emitted twice change when things happen, never what comes out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from megatrain_ray import trainer as trainer_module
from megatrain_ray.schedule import Tier
from megatrain_ray.trainer import Trainer
from tests import runs
from tests.runs import Delayed, digest, page, trace

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_instance")]

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each actor is slow at random."""
    cloudpickle.register_pickle_by_value(sys.modules[runs.__name__])
    plain = trainer_module.tier_builders

    def delayed(*args: Any, **kwargs: Any) -> dict[Tier, Callable[[], Any]]:
        builders = plain(*args, **kwargs)
        return {tier: partial(Delayed, build, 0.004, seed) for seed, (tier, build) in enumerate(builders.items())}

    monkeypatch.setattr(trainer_module, "tier_builders", delayed)


def run(config: Any, paged: Iterable[int] = ()) -> tuple[Any, dict[str, str]]:
    with Trainer(config, overwrite=True) as trainer:
        page(trainer, set(paged))
        records = list(trainer.steps())
        return trace(records), digest(trainer.run.path / f"checkpoint-{trainer.step}")


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("max_grad_norm", [0.5, None])
def test_pipelined_equals_serial_bit_for_bit(
    max_grad_norm: float | None, model_dir: ModelDir, make_config: MakeConfig
) -> None:
    def config(depth: int) -> Any:
        return make_config(
            model_dir("llama-tied"),
            tiers__prefetch_depth=depth,
            training__max_grad_norm=max_grad_norm,
            training__max_steps=4,
        )

    serial = run(config(0))
    assert run(config(1)) == serial
    assert run(config(3), paged={0, 2}) == serial


def test_keeping_graphs_changes_nothing(model_dir: ModelDir, make_config: MakeConfig) -> None:
    plain = run(make_config(model_dir("llama"), training__max_steps=3))
    assert run(make_config(model_dir("llama"), training__max_steps=3, tiers__recompute=1)) == plain


def test_bfloat16_pages_like_ram(model_dir: ModelDir, make_config: MakeConfig) -> None:
    config = make_config(model_dir("llama"), training__max_steps=3, model__dtype="bfloat16")
    assert run(config, paged={0, 1, 2, 3, 4}) == run(config)
