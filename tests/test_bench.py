"""What the bench counts; its speeds are for people to judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.bench import bench_data

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


def test_data_is_compared_with_the_tokens_of_a_step(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(model_dir("llama"), training__gradient_accumulation_steps=2)
    told: list[str] = []
    made, batches = bench_data(config, tmp_path / "tokens", step_s=0.5, tell=told.append, rounds=1)
    for comparison in (made, batches):
        # 14 rows of 184 tokens, 4 rows a step: 4 steps an epoch.
        assert comparison.peer == pytest.approx(184 / 4 / 0.5)
        assert comparison.unit == "tokens/s"
        assert comparison.ratio > 0
    assert "184 tokens" in told[0]
    assert len(list((tmp_path / "tokens").glob("*/*/tokens.arrow"))) == 2, "each round reads the files anew"
