"""Packing: rows are full, no sample is split, and every family trains as without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatrain_ray.data.batches import IGNORED, MicroBatch, make_micro_batch, make_packed_micro_batch
from megatrain_ray.data.packing import pack
from megatrain_ray.data.packing_gate import check_packing, packed_masks
from megatrain_ray.errors import ModelError
from megatrain_ray.gate import LabelledBatch, plain_gradients, streamed_gradients
from megatrain_ray.model import MicroBatchTensors, StreamModel
from megatrain_ray.prepare import _needs_packed_masks
from tests.models import FAMILIES, VOCAB_SIZE, attn_implementation, plain_model


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


def _sample(numbers: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    ids = numbers.integers(3, VOCAB_SIZE, length)
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


def _tensors(batch: MicroBatch, way: str, config: Any) -> LabelledBatch:
    """As the worker hands it to the model."""
    positions = None if batch.position_ids is None else torch.from_numpy(batch.position_ids)
    mask: Any = None
    if positions is not None and way == "masks":
        mask = packed_masks(config, positions, torch.float32)
    inputs = MicroBatchTensors(torch.from_numpy(batch.input_ids), mask, positions)
    return LabelledBatch(inputs, torch.from_numpy(batch.labels))


def _assert_same(got: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, name) for family in FAMILIES for name in sorted({attn_implementation(family), "eager"})],
)
def test_packing_equals_not_packing(family: str, attention: str) -> None:
    config = FAMILIES[family]()
    plain = plain_model(config, attn=attention)
    way = check_packing(plain)
    assert way == ("masks" if family == "gpt_oss" else "position_ids")
    numbers = np.random.default_rng(1)
    rows = [[_sample(numbers, length) for length in row] for row in ((11, 2, 14), (5, 9), (20, 1, 6))]
    packed = _tensors(make_packed_micro_batch(rows), way, plain.config)
    alone = [_tensors(make_micro_batch([sample]), way, plain.config) for row in rows for sample in row]
    expected = plain_gradients(plain, alone)
    _assert_same(plain_gradients(plain, [packed]), expected)
    streamed = StreamModel.from_config(config, attn_implementation=attention)
    streamed.train(False)
    params = {name: param.detach() for name, param in plain.named_parameters()}
    streamed.load_constants({name: plain.get_buffer(name) for name in streamed.constants})
    _assert_same(streamed_gradients(streamed, params, [packed]), expected)


class _Mixing(nn.Module):
    """Mixes all tokens before a position, whatever the samples: attention that knows no packing."""

    config = SimpleNamespace(_attn_implementation="eager")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def mix(self, input_ids: Tensor) -> object:
        hidden = self.embedding(input_ids).cumsum(1)
        return SimpleNamespace(logits=hidden @ self.embedding.weight.T)


class _Averaging(_Mixing):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = True) -> object:
        return self.mix(input_ids)


class _WithoutPositions(_Mixing):
    def forward(self, input_ids: Tensor, use_cache: bool = True) -> object:
        return self.mix(input_ids)


def test_flash_attention_is_refused() -> None:
    model = StreamModel.from_config(FAMILIES["llama"]())
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match=r"data\.packing with attn_implementation flash_attention_2.* use sdpa"):
        _needs_packed_masks(model, False)


def test_a_model_that_mixes_packed_samples_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lets packed samples see each other.*set data\.packing: false"):
        check_packing(_Averaging())
    with pytest.raises(ModelError, match="with position_ids: TypeError"):
        check_packing(_WithoutPositions())
