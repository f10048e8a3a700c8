"""What one optimizer step trains on, as numbers (no torch, no ray: it crosses to the worker)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["IGNORED", "MicroBatch", "StepBatch", "make_micro_batch", "make_packed_micro_batch"]

IGNORED = -100
"""A label that is no target."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that pass the model together.

    A packed row has no attention mask: transformers tells its samples apart where ``position_ids`` restart, and only
    looks when there is neither a mask nor a cache (pass ``use_cache=False``). Padding is one more sample of its row.

    Attributes:
        input_ids: int64 [B, S], padded on the right.
        labels: int64 [B, S], unshifted; `IGNORED` where there is no target.
        attention_mask: int64 [B, S], 0 on padding; None when no row is padded, or rows are packed.
        position_ids: int64 [B, S], restarting at each packed sample; None for one sample a row.
        segment_ids: int64 [B, S], number of the sample within its packed row, -1 on padding; None for one sample a row.
    """

    input_ids: Ints
    labels: Ints
    attention_mask: Ints | None = None
    position_ids: Ints | None = None
    segment_ids: Ints | None = None

    @property
    def target_tokens(self) -> int:
        """Labels that count: the one at position 0 has nothing before it to predict it."""
        return int(np.count_nonzero(self.labels[:, 1:] != IGNORED))

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        if self.segment_ids is not None:
            return int(np.count_nonzero(self.segment_ids >= 0))
        return self.input_ids.size if self.attention_mask is None else int(self.attention_mask.sum())


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step.

    Attributes:
        step: From 1.
        epoch: Epochs done after this step.
        micro_batches: In order.
        samples: Row indices in file order over the data files, from 0.
    """

    step: int
    epoch: float
    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[int, ...]

    @property
    def target_tokens(self) -> int:
        return sum(micro_batch.target_tokens for micro_batch in self.micro_batches)

    @property
    def tokens(self) -> int:
        return sum(micro_batch.tokens for micro_batch in self.micro_batches)


def make_micro_batch(rows: Sequence[tuple[Ints, Ints]], pad_token_id: int = 0) -> MicroBatch:
    """Pads rows of (input ids, labels) to the longest."""
    width = max(len(ids) for ids, _ in rows)
    input_ids = np.full((len(rows), width), pad_token_id, np.int64)
    labels = np.full((len(rows), width), IGNORED, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for index, (ids, row_labels) in enumerate(rows):
        input_ids[index, : len(ids)] = ids
        labels[index, : len(ids)] = row_labels
        mask[index, : len(ids)] = 1
    return MicroBatch(input_ids, labels, None if mask.all() else mask)


def make_packed_micro_batch(rows: Sequence[Sequence[tuple[Ints, Ints]]], pad_token_id: int = 0) -> MicroBatch:
    """Puts the samples of each row end to end, pads rows to the longest; no sample predicts the next one's start."""
    width = max(sum(len(ids) for ids, _ in samples) for samples in rows)
    input_ids = np.full((len(rows), width), pad_token_id, np.int64)
    labels = np.full((len(rows), width), IGNORED, np.int64)
    position_ids = np.empty((len(rows), width), np.int64)
    segment_ids = np.full((len(rows), width), -1, np.int64)
    for index, samples in enumerate(rows):
        start = 0
        for number, (ids, sample_labels) in enumerate(samples):
            end = start + len(ids)
            input_ids[index, start:end] = ids
            labels[index, start + 1 : end] = sample_labels[1:]
            position_ids[index, start:end] = np.arange(len(ids))
            segment_ids[index, start:end] = number
            start = end
        position_ids[index, start:] = np.arange(width - start)
    return MicroBatch(input_ids, labels, None, position_ids, segment_ids)
