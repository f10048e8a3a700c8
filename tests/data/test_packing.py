"""Packing: rows are full, no sample is split, and every family trains as without."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from megatrain_ray.data.batches import IGNORED, MicroBatch, make_micro_batch, make_packed_micro_batch
from megatrain_ray.data.packing import pack
from megatrain_ray.data.packing_gate import check_packing, packed_masks
from megatrain_ray.errors import ModelError
from tests.families import FAMILIES, tiny_config


def test_rows_hold_whole_samples_and_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 500)
    rows = pack(lengths, 100)
    assert sorted(rows.members.tolist()) == list(range(500))
    assert rows.lengths.tolist() == [int(lengths[rows[row]].sum()) for row in range(len(rows))]
    assert rows.lengths.max() <= 100
    assert len(rows) <= lengths.sum() / 100 * 1.03


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([5], [[0]]), ([10, 10], [[0], [1]]), ([3, 10, 7], [[0, 2], [1]]), ([6, 5, 4, 5], [[0, 2], [1, 3]])],
)
def test_best_fit(lengths: list[int], expected: list[list[int]]) -> None:
    rows = pack(np.array(lengths), 10)
    assert [rows[row].tolist() for row in range(len(rows))] == expected


def _sample(numbers: np.random.Generator, length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    ids = numbers.integers(3, vocabulary, length)
    labels = ids.copy()
    labels[: length // 3] = IGNORED
    return ids, labels


def test_a_packed_micro_batch_has_no_target_across_a_boundary() -> None:
    first, second, third = (np.arange(10, 10 + length) for length in (3, 1, 2))
    batch = make_packed_micro_batch([[(first, first), (second, second)], [(third, third)]], pad_token_id=7)
    assert batch.input_ids.tolist() == [[10, 11, 12, 10], [10, 11, 7, 7]]
    assert batch.labels.tolist() == [[-100, 11, 12, -100], [-100, 11, -100, -100]]
    assert batch.position_ids is not None and batch.segment_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1], [0, 0, -1, -1]]
    assert batch.attention_mask is None
    assert (batch.tokens, batch.target_tokens) == (6, 3)
    one_row = batch.as_one_row()
    assert one_row.input_ids.shape == (1, 8)
    assert (one_row.tokens, one_row.target_tokens) == (6, 3)


def _loss_and_gradients(
    model: nn.Module, batches: list[MicroBatch], way: str = "position_ids"
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss times tokens, and its gradients."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        inputs = {"input_ids": torch.from_numpy(batch.input_ids)}
        if batch.position_ids is not None:
            inputs["position_ids"] = torch.from_numpy(batch.position_ids)
            if way == "masks":
                inputs["attention_mask"] = packed_masks(model.config, inputs["position_ids"], torch.float32)
        logits = model(**inputs, use_cache=False).logits
        labels = torch.from_numpy(batch.labels)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        loss.backward()
        total += loss.item()
    return total, {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packing_equals_not_packing(family: str, attention: str) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config(family)
    if family == "gpt_oss" and attention == "sdpa":
        attention = "eager"  # its sinks need it; the model refuses sdpa
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    numbers = np.random.default_rng(1)
    rows = [
        [_sample(numbers, length, config.vocab_size) for length in row] for row in ((11, 2, 14), (5, 9), (20, 1, 6))
    ]
    way = check_packing(model)
    assert way == ("masks" if family == "gpt_oss" else "position_ids")
    packed_loss, packed = _loss_and_gradients(model, [make_packed_micro_batch(rows)], way)
    plain_loss, plain = _loss_and_gradients(model, [make_micro_batch([sample]) for row in rows for sample in row])
    assert packed_loss == pytest.approx(plain_loss, rel=1e-5)
    assert packed.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(packed[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max() + 1e-30))


class _Averaging(nn.Module):
    """Mixes all tokens before a position, whatever the samples: attention that knows no packing."""

    config = SimpleNamespace(_attn_implementation="eager")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, use_cache: bool = True
    ) -> object:
        hidden = self.embedding(input_ids).cumsum(1)
        return SimpleNamespace(logits=hidden @ self.embedding.weight.T)


class _WithoutPositions(_Averaging):
    def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> object:  # type: ignore[override]
        return super().forward(input_ids)


def test_a_model_that_mixes_packed_samples_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lets packed samples see each other.*set data\.packing: false"):
        check_packing(_Averaging())
    with pytest.raises(ModelError, match="with position_ids: TypeError"):
        check_packing(_WithoutPositions())
