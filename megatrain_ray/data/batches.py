"""What one optimizer step trains on, as numbers (no torch, no ray: it crosses to the worker)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["IGNORED", "MicroBatch", "StepBatch", "make_micro_batch"]

IGNORED = -100
"""A label that is no target."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that pass the model together.

    Attributes:
        input_ids: int64 [B, S], padded on the right.
        labels: int64 [B, S], unshifted; `IGNORED` where there is no target.
        attention_mask: int64 [B, S], 0 on padding; None when no row is padded.
        position_ids: int64 [B, S], restarting at each packed sample; None for one sample a row.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    attention_mask: NDArray[np.int64] | None = None
    position_ids: NDArray[np.int64] | None = None

    @property
    def target_tokens(self) -> int:
        """Labels that count: the one at position 0 has nothing before it to predict it."""
        return int(np.count_nonzero(self.labels[:, 1:] != IGNORED))

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
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


def make_micro_batch(rows: list[tuple[NDArray[np.int64], NDArray[np.int64]]], pad_token_id: int = 0) -> MicroBatch:
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
