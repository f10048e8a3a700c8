"""Token sequences of a data set: what the formats become before batching."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.data.batches import IGNORED
from megatrain_ray.data.rows import Row, read_rows
from megatrain_ray.errors import DataError

__all__ = ["Corpus", "read_corpus"]


class Corpus:
    """Sequences of tokens with labels, end to end in two arrays.

    Attributes:
        samples: Each sequence's row index in file order over the files (its window's number for running text).
        without_targets: How many rows were left out because nothing in them is a target.
        truncated: How many rows were longer than ``max_length``.
    """

    def __init__(self) -> None:
        self._tokens: list[NDArray[np.int64]] = []
        self._labels: list[NDArray[np.int64]] = []
        self.samples: list[int] = []
        self.without_targets = 0
        self.truncated = 0

    def add(self, sample: int, tokens: NDArray[np.int64], labels: NDArray[np.int64], max_length: int) -> None:
        """Appends a row, cut to ``max_length``, unless it has no target."""
        self.truncated += len(tokens) > max_length
        tokens, labels = tokens[:max_length], labels[:max_length]
        if not (labels[1:] != IGNORED).any():
            self.without_targets += 1
            return
        self._tokens.append(tokens)
        self._labels.append(labels)
        self.samples.append(sample)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self._tokens[index], self._labels[index]

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.array([len(tokens) for tokens in self._tokens], np.int64)


def read_corpus(paths: Sequence[str], form: str, *, tokenizer: Any, max_length: int, vocabulary_rows: int) -> Corpus:
    """Reads and tokenizes a data set.

    Args:
        paths: Files, read as one set.
        form: ``auto``, ``text`` or ``tokens``.
        tokenizer: Of the model; ``tokens`` needs none.
        max_length: Longest sequence.
        vocabulary_rows: Rows of the model's embedding.

    Raises:
        DataError: A row that cannot be used, or none that can.
    """
    first, rows = _peek(row for path in paths for row in read_rows(Path(path)))
    if first is None:
        raise DataError(f"{', '.join(paths)}: holds no rows; nothing to train on")
    if form == "auto":
        form = _detect(first)
    if form == "tokens":
        corpus = _tokens(rows, max_length, vocabulary_rows)
    elif form == "text":
        if tokenizer is None:
            raise DataError("data.format text needs a tokenizer, and the model directory has none")
        corpus = _running_text(rows, tokenizer, max_length, vocabulary_rows)
    else:
        raise DataError(f"data.format {form} is not supported; use text or tokens")
    if not len(corpus):
        raise DataError(
            f"{', '.join(paths)}: no row has a target ({corpus.without_targets} rows without any): nothing to train on"
        )
    return corpus


def _peek(rows: Iterable[Row]) -> tuple[Row | None, Iterator[Row]]:
    iterator = iter(rows)
    first = next(iterator, None)

    def chained() -> Iterator[Row]:
        if first is not None:
            yield first
        yield from iterator

    return first, chained()


def _detect(first: Row) -> str:
    place, row = first
    if "input_ids" in row:
        return "tokens"
    if "text" in row:
        return "text"
    raise DataError(
        f"{place}: cannot tell the format from the fields {', '.join(map(repr, row)) or '(none)'}; expected "
        "'input_ids' or 'text', or set data.format"
    )


def _tokens(rows: Iterable[Row], max_length: int, vocabulary_rows: int) -> Corpus:
    corpus = Corpus()
    for sample, (place, row) in enumerate(rows):
        tokens = _integers(row, "input_ids", place)
        _check_vocabulary(tokens, vocabulary_rows, place)
        labels = tokens
        if row.get("labels") is not None:
            labels = _integers(row, "labels", place)
            if len(labels) != len(tokens):
                raise DataError(f"{place}: field 'labels' has {len(labels)} entries, 'input_ids' has {len(tokens)}")
            _check_vocabulary(labels[labels != IGNORED], vocabulary_rows, place)
        corpus.add(sample, tokens, labels, max_length)
    return corpus


def _integers(row: dict[str, Any], field: str, place: str) -> NDArray[np.int64]:
    values = row.get(field)
    whole = isinstance(values, list) and all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    if not whole:
        raise DataError(f"{place}: field {field!r} must be a list of whole numbers")
    return np.array(values, np.int64)


def _check_vocabulary(tokens: NDArray[np.int64], vocabulary_rows: int, place: str) -> None:
    bad = tokens[(tokens < 0) | (tokens >= vocabulary_rows)]
    if len(bad):
        raise DataError(
            f"{place}: token id {bad[0]} is outside of the model's embedding, which has {vocabulary_rows} rows"
        )


def _running_text(rows: Iterable[Row], tokenizer: Any, max_length: int, vocabulary_rows: int) -> Corpus:
    """Documents end to end, an end mark after each, cut into windows of ``max_length``."""
    corpus = Corpus()
    rest: list[int] = []
    window = 0

    def emit(tokens: list[int]) -> None:
        nonlocal window
        ids = np.array(tokens, np.int64)
        corpus.add(window, ids, ids, max_length)
        window += 1

    for place, row in rows:
        text = row.get("text")
        if not isinstance(text, str):
            raise DataError(f"{place}: field 'text' must be text, got {type(text).__name__}")
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        _check_vocabulary(np.array(ids, np.int64), vocabulary_rows, place)
        if tokenizer.eos_token_id is not None and ids and ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
        rest += ids
        start = 0
        while len(rest) - start >= max_length:
            emit(rest[start : start + max_length])
            start += max_length
        rest = rest[start:]
    if len(rest) > 1:
        emit(rest)
    return corpus
