"""The safetensors format, as far as streaming needs it: headers read without data, and written before it.

Format: 8 bytes little-endian header length, a JSON object ``{name: {dtype, shape, data_offsets}}`` which may end in
spaces, then the tensors end to end without holes (README of huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain_ray.layout import align_up

__all__ = [
    "DTYPES",
    "BrokenFile",
    "FileHeader",
    "TensorEntry",
    "build_header",
    "read_header",
    "sync_directory",
    "write_atomically",
]

DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of one element, by safetensors' name of the dtype."""

_MAX_HEADER_BYTES = 100 << 20
"""Limit of the reference implementation."""


class BrokenFile(Exception):
    """Not a whole safetensors file; the message names path, expected and got."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file: safetensors dtype, shape, and where its bytes are, counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """All tensors of one file and its metadata."""

    path: Path
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(path: Path) -> FileHeader:
    """Reads and checks a file's header against its size.

    Raises:
        BrokenFile: Missing, truncated, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise BrokenFile(
                    f"{path}: header length {length} in a file of {size} bytes: truncated, or not a safetensors file"
                )
            fields = json.loads(file.read(length))
    except FileNotFoundError:
        raise BrokenFile(f"{path}: the file is missing") from None
    except OSError as error:
        raise BrokenFile(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenFile(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BrokenFile(f"{path}: the header is no JSON object")
    metadata = fields.pop("__metadata__", {})
    tensors = {name: _entry(path, name, field, 8 + length, size) for name, field in fields.items()}
    return FileHeader(path, tensors, metadata if isinstance(metadata, dict) else {})


def _entry(path: Path, name: str, field: object, data_start: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = field["dtype"], tuple(field["shape"]), field["data_offsets"]  # type: ignore[index]
        expected = math.prod(shape) * DTYPES.get(dtype, 0)
        whole = all(isinstance(value, int) and value >= 0 for value in (*shape, start, end))
    except (TypeError, KeyError, ValueError) as error:
        raise BrokenFile(f"{path}: tensor {name}: its header entry is malformed") from error
    if not whole or end < start or (expected and expected != end - start):
        raise BrokenFile(
            f"{path}: tensor {name}: {dtype} {list(shape)} needs {expected} bytes, its entry has {end - start}"
        )
    if data_start + end > size:
        raise BrokenFile(f"{path}: tensor {name}: {size} of {data_start + end} bytes are there: the file is truncated")
    return TensorEntry(name, dtype, shape, data_start + start, data_start + end)


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], *, align: int = 8
) -> bytes:
    """The bytes before the data of tensors that follow end to end.

    Args:
        tensors: Name, safetensors dtype and shape, in the order of their data.
        metadata: Text for text.
        align: The data starts at a multiple of this many bytes.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * DTYPES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    length = align_up(8 + len(text), align) - 8
    return struct.pack("<Q", length) + text.ljust(length)


def write_atomically(path: Path, text: str, *, durable: bool = False) -> None:
    """Replaces a small text file; readers see the old or the new one.

    Args:
        path: The file.
        text: Its new contents.
        durable: The new contents survive a crash of the machine once this returns.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
