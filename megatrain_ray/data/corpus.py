"""Samples of a data set: what the rows become before batching, with an account of every row that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.data.batches import IGNORED
from megatrain_ray.data.rows import open_sources
from megatrain_ray.data.tokens import TokenTable, load_tokens
from megatrain_ray.errors import DataError

__all__ = ["Corpus", "Dropped", "left_out", "ranges", "read_corpus"]

Ints = NDArray[np.int64]

_NO_TARGET = "no target"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows that are left out for one reason.

    Attributes:
        reason: For people.
        rows: Row indices in file order over the files, from 0.
        places: Where the first of them stand.
    """

    reason: str
    rows: Ints
    places: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {self.more} more" if self.more else ""
        return f"{len(self.rows)} x {self.reason} ({', '.join(self.places)}{more})"

    @property
    def more(self) -> int:
        """Rows without their place here."""
        return max(0, len(self.rows) - len(self.places))


class Corpus:
    """Sequences of tokens with labels, by number; the tokens stay on disk.

    Running text is one stream of documents, cut into windows of ``max_length``; with ``separate`` each document is its
    own sample, and only longer ones are cut. Rows of chats and tokens are samples, cut at ``max_length``.

    Args:
        table: The tokens.
        max_length: Longest sample.
        separate: Documents are not joined.

    Attributes:
        table: The tokens.
        samples: Each sample's row index in file order over the files; the window's number for joined text.
        dropped: Rows that are no samples, by reason.
        truncated: Row indices of samples that were longer than ``max_length``.
    """

    def __init__(self, table: TokenTable, max_length: int, *, separate: bool = False) -> None:
        self.table = table
        self.max_length = max_length
        self._joined = table.form == "text"
        self._entries: Ints | None = None
        problems = table.problems()
        if self._joined and not separate:
            total = int(table.starts[-1] + table.lengths[-1]) if len(table.starts) else 0
            self._starts = np.arange(0, max(total - 1, 0), max_length, dtype=np.int64)
            self._lengths = np.minimum(max_length, total - self._starts)
            self.samples = np.arange(len(self._starts), dtype=np.int64)
            self.truncated = np.empty(0, np.int64)
        elif self._joined:
            self._cut_documents(problems)
        else:
            self._choose_rows(problems)
        self.dropped = tuple(
            Dropped(reason, np.unique(table.row[entries]), tuple(table.place(int(entry)) for entry in entries[:5]))
            for reason, entries in problems.items()
        )

    def _cut_documents(self, problems: dict[str, Ints]) -> None:
        table, limit = self.table, self.max_length
        # A last piece of one token has nothing to predict.
        pieces = np.where(table.lengths > 1, (table.lengths - 2) // limit + 1, 0)
        entries = np.repeat(np.arange(len(pieces)), pieces)
        ordinal = np.arange(len(entries)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._starts = table.starts[entries] + ordinal * limit
        self._lengths = np.minimum(limit, table.lengths[entries] - ordinal * limit)
        self.samples = table.row[entries]
        self.truncated = np.empty(0, np.int64)
        _explain(problems, _NO_TARGET, (pieces == 0) & ~np.isin(table.row, self.samples))

    def _choose_rows(self, problems: dict[str, Ints]) -> None:
        table, limit = self.table, self.max_length
        usable = (table.first_target > 0) & (table.first_target < limit)
        _explain(problems, _NO_TARGET, table.first_target == 0)
        _explain(problems, f"{_NO_TARGET} within max_length {limit}", table.first_target >= limit)
        self._entries = np.flatnonzero(usable)
        self._starts = table.starts[self._entries]
        self._lengths = np.minimum(table.lengths[self._entries], limit)
        self.samples = table.row[self._entries]
        self.truncated = table.row[self._entries[table.lengths[self._entries] > limit]]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Ints, Ints]:
        """Ids and labels of a sample, int64 [length]."""
        start, length = int(self._starts[index]), int(self._lengths[index])
        ids = self.table.ids(start, start + length)
        return ids, ids if self._entries is None else self.table.labels(int(self._entries[index]), length)

    def lengths(self) -> Ints:
        """Tokens of each sample."""
        return self._lengths

    def full_lengths(self) -> Ints:
        """Tokens of each sample before it was cut to ``max_length``; of each document of running text."""
        if self._entries is not None:
            return self.table.lengths[self._entries]
        lengths = np.bincount(self.table.row, self.table.lengths).astype(np.int64)  # of all pieces of a document
        return lengths[lengths > 0]

    @property
    def without_targets(self) -> int:
        """How many rows were left out, for whatever reason."""
        return sum(len(dropped.rows) for dropped in self.dropped)

    @property
    def num_rows(self) -> int:
        """Rows that were read."""
        return self.table.num_rows

    @cached_property
    def num_targets(self) -> int:
        """Targets of one pass over all samples."""
        if self._entries is None:
            return int((self._lengths - 1).sum())
        cut = self.table.lengths[self._entries] > self.max_length
        whole = int(self.table.targets[self._entries[~cut]].sum())
        return whole + sum(int((self[index][1][1:] != IGNORED).sum()) for index in np.flatnonzero(cut).tolist())

    def check_vocabulary(self, vocabulary_rows: int) -> None:
        """Every token id must have a row in the embedding.

        Raises:
            DataError: Naming the id, where it stands and the number of rows.
        """
        bad = np.flatnonzero(self.table.largest_id >= vocabulary_rows)
        if len(bad):
            entry = int(bad[0])
            raise DataError(
                f"{self.table.place(entry)}: token id {self.table.largest_id[entry]} is outside of the model's "
                f"embedding, which has {vocabulary_rows} rows: the data belong to another tokenizer or model"
            )


def left_out(training: Corpus, evaluation: Corpus | None, *, all_rows: bool = False) -> list[str]:
    """A line for each reason to leave out rows of either set.

    Args:
        training: What is trained on.
        evaluation: What is held out.
        all_rows: The lines name more rows than the first few, see `ranges`.
    """
    lines = []
    for what, corpus in (("left out", training), ("left out of the held-out data", evaluation)):
        for dropped in corpus.dropped if corpus is not None else ():
            where = f"rows {ranges(dropped.rows)}" if all_rows else "`megatrain-ray data` lists them"
            lines.append(f"{what}: {dropped}" + (f"; {where}" if dropped.more else ""))
    return lines


def ranges(numbers: Ints, most: int = 200) -> str:
    """Ascending numbers for people, such as ``1, 4-7``; after so many runs of them only how many more there are."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:most])
    more = sum(map(len, runs[most:]))
    return f"{shown} and {more:,} more" if more else shown


def _explain(problems: dict[str, Ints], reason: str, chosen: NDArray[np.bool_]) -> None:
    """Adds a reason for the chosen entries that have none yet."""
    unexplained = chosen.copy()
    for entries in problems.values():
        unexplained[entries] = False
    if unexplained.any():
        problems[reason] = np.flatnonzero(unexplained)


def read_corpus(
    paths: Sequence[str],
    form: str,
    *,
    tokenizer: Any,
    max_length: int,
    vocabulary_rows: int,
    assistant_only: bool = True,
    separate: bool = False,
    cache_dir: str | None = None,
) -> Corpus:
    """Reads and tokenizes a data set, or finds it in the cache.

    Args:
        paths: Files, directories or hub ids, read as one set.
        form: ``auto`` or a format of INTERFACE.
        tokenizer: Of the model, with its chat template; ``tokens`` needs none.
        max_length: Longest sample.
        vocabulary_rows: Rows of the model's embedding.
        assistant_only: Targets of chats are assistant turns alone.
        separate: Documents of running text are samples of their own (for packing).
        cache_dir: Default: ``megatrain_ray`` in the cache directory of `datasets`.

    Raises:
        DataError: A row that cannot be used, or none that can.
    """
    table = load_tokens(open_sources(paths), form, tokenizer, assistant_only=assistant_only, cache_dir=cache_dir)
    corpus = Corpus(table, max_length, separate=separate)
    corpus.check_vocabulary(vocabulary_rows)
    if not len(corpus):
        reasons = "; ".join(map(str, corpus.dropped)) or "no text"
        raise DataError(f"{', '.join(paths)}: none of the {corpus.num_rows} rows has a target: {reasons}")
    return corpus
