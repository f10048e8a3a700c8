"""Packing: several samples a row, none split (pure: numpy alone)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PackedRows", "pack"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Which samples lie in which row.

    Attributes:
        members: Sample numbers, row after row.
        bounds: Row r holds ``members[bounds[r]:bounds[r + 1]]``.
        lengths: Tokens of each row.
    """

    members: Ints
    bounds: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Ints:
        return self.members[self.bounds[row] : self.bounds[row + 1]]


def pack(lengths: Ints, capacity: int) -> PackedRows:
    """Best fit, longest first: each sample goes into the fullest row that still has room for it.

    Args:
        lengths: Tokens of each sample, none above ``capacity``.
        capacity: Tokens of a row.

    Returns:
        Rows in the order of their first samples; a function of the lengths alone, so resuming packs the same.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by tokens that are free
    available = 0  # bit n: a row with n tokens free exists
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        fitting = available >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = with_room[free].pop()
            if not with_room[free]:
                available &= ~(1 << free)
            rows[row].append(sample)
        else:
            free, row = capacity, len(rows)
            rows.append([sample])
        if free > length:
            with_room[free - length].append(row)
            available |= 1 << (free - length)
    ordered = sorted(sorted(members) for members in rows)
    members = np.fromiter((sample for row in ordered for sample in row), np.int64, len(lengths))
    bounds = np.cumsum([0, *map(len, ordered)]).astype(np.int64)
    return PackedRows(members, bounds, np.add.reduceat(lengths[members], bounds[:-1]))
