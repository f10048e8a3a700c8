"""What the bench counts; its speeds are for people to judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_ray import bench

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


def test_data_is_compared_with_the_tokens_of_a_step(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model_dir("llama"), training__gradient_accumulation_steps=2)
    told: list[str] = []
    # A clock by which reading takes 1 s at first, to warm up, and then 8, 2 and 4 s; batches take a sixteenth of that.
    took_s = [seconds for reading_s in (1, 8, 2, 4) for seconds in (reading_s, reading_s / 16)]
    clock = (now for took in took_s for now in (100.0, 100.0 + took))
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    made, batches = bench.bench_data(config, tmp_path / "tokens", step_s=0.5, tell=told.append, rounds=3)
    # 14 rows of 184 tokens, 4 rows a step: 4 steps an epoch.
    consumed = 184 / 4 / 0.5
    for comparison, median_s in ((made, 4), (batches, 4 / 16)):
        assert comparison.ours == pytest.approx(184 / median_s)
        assert comparison.peer == pytest.approx(consumed)
        assert comparison.ratio == pytest.approx(184 / median_s / consumed)
        assert comparison.unit == "tokens/s"
    assert "184 tokens" in told[0]
    assert len(list((tmp_path / "tokens").glob("*/*/tokens.arrow"))) == 4, "each round reads the files anew"
