"""Reads data row by row, whatever holds it; each row knows where it stands: file and true line (or row) number."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.errors import DataError

__all__ = ["Row", "Source", "open_sources", "shorten"]

_READERS = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".txt": "txt"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SPACE = re.compile(r"\s*")

TXT_PIECE_CHARS = 1 << 18
"""A longer .txt file is read in pieces, cut at line ends, so that a corpus larger than memory works."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read.

    Attributes:
        number: Line from 1 (.jsonl) or row from 0 (others), within its source.
        place: The same for messages, such as ``data.jsonl:17``.
        values: Fields of the row.
        first, last: Whether this is the first and the last piece of its document; only long .txt files have several.
    """

    number: int
    place: str
    values: dict[str, Any]
    first: bool = True
    last: bool = True


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a data set that `datasets` opens.

    Attributes:
        name: As given, for messages.
        kind: ``jsonl``, ``json``, ``parquet``, ``txt``, or ``dataset``.
        dataset: The opened `datasets.Dataset` when that is what it is.
    """

    name: str
    kind: str
    dataset: Any = None

    def identity(self) -> list[Any]:
        """Changes when the contents do (by path, size and time of the last change, as make does)."""
        if self.dataset is not None:
            return [self.name, self.dataset._fingerprint]
        stat = Path(self.name).stat()
        return [str(Path(self.name).absolute()), stat.st_size, stat.st_mtime_ns]

    def place(self, number: int) -> str:
        """Where a row stands."""
        if self.kind == "txt":
            return self.name
        return f"{self.name}:{number}" if self.kind == "jsonl" else f"{self.name}: row {number}"

    def rows(self) -> Iterator[Row]:
        """All rows.

        Raises:
            DataError: A file or a row that cannot be read, or a row that is no object with named fields.
        """
        readers = {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "txt": _txt, "dataset": _dataset}
        try:
            for row in readers[self.kind](self):
                if not isinstance(row.values, dict):
                    raise DataError(f"{row.place}: expected an object with named fields, got {shorten(row.values)}")
                yield row
        except OSError as error:
            raise _unreadable(self.name, error) from error


def open_sources(paths: Sequence[str]) -> tuple[Source, ...]:
    """Files, directories and hub ids as one set, in the given order.

    A directory is what `datasets` saved, or holds data files, which are taken in the order of their names.

    Raises:
        DataError: Nothing is there, it may not be read, or it is of an unknown kind.
    """
    sources: list[Source] = []
    for path in paths:
        try:
            sources += _open(path)
        except OSError as error:  # a directory that may not be entered
            raise _unreadable(path, error) from error
    return tuple(sources)


def _unreadable(name: str, error: OSError) -> DataError:
    return DataError(f"{name}: cannot be read: {error.strerror or _first_line(error)}")


def _open(name: str) -> list[Source]:
    path = Path(name).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.is_file():
        kind = _kind_of(path)
        if kind is None:
            raise DataError(f"{path}: unknown kind of file; expected one of {', '.join(_READERS)}")
        return [Source(str(path), kind)]
    if _HUB_ID.fullmatch(name) and _kind_of(path) is None:
        return [_from_hub(name)]
    raise DataError(f"{path}: no such data file")


def _directory(path: Path) -> list[Source]:
    import datasets

    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        try:
            return [Source(str(path), "dataset", _train_split(str(path), datasets.load_from_disk(str(path))))]
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not a directory that `datasets` saved: {_first_line(error)}") from error
    files = [(file, kind) for file in sorted(path.rglob("*")) if (kind := _kind_of(file)) and file.is_file()]
    if not files:
        raise DataError(f"{path}: neither saved by `datasets` nor holding {', '.join(_READERS)} files")
    return [Source(str(file), kind) for file, kind in files]


def _kind_of(path: Path) -> str | None:
    return _READERS.get(path.suffix.lower())


