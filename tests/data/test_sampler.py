"""Batches: a pure function of configuration, seed and step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain_ray.data.batches import IGNORED, make_micro_batch
from megatrain_ray.data.sampler import TrainingData, padding_token
from tests.data.makers import byte_tokenizer, load, write_jsonl

LENGTHS = [5, 17, 9, 30, 2, 12, 21, 8, 26, 3, 14, 19, 7, 11]


def tokens_file(tmp_path: Path, lengths: list[int]) -> Path:
    numbers = np.random.default_rng(0)
    rows = [{"input_ids": numbers.integers(3, 500, length).tolist()} for length in lengths]
    return write_jsonl(tmp_path / "tokens.jsonl", rows)


def epoch(data: TrainingData, number: int = 0) -> list[tuple[int, ...]]:
    first = number * data.steps_per_epoch + 1
    return [data.step_batch(step).samples for step in range(first, first + data.steps_per_epoch)]


def test_the_last_window_of_an_epoch_is_one_step_over_what_it_holds(tmp_path: Path) -> None:
    path = tokens_file(tmp_path, LENGTHS[:10])
    data = load(path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert (data.steps_per_epoch, data.total_steps) == (3, 3)
    assert epoch(data) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [len(data.step_batch(step).micro_batches) for step in (1, 2, 3)] == [4, 4, 2]
    assert [data.step_batch(step).epoch for step in (1, 3, 4)] == [1 / 3, 1.0, 4 / 3]
    assert [data.step_batch(step).step for step in (1, 3, 4)] == [1, 3, 4]


def test_fewer_samples_than_a_batch(tmp_path: Path) -> None:
    data = load(tokens_file(tmp_path, [4, 6, 5]), per_device_train_batch_size=8, gradient_accumulation_steps=4)
    batch = data.step_batch(1)
    assert (data.total_steps, batch.samples, len(batch.micro_batches)) == (1, (0, 1, 2), 1)
    assert batch.micro_batches[0].input_ids.shape == (3, 6)
    assert (batch.tokens, batch.target_tokens) == (15, 12)


@pytest.mark.parametrize(("epochs", "expected"), [(1, 3), (2.5, 8), (0.1, 1), (3, 9)])
def test_epochs_in_steps(tmp_path: Path, epochs: float, expected: int) -> None:
    path = tokens_file(tmp_path, LENGTHS[:10])
    data = load(path, per_device_train_batch_size=1, gradient_accumulation_steps=4, num_train_epochs=epochs)
    assert data.total_steps == expected
    assert load(path, max_steps=77, num_train_epochs=epochs).total_steps == 77


@pytest.mark.parametrize("options", [{}, {"data": {"packing": True, "max_length": 40}}, {"group_by_length": True}])
def test_every_epoch_holds_every_sample_once_in_another_order(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tokens_file(tmp_path, LENGTHS)
    data = load(path, shuffle=True, seed=5, gradient_accumulation_steps=2, **options)
    first, second = epoch(data), epoch(data, 1)
    for samples in (first, second):
        assert sorted(itertools.chain(*samples)) == list(range(len(LENGTHS)))
    assert first != second
    fresh = load(path, shuffle=True, seed=5, gradient_accumulation_steps=2, **options)
    assert epoch(fresh, 1) == second, "a step depends on nothing that came before it"
    assert epoch(fresh) == first
    assert epoch(load(path, shuffle=True, seed=6, gradient_accumulation_steps=2, **options)) != first


def test_padding_is_masked_and_no_target(tmp_path: Path) -> None:
    data = load(tokens_file(tmp_path, [2, 7, 4]), per_device_train_batch_size=3, gradient_accumulation_steps=1)
    (batch,) = data.step_batch(1).micro_batches
    assert batch.attention_mask is not None
    assert batch.attention_mask.sum(1).tolist() == [2, 7, 4]
    assert (batch.labels[batch.attention_mask == 0] == IGNORED).all()
    assert (batch.tokens, batch.target_tokens) == (13, 10)
    assert {array.dtype for array in (batch.input_ids, batch.labels, batch.attention_mask)} == {np.dtype(np.int64)}
    same = np.array([3, 4])
    assert make_micro_batch([(same, same), (same, same)]).attention_mask is None


def test_padding_is_a_token_that_the_model_has() -> None:
    tokenizer = byte_tokenizer(pad="<|end|>")
    assert tokenizer.pad_token_id == 7
    assert padding_token(tokenizer, 8) == 7
    assert padding_token(tokenizer, 7) == 0, "a pad token that was added without a row in the embedding"
    assert padding_token(None, 8) == 0


def test_packed_batches_hold_the_samples_that_they_name(tmp_path: Path) -> None:
    data = load(
        tokens_file(tmp_path, LENGTHS),
        data={"packing": True, "max_length": 40},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    assert data.packing
    assert data.max_row_tokens <= 40
    assert data.steps_per_epoch == 2, "184 tokens in 5 rows of 40"
    tokens = targets = 0
    for step in (1, 2):
        batch = data.step_batch(step)
        tokens, targets = tokens + batch.tokens, targets + batch.target_tokens
        found = []
        for micro_batch in batch.micro_batches:
            assert micro_batch.segment_ids is not None
            for ids, segments in zip(micro_batch.input_ids, micro_batch.segment_ids, strict=True):
                found += [ids[segments == number].tolist() for number in range(segments.max() + 1)]
        assert found == [data.corpus[sample][0].tolist() for sample in batch.samples]
    assert tokens == sum(LENGTHS)
    assert targets == sum(LENGTHS) - len(LENGTHS) == data.corpus.num_targets


def test_grouping_by_length_saves_padding(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(2, 60, 203).tolist()
    data = load(tokens_file(tmp_path, lengths), group_by_length=True, shuffle=True, per_device_train_batch_size=4)
    plain = load(tokens_file(tmp_path, lengths), shuffle=True, per_device_train_batch_size=4)
    assert data.padding_share() < 0.1 < plain.padding_share()
    assert data.plain_padding_share() == plain.plain_padding_share() == plain.padding_share()
    assert len(data.step_batch(data.steps_per_epoch).samples) == 203 % 16
    computed = sum(
        micro_batch.input_ids.size
        for step in range(1, data.steps_per_epoch + 1)
        for micro_batch in data.step_batch(step).micro_batches
    )
    assert data.padding_share() == pytest.approx(1 - sum(lengths) / computed)


def test_samples_keep_their_row_numbers_when_rows_are_left_out(tmp_path: Path) -> None:
    rows = [{"input_ids": [1]}, {"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [1, 2, 3]}]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows))
    assert data.step_batch(1).samples == (1, 3)
