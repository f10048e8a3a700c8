"""Streamed training through the actors equals plain PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.trainer import Trainer
from tests.models import FAMILIES, attn_implementation
from tests.reference import plain_training, saved_weights

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_instance")]

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]

KEY_BIAS = re.compile(r"(k_proj|c_attn|query_key_value)\.bias$")


@pytest.mark.parametrize("family", [*(f for f in FAMILIES if f != "glm4_moe"), "llama-awkward"])
def test_every_family_equals_plain_pytorch(family: str, model_dir: ModelDir, make_config: MakeConfig) -> None:
    config = make_config(model_dir(family))
    with Trainer(config) as trainer:
        records = list(trainer.steps())
        expected, weights = plain_training(config, trainer._data, 8, attention=attn_implementation(family))
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
        # Softmax does not depend on a bias of the keys: its gradient is rounding noise, which Adam scales up.
        noise = 1e-3 if KEY_BIAS.search(name) else 1e-5
        torch.testing.assert_close(saved[name], tensor, rtol=noise, atol=noise * float(tensor.abs().max()), msg=name)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_small_updates_survive(dtype: str, model_dir: ModelDir, make_config: MakeConfig) -> None:
    """A hundred steps of 1e-6 move the masters as an fp32 loop's: one is far below what a bfloat16 weight can hold."""
    config = make_config(
        model_dir("llama"),
        model__dtype=dtype,
        training__max_steps=100,
        training__learning_rate=1e-6,
        training__lr_scheduler_type="constant",
        training__warmup_steps=0,
        training__weight_decay=0.0,
    )
    with Trainer(config) as trainer:
        list(trainer.steps())
        _, weights = plain_training(config, trainer._data, 100)
        saved = saved_weights(trainer.run.path / "checkpoint-100")
    for name, start in saved_weights(Path(config.model.name_or_path)).items():
        moved, expected = (saved[name] - start).flatten(), (weights[name] - start).flatten()
        assert 2e-5 < float(expected.abs().max()) < 1.1e-4, name
        if dtype == "float32":
            torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6, msg=name)
        else:  # gradients are bfloat16's: their directions agree, and nothing is rounded away
            assert float(moved.norm() / expected.norm()) == pytest.approx(1, abs=0.05), name
            assert float(torch.cosine_similarity(moved, expected, dim=0)) > 0.95, name