def _from_hub(name: str) -> Source:
    import datasets

    try:
        return Source(name, "dataset", _train_split(name, datasets.load_dataset(name)))
    except DataError:
        raise
    except Exception as error:  # the hub client raises many kinds, from many libraries
        raise DataError(
            f"{name}: no such file, and the hub gives no such data set: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _train_split(name: str, opened: Any) -> Any:
    import datasets

    if isinstance(opened, datasets.DatasetDict):
        if "train" not in opened:
            raise DataError(
                f"{name}: has the splits {', '.join(opened)} and no 'train'; save the one you want by itself"
            )
        opened = opened["train"]
    return opened.with_format(None)


def _jsonl(source: Source) -> Iterator[Row]:
    number = 0
    with open(source.name, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Row(number, source.place(number), _parse(line, source.place(number)))
        except UnicodeDecodeError as error:
            # The decoder reads ahead in blocks: find the line in the bytes.
            raise DataError(f"{source.place(_undecodable_line(source.name))}: not UTF-8 text") from error


def _undecodable_line(name: str) -> int:
    with open(name, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _parse(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not valid JSON ({error}); expected one object a line: is it cut off?") from error


def _json(source: Source) -> Iterator[Row]:
    """A list of rows, parsed one by one so that an error names row and line; else one object a line."""
    text = _read_text(source.name)
    position = _skip_space(text, 0)
    if text[position : position + 1] != "[":
        yield from _jsonl(Source(source.name, "jsonl"))
        return
    decoder = json.JSONDecoder()
    line, counted, number = 1, 0, 0
    position = _skip_space(text, position + 1)
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        place = f"{source.place(number)} (line {line})"
        try:
            values, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: not valid JSON ({error}); is the file cut off?") from error
        yield Row(number, place, values)
        number += 1
        position = _skip_space(text, position)
        following = text[position : position + 1]
        if following == ",":
            position = _skip_space(text, position + 1)
        elif following != "]":
            raise DataError(f"{place}: not valid JSON: expected ',' or ']' after this row; is the file cut off?")
    if text[position + 1 :].strip():
        raise DataError(f"{source.name}: not valid JSON: text after the list of rows")


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _parquet(source: Source) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(source.name).iter_batches(batch_size=1000):
            for values in batch.to_pylist():
                yield Row(number, source.place(number), _without_filling(values))
                number += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{source.name}: cannot be read as Parquet: {_first_line(error)}") from error


def _dataset(source: Source) -> Iterator[Row]:
    for number, values in enumerate(source.dataset):
        yield Row(number, source.place(number), _without_filling(values))


def _without_filling(values: Any) -> Any:
    """A row without the nulls that Arrow puts into nested objects where other rows have more keys."""
    return {name: _dense(value) for name, value in values.items()}


def _dense(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _dense(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_dense(item) for item in value]
    return value


def _txt(source: Source) -> Iterator[Row]:
    try:
        with open(source.name, encoding="utf-8-sig") as file:
            piece, first, number = _piece(file), True, 0
            while piece:
                following = _piece(file)
                yield Row(number, source.name, {"text": piece}, first=first, last=not following)
                piece, first, number = following, False, number + 1
    except UnicodeDecodeError as error:
        raise DataError(f"{source.place(0)}:{_undecodable_line(source.name)}: not UTF-8 text") from error


def _piece(file: Any) -> str:
    """About `TXT_PIECE_CHARS` characters, up to the end of a line."""
    text: str = file.read(TXT_PIECE_CHARS)
    return text + file.readline(TXT_PIECE_CHARS) if len(text) == TXT_PIECE_CHARS else text


def _read_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}:{_undecodable_line(name)}: not UTF-8 text") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def shorten(value: Any) -> str:
    """A value for a message."""
    # Half of a character pair, which no file takes, is shown escaped.
    text = json.dumps(value, default=str, ensure_ascii=False).encode(errors="backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
