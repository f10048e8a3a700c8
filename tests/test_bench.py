"""What the bench counts; its speeds are for people to judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_ray import bench
from megatrain_ray.plain import PlainTraining
from megatrain_ray.trainer import Trainer

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


@pytest.fixture
def trainer_config(model_dir: ModelDir, make_config: MakeConfig) -> Any:
    return make_config(model_dir("llama"), training__gradient_accumulation_steps=2, training__max_steps=100)


def test_operations_of_a_step_are_those_of_its_tokens_and_targets(trainer_config: Any) -> None:
    with Trainer(trainer_config) as trainer:
        batch, layers = trainer.step_batch(1), trainer.layers
        work = bench.StepWork(trainer.prepared)
        shapes = {each.input_ids.shape for each in batch.micro_batches}
        assert any(each.tokens < each.input_ids.size for each in batch.micro_batches), "some rows are padded"
        weights = sum(tensor.numel for spec in layers[1:-1] for tensor in spec.tensors if len(tensor.shape) == 2)
        head = 97 * 32
        expected = 0.0
        for each in batch.micro_batches:
            width = each.input_ids.shape[1]
            attention = 2 * 3 * 2 * width * 32  # scores and values, 3 layers, full attention
            expected += 3 * (each.tokens * (2 * weights + attention) + each.target_tokens * 2 * head)
        assert work.model_flops(batch) == pytest.approx(expected, rel=1e-6), shapes
        # `tiers.recompute` is 2: two of three layers run forward once more, on padding too.
        padded = 0.0
        for each in batch.micro_batches:
            forward = each.input_ids.size * (2 * weights + 2 * 3 * 2 * each.input_ids.shape[1] * 32)
            padded += (3 + 2 / 3) * forward + 3 * each.target_tokens * 2 * head
        # torch counts attention's backward as 5 products instead of 4: it computes the scores again.
        assert padded <= work.executed_flops(batch) <= 1.1 * padded


@pytest.mark.parametrize("packing", [False, True])
def test_the_peer_trains_on_the_same(trainer_config: Any, ray_instance: None, packing: bool) -> None:
    changes = {"data": trainer_config.data.model_copy(update={"packing": packing})}
    config = trainer_config.model_copy(update=changes)
    with Trainer(config) as trainer:
        plain = PlainTraining(config, trainer.prepared)
        for index, record in zip(range(3), trainer.steps(), strict=False):
            taken = plain.step(
                trainer.step_batch(record["step"]),
                learning_rate=record["learning_rate"],
                checkpointing=index == 1,
            )
            assert taken.loss == pytest.approx(record["loss"], abs=1e-5)
            assert taken.seconds > 0


def test_without_room_for_a_peer_there_is_no_ratio(
    trainer_config: Any, ray_instance: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "plain_room", lambda device: 1000)
    told: list[str] = []
    step_s, rows = bench.bench_step(trainer_config, rounds=1, tell=told.append)
    steps = {row.what: row for row in rows}
    assert "would need" in told[0]
    assert steps["step, auto"].ours == step_s
    assert steps["step, auto"].ratio is None
    assert "GB" in steps["step, auto"].against
    assert steps["tokens a second, auto"].peer is None
    assert steps["model FLOPs of a step (utilisation)"].ratio > 0


def test_steps_are_compared_with_both_peers(trainer_config: Any, ray_instance: None) -> None:
    told: list[str] = []
    step_s, rows = bench.bench_step(trainer_config, rounds=1, tell=told.append)
    compared = [row for row in rows if row.what == "step, auto"]
    assert [row.against for row in compared] == [
        "in-memory PyTorch with gradient checkpointing",
        "in-memory PyTorch",
    ]
    assert all(row.ours == step_s and row.ratio > 0 for row in compared)
    idle = next(row for row in rows if row.what.startswith("device idle"))
    assert 0 <= idle.ours <= 100
    assert "float32" in told[0]
