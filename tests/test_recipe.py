"""The recipe around the step, through the actors, against plain PyTorch."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from megatrain_ray.trainer import Trainer
from tests.conftest import write_tokens
from tests.reference import plain_training, saved_weights
from tests.runs import digest, trace

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_instance")]

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


def plain_loss(checkpoint: Path, data: Path) -> float:
    """Token-weighted loss of a checkpoint over a tokens file, one row at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32).eval()
    total, count = 0.0, 0
    for line in data.read_text().splitlines():
        row = json.loads(line)
        ids = torch.tensor([row["input_ids"]])
        targets = torch.tensor(row.get("labels", row["input_ids"]))[1:]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        total += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += int((targets != -100).sum())
    return total / count


def test_evaluation_is_plain_pytorchs_and_changes_nothing(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    held_out = write_tokens(tmp_path / "eval.jsonl", [9, 2, 23, 5, 14], 97, seed=5)
    options = {"training__max_steps": 4, "training__save_steps": 2, "training__save_total_limit": 3}
    with Trainer(make_config(model_dir("llama"), training__output_dir=str(tmp_path / "plain"), **options)) as trainer:
        expected = trace(trainer.steps())
    options |= {"training__eval_steps": 2, "data__eval_path": str(held_out)}
    with Trainer(make_config(model_dir("llama"), **options)) as trainer:
        records = list(trainer.steps())
        directory = trainer.run.path
    assert trace(records) == expected
    assert digest(directory / "checkpoint-4") == digest(tmp_path / "plain" / "checkpoint-4")
    assert ["eval_loss" in record for record in records] == [False, True, False, True]
    for record in (records[1], records[3]):
        loss = plain_loss(directory / f"checkpoint-{record['step']}", held_out)
        assert record["eval_loss"] == pytest.approx(loss, rel=1e-5)
        assert record["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_label_smoothing_is_torchs(model_dir: ModelDir, make_config: MakeConfig) -> None:
    config = make_config(model_dir("llama"), training__label_smoothing_factor=0.1, training__max_steps=3)
    with Trainer(config) as trainer:
        records = list(trainer.steps())
        expected, weights = plain_training(config, trainer._data, 3, label_smoothing=0.1)
        saved = saved_weights(trainer.run.path / "checkpoint-3")
    for record, reference in zip(records, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert record[key] == pytest.approx(reference[key], rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-5, atol=1e-5 * float(tensor.abs().max()), msg=name)


def test_uneven_micro_batches_count_by_their_targets(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Micro-batches of 3 and 61 targets give the loss, norm and weights of one batch of both."""
    random.seed(3)
    data = tmp_path / "uneven.jsonl"
    with data.open("w") as file:
        for _ in range(5):
            for length in (4, 62):  # one target fewer
                file.write(json.dumps({"input_ids": [random.randrange(3, 97) for _ in range(length)]}) + "\n")
    runs = []
    for name, rows, accumulation in (("micro", 1, 2), ("one", 2, 1)):
        config = make_config(
            model_dir("llama"),
            data__path=str(data),
            training__output_dir=str(tmp_path / name),
            training__shuffle=False,
            training__per_device_train_batch_size=rows,
            training__gradient_accumulation_steps=accumulation,
            training__max_steps=5,
        )
        with Trainer(config) as trainer:
            records = list(trainer.steps())
        runs.append((records, saved_weights(tmp_path / name / "checkpoint-5")))
    (micro, micro_weights), (one, one_weights) = runs
    assert [record["target_tokens"] for record in micro] == [64] * 5
    for left, right in zip(micro, one, strict=True):
        assert left["samples"] == right["samples"]
        for key in ("loss", "grad_norm"):
            assert left[key] == pytest.approx(right[key], rel=1e-5)
    for name, tensor in one_weights.items():
        torch.testing.assert_close(
            micro_weights[name], tensor, rtol=1e-5, atol=1e-5 * float(tensor.abs().max()), msg=name
        )


def test_length_groups_train_on_the_same_samples_with_less_padding(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    padding, samples = {}, {}
    for grouped in (False, True):
        config = make_config(
            model_dir("llama"),
            training__group_by_length=grouped,
            training__output_dir=str(tmp_path / f"run-{grouped}"),
            training__max_steps=None,
            training__num_train_epochs=1,
            training__per_device_train_batch_size=4,
            training__gradient_accumulation_steps=1,
        )
        with Trainer(config) as trainer:
            batches = [trainer.step_batch(step) for step in range(1, trainer.total_steps + 1)]
            if grouped:
                assert [record["samples"] for record in trainer.steps()] == [list(b.samples) for b in batches]
        cells = sum(micro.input_ids.size for batch in batches for micro in batch.micro_batches)
        padding[grouped] = cells - sum(batch.tokens for batch in batches)
        samples[grouped] = sorted(sample for batch in batches for sample in batch.samples)
    assert samples[True] == samples[False] == list(range(14))
    assert padding[True] < padding[False]
