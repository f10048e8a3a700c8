"""Streamed training through the actors equals plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.trainer import Trainer
from tests.families import FAMILIES
from tests.reference import plain_training, saved_weights

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_instance")]

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_plain_pytorch(family: str, model_dir: ModelDir, make_config: MakeConfig) -> None:
    config = make_config(model_dir(family))
    with Trainer(config) as trainer:
        records = list(trainer.steps())
        attention = "eager" if family == "gpt_oss" else "sdpa"
        expected, weights = plain_training(config, trainer._data, 8, attention=attention)
        checkpoint = trainer.run.path / "checkpoint-8"
    assert [record["step"] for record in records] == list(range(1, 9))
    assert len({record["target_tokens"] for record in records}) > 1
    assert any(record["grad_norm"] > 0.5 for record in records)
    for record, reference in zip(records, expected, strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert record[key] == pytest.approx(reference[key], rel=1e-5), (record["step"], key)
    saved = saved_weights(checkpoint)
    assert saved.keys() == weights.keys()
    for name, tensor in weights.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(
            saved[name], tensor, rtol=1e-5, atol=1e-5 * scale, msg=lambda text, name=name: name + text
        )
