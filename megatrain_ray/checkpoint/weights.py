"""The weight files of a model directory: found and checked from headers alone, read tensor by tensor as fp32."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain_ray.checkpoint.safetensors_file import (
    BLOCK_BYTES,
    StoredTensor,
    read_as_float32,
    read_exactly,
    read_header,
)
from megatrain_ray.errors import ModelError

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of weights that can be trained, by their names in safetensors; others are quantized or no weights."""

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The other way round."""


class WeightFiles(Protocol):
    """Tensors in files.

    Attributes:
        tensors: By name in the checkpoint.
        warnings: What the user should know, one sentence each.
    """

    tensors: dict[str, StoredTensor]
    warnings: list[str]

    def read(self, tensor: StoredTensor, out: NDArray[np.float32]) -> None:
        """Reads a tensor as fp32 into a flat array."""

    def load(self, tensor: StoredTensor) -> torch.Tensor:
        """Reads a tensor in its own dtype and shape."""

    def equal(self, first: StoredTensor, second: StoredTensor) -> bool:
        """Whether two tensors of one shape hold the same values."""


def open_weight_files(directory: Path) -> WeightFiles:
    """Finds the weights of a model directory.

    An index wins over a single file, safetensors over ``.bin``.

    Raises:
        ModelError: There are none, or headers and index disagree.
    """
    for stem, extension, reader in (("model", "safetensors", SafetensorsFiles), ("pytorch_model", "bin", TorchFiles)):
        single = directory / f"{stem}.{extension}"
        index = directory / f"{stem}.{extension}.index.json"
        if index.exists():
            stray = [f"{single}: ignored, because {index.name} lists other files"] if single.exists() else []
            return reader(*_read_index(index), stray)
        if single.exists():
            return reader([single], {}, [])
    found = ", ".join(sorted(path.name for path in directory.iterdir())) if directory.is_dir() else "no directory"
    raise ModelError(f"{directory}: no model.safetensors, no pytorch_model.bin and no index of either (found {found})")


def _read_index(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Shards and the shard of each tensor."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        weight_map: Any = content["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: expected a JSON object whose weight_map says tensor to file: {error!r}") from error
    for name, file in pairs:
        parts = PurePosixPath(file).parts
        if not parts or PurePosixPath(file).is_absolute() or ".." in parts:
            raise ModelError(f"{path}: {name} is said to be in {file!r}, which leaves the model directory")
    located = {name: path.parent / file for name, file in pairs}
    shards = sorted(set(located.values()))
    for shard in shards:
        if not shard.exists():
            raise ModelError(f"{shard}: no such file, but {path.name} lists it")
    return shards, located


def _collect(headers: dict[Path, dict[str, StoredTensor]], located: dict[str, Path]) -> dict[str, StoredTensor]:
    """All tensors of all shards, the index deciding between duplicates.

    Raises:
        ModelError: The index names a shard that does not hold the tensor.
    """
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    for name, shard in located.items():
        if name not in headers[shard]:
            where = f"it is in {tensors[name].path.name}" if name in tensors else "it is in no shard"
            raise ModelError(f"{shard}: {name} is not in this file, but the index says so; {where}")
        tensors[name] = headers[shard][name]
    return tensors


class SafetensorsFiles:
    """Safetensors shards.

    Args:
        shards: All files.
        located: The shard of each tensor that an index lists.
        warnings: To start with.
    """

    def __init__(self, shards: Iterable[Path], located: dict[str, Path], warnings: list[str]) -> None:
        self.tensors = _collect({shard: read_header(shard) for shard in shards}, located)
        self.warnings = warnings

    def read(self, tensor: StoredTensor, out: NDArray[np.float32]) -> None:
        """See `WeightFiles.read`."""
        with _opened(tensor.path) as file_descriptor:
            read_as_float32(file_descriptor, tensor, out)

    def load(self, tensor: StoredTensor) -> torch.Tensor:
        """See `WeightFiles.load`."""
        value = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        with _opened(tensor.path) as file_descriptor:
            read_exactly(file_descriptor, value.view(-1).view(torch.uint8).numpy(), tensor.offset, tensor)
        return value

    def equal(self, first: StoredTensor, second: StoredTensor) -> bool:
        """See `WeightFiles.equal`."""
        with _opened(first.path) as one, _opened(second.path) as other:
            for start in range(0, first.numel, BLOCK_BYTES // 4):
                left = np.empty(min(BLOCK_BYTES // 4, first.numel - start), np.float32)
                right = np.empty_like(left)
                read_as_float32(one, first, left, start)
                read_as_float32(other, second, right, start)
                if not np.array_equal(left, right, equal_nan=True):
                    return False
        return True


class TorchFiles:
    """Shards pickled by ``torch.save``, read with ``weights_only=True`` and mapped, not loaded."""

    def __init__(self, shards: Iterable[Path], located: dict[str, Path], warnings: list[str]) -> None:
        headers = {}
        for shard in shards:
            state = _torch_load(shard, "meta")
            headers[shard] = {
                name: StoredTensor(shard, name, DTYPE_NAMES.get(value.dtype, str(value.dtype)), tuple(value.shape), 0)
                for name, value in state.items()
            }
        self.tensors = _collect(headers, located)
        self.warnings = warnings

    def read(self, tensor: StoredTensor, out: NDArray[np.float32]) -> None:
        """See `WeightFiles.read`."""
        torch.from_numpy(out).copy_(self.load(tensor).reshape(-1))

    def load(self, tensor: StoredTensor) -> torch.Tensor:
        """See `WeightFiles.load`; the file stays mapped as long as the result lives."""
        return _torch_load(tensor.path, "cpu")[tensor.name]

    def equal(self, first: StoredTensor, second: StoredTensor) -> bool:
        """See `WeightFiles.equal`."""
        return torch.equal(self.load(first), self.load(second))


def _torch_load(path: Path, device: str) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=True)
    except Exception as error:  # a broken pickle raises anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{path}: cannot be read with torch.load(weights_only=True, mmap=True): {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ModelError(f"{path}: expected a dictionary of tensors")
    return state


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file_descriptor = os.open(path, os.O_RDONLY)
    try:
        yield file_descriptor
    finally:
        os.close(file_descriptor)
