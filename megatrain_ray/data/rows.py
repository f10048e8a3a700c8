"""Reads data files row by row; every bad row is an error that names file and line (or row) and field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain_ray.errors import DataError

__all__ = ["Row", "read_rows", "where"]

Row = tuple[str, Any]
"""Where a row stands, for messages, and the row."""


def where(path: Path, kind: str, number: int) -> str:
    return f"{path}:{number}" if kind == "line" else f"{path}: {kind} {number}"


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of one file: objects of .jsonl, .json and .parquet; the whole text of .txt as ``{"text": ...}``.

    Raises:
        DataError: The file is missing or of another kind, or a row is no object.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such data file")
    readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".txt": _txt}
    if path.suffix not in readers:
        raise DataError(f"{path}: unknown kind of file; expected one of {', '.join(readers)}")
    for place, row in readers[path.suffix](path):
        if not isinstance(row, dict):
            raise DataError(f"{place}: expected an object with named fields, got {_short(row)}")
        yield place, row


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})") from error


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield where(path, "line", number), _parse(line, where(path, "line", number))
        except UnicodeDecodeError as error:
            raise DataError(f"{where(path, 'line', number + 1)}: not UTF-8 text") from error


def _parse(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON ({error}); is the line cut off?") from error


def _json(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(_text(path))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a list of rows, got {_short(rows)}")
    for number, row in enumerate(rows):
        yield where(path, "row", number), row


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield where(path, "row", number), row
                number += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error


def _txt(path: Path) -> Iterator[Row]:
    yield str(path), {"text": _text(path)}


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
