"""Safetensors files by plain reads and writes (no torch).

The safetensors package maps a file into memory as a whole, which counts against an address-space limit and gives no
control over how much of it stays resident. Here a header is read and checked on its own, and values move in blocks.

Format: 8 bytes little-endian header length, a JSON header padded with spaces, the tensors end to end without holes.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatrain_ray.errors import ModelError

ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1, "U8": 1, "I8": 1}
ITEMSIZE |= {"U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors package."""

BLOCK_BYTES = 32 << 20
"""Values are read, converted and written in blocks of this size."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        path: Its file.
        name: Its name in the file.
        dtype: In safetensors' spelling: ``F32``, ``BF16``, ``F16``, ...
        shape: Its shape.
        offset: First byte, from the start of the file.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Reads and checks a file's header; no tensor is read.

    Raises:
        ModelError: The file is missing, truncated or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(
                    f"{path}: the file says that its header has {length} bytes, but the file has {size}: "
                    "it is truncated or no safetensors file"
                )
            content = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: the header is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: the header must be a JSON object, got {type(content).__name__}")
    content.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in content.items()}
    _check_extent(path, list(tensors.values()), 8 + length, size)
    return tensors


def _entry(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
            isinstance(length, int) and length >= 0 for length in shape
        ):
            if dtype not in ITEMSIZE:
                raise ModelError(f"{path}: {name} has dtype {dtype}, which is not supported")
            if end - begin != math.prod(shape) * ITEMSIZE[dtype] or begin < 0:
                raise ModelError(f"{path}: {name} of shape {shape} in {dtype} cannot lie at bytes {begin} to {end}")
            return StoredTensor(path, name, dtype, tuple(shape), start + begin)
    raise ModelError(f"{path}: the header entry of {name} is malformed: {entry}")


def _check_extent(path: Path, tensors: list[StoredTensor], start: int, size: int) -> None:
    end = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.numel)):
        if tensor.offset != end:
            raise ModelError(
                f"{path}: {tensor.name} starts at byte {tensor.offset}, expected {end}: the header is wrong"
            )
        end += tensor.numel * ITEMSIZE[tensor.dtype]
    if end != size:
        kind = "truncated" if size < end else "longer than its header says"
        raise ModelError(f"{path}: the file has {size} bytes, expected {end}: it is {kind}")


def read_as_float32(file_descriptor: int, tensor: StoredTensor, out: NDArray[np.float32], start: int = 0) -> None:
    """Reads a tensor's values, or some of them, as fp32.

    Args:
        file_descriptor: Of the tensor's file.
        tensor: In ``F32``, ``BF16`` or ``F16``.
        out: One-dimensional; overwritten with as many values as it has elements.
        start: First value to read.

    Raises:
        ModelError: The file ends early.
    """
    itemsize = ITEMSIZE[tensor.dtype]
    for done in range(0, out.size, BLOCK_BYTES // 4):
        block = out[done : done + BLOCK_BYTES // 4]
        position = tensor.offset + (start + done) * itemsize
        if tensor.dtype == "F32":
            read_exactly(file_descriptor, block.view(np.uint8), position, tensor)
            continue
        raw = np.empty(block.size, np.uint16)
        read_exactly(file_descriptor, raw.view(np.uint8), position, tensor)
        if tensor.dtype == "BF16":
            np.left_shift(raw, 16, out=block.view(np.uint32), dtype=np.uint32)
        else:
            block[:] = raw.view(np.float16)


def read_exactly(file_descriptor: int, out: NDArray[np.uint8], position: int, tensor: StoredTensor) -> None:
    """Fills ``out`` with a tensor's bytes from this position of its file, however short single reads are.

    Raises:
        ModelError: The file ends early.
    """
    done = 0
    while done < out.nbytes:
        count = os.preadv(file_descriptor, [out[done:].data], position + done)
        if count == 0:
            raise ModelError(f"{tensor.path}: {tensor.name}: the file ended {out.nbytes - done} bytes early")
        done += count


class SafetensorsWriter:
    """Writes one file, its tensors one after the other, durably.

    Args:
        path: Of the new file.
        tensors: Name to dtype (safetensors' spelling) and shape, in the order in which they will be written.
        metadata: Besides ``format=pt``, which transformers asks for.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + math.prod(shape) * ITEMSIZE[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.path = path
        self._expected = 8 + len(encoded) + end
        self._written = 0
        self._hash = xxhash.xxh3_64()
        self._file = path.open("wb", buffering=0)
        self._write(memoryview(len(encoded).to_bytes(8, "little") + encoded))

    def write(self, values: Iterable[NDArray[Any]]) -> None:
        """Appends contiguous arrays; together they must be the next tensors' bytes."""
        for array in values:
            view = array.reshape(-1).view(np.uint8).data
            for start in range(0, len(view), BLOCK_BYTES):
                self._write(view[start : start + BLOCK_BYTES])

    def close(self) -> FileRecord:
        """Flushes the file to the disk.

        Returns:
            Its size and checksum, for the manifest.
        """
        assert self._written == self._expected, f"{self.path}: wrote {self._written} of {self._expected} bytes"
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._written, self._hash.hexdigest())

    def abandon(self) -> None:
        """Closes the file unfinished."""
        self._file.close()

    def _write(self, view: memoryview) -> None:
        self._hash.update(view)
        self._written += len(view)
        while view:
            view = view[self._file.write(view) :]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says about a file.

    Attributes:
        bytes: Its length.
        xxh3_64: Its checksum in hexadecimal.
    """

    bytes: int
    xxh3_64: str


def write_durably(path: Path, content: bytes) -> FileRecord:
    """Writes a small file and flushes it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), xxhash.xxh3_64_hexdigest(content))


def sync_directory(path: Path) -> None:
    """Flushes a directory's entries to the disk."""
    file_descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)
