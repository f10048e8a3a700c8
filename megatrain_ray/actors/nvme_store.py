"""The disk tier: one safetensors file a layer and generation, checked on every read.

A layer's file holds exactly the bytes of its `PackedLayer`, after a header padded to a block, so that transfers go
straight between file and buffer. State alternates between two generations: a write goes to the one that is not
current, then the manifest makes it current. A process that dies in the middle leaves the other generation. The store
survives the death of processes, not of the machine (checkpoints do): nothing is flushed here.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import shutil
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os
import numpy as np
import xxhash
from numpy.typing import NDArray

from megatrain_ray.checkpoint.directory import prune_checkpoints
from megatrain_ray.checkpoint.save_spec import SaveSpec
from megatrain_ray.checkpoint.writer import CheckpointWriter
from megatrain_ray.direct_io import ALIGNMENT, BLOCK_BYTES, AlignedPool, BlockFile, DirectPolicy, aligned_empty
from megatrain_ray.errors import StoreError
from megatrain_ray.layout import LayerSpec, align_up
from megatrain_ray.packed import GRADS, MASTER, STATE, PackedLayer

__all__ = ["NvmeStore", "WriteReceipt"]

MANIFEST = "manifest.json"
_TRANSFERS = 4
"""Transfers under way at once: enough for a drive's queue, few enough to bound staging memory."""


@dataclass(frozen=True, slots=True)
class WriteReceipt:
    """What a write did.

    Attributes:
        layer: Index in the stream.
        step: Of what was written.
        written_bytes: 0 when it was there already.
    """

    layer: int
    step: int
    written_bytes: int


@dataclass(slots=True)
class _Version:
    """One complete file, as the manifest knows it."""

    file: str
    step: int
    data_start: int
    sections: dict[str, str]  # section name -> xxh3_64 of its bytes

    def nbytes(self, spec: LayerSpec) -> int:
        return self.data_start + len(self.sections) * spec.section_bytes("float32")


class NvmeStore:
    """Owns every byte on disk.

    Args:
        directory: Exists, locked by the run.
        layers: The stream.
        output_dir: Where checkpoints go.
        keep: Checkpoints to keep; None: all.
        direct_io: Try O_DIRECT.
    """

    def __init__(
        self,
        directory: Path,
        layers: Sequence[LayerSpec],
        *,
        output_dir: Path,
        keep: int | None = None,
        direct_io: bool = True,
    ) -> None:
        self.directory = directory
        self.layers = tuple(layers)
        self.output_dir = output_dir
        self.keep = keep
        self._writers: dict[int, CheckpointWriter] = {}
        self._policy = DirectPolicy(direct_io)
        largest = max(spec.section_bytes("float32") for spec in layers)
        self._pool = AlignedPool(2 * len(STATE) * largest)
        self._transfers = ThreadPoolExecutor(_TRANSFERS, "transfer")
        self._staging: list[NDArray[np.uint8]] = []
        self._commit = asyncio.Lock()
        self._versions: dict[str, list[_Version]] = {}
        self._read_bytes = self._written_bytes = 0
        self._busy_s = 0.0
        manifest = directory / MANIFEST
        if manifest.exists():
            for name, versions in json.loads(manifest.read_text(encoding="utf-8")).items():
                self._versions[name] = [_Version(**version) for version in versions]

    # --- what the schedule calls ------------------------------------------------------------------------------------

    async def read(self, layer: int) -> PackedLayer:
        """The newest state of a layer. Moments that were never written are zero."""
        return await self._read(self._newest(layer), self.layers[layer], STATE)

    async def read_master(self, layer: int, step: int | None = None) -> PackedLayer:
        """The masters of a layer, of a given step if that is still there."""
        versions = self._versions.get(self.layers[layer].name, [])
        chosen = next((version for version in versions if version.step == step), None)
        return await self._read(chosen or self._newest(layer), self.layers[layer], MASTER)

    async def read_grads(self, layer: int) -> PackedLayer:
        """The gradients of a layer that wait here for the norm."""
        return await self._read(self._versions[_grads_key(self.layers[layer])][0], self.layers[layer], GRADS)

    async def write(self, layer: int, packed: PackedLayer) -> WriteReceipt:
        """Writes a layer's state beside the current one, then makes it current."""
        spec = self.layers[layer]
        versions = self._versions.setdefault(spec.name, [])
        if any(version.step == packed.step and set(version.sections) == set(packed.sections) for version in versions):
            return WriteReceipt(layer, packed.step, 0)
        current = max(versions, key=lambda version: version.step, default=None)
        generation = 1 if current is not None and current.file == f"{spec.name}.0.safetensors" else 0
        return await self._write(spec, spec.name, f"{spec.name}.{generation}.safetensors", packed)

    async def write_grads(self, layer: int, packed: PackedLayer) -> WriteReceipt:
        """Writes a layer's gradients."""
        spec = self.layers[layer]
        return await self._write(spec, _grads_key(spec), f"{spec.name}.grads.safetensors", packed)

    async def begin_save(self, number: int, save_spec: SaveSpec) -> None:
        """Starts checkpoint ``number``, which consists of ``save_spec``; a half-written one of that number is gone."""
        self._writers = {number: await asyncio.to_thread(CheckpointWriter, str(self.output_dir), number, save_spec)}

    async def save(self, layer: int, number: int, packed: PackedLayer) -> WriteReceipt:
        """Writes a layer into checkpoint ``number``."""
        writer = self._writers.get(number)
        if writer is None:  # this process was restarted in the middle: half a checkpoint is none
            return WriteReceipt(layer, packed.step, 0)
        await asyncio.to_thread(writer.write_layer, self.layers[layer], packed)
        self._written_bytes += packed.data.nbytes
        return WriteReceipt(layer, packed.step, packed.data.nbytes)

    async def finish_save(self, number: int, trainer_state: dict[str, Any]) -> str | None:
        """Completes checkpoint ``number``, drops those beyond ``keep``; returns its path, or None if it was lost."""
        writer = self._writers.pop(number, None)
        if writer is None:
            return None
        path = await asyncio.to_thread(writer.finish, trainer_state)
        if self.keep is not None:
            await asyncio.to_thread(prune_checkpoints, self.output_dir, self.keep)
        return str(path)

    async def status(self) -> dict[str, Any]:
        """Bytes moved so far, bytes on disk, kind of I/O."""
        return {
            "read_bytes": self._read_bytes,
            "written_bytes": self._written_bytes,
            "busy_s": self._busy_s,
            "io": "direct" if self._policy.direct else "buffered",
            "store_bytes": sum(entry.stat().st_size for entry in self.directory.iterdir() if entry.is_file()),
        }

    # --- internals --------------------------------------------------------------------------------------------------

    def _newest(self, layer: int) -> _Version:
        return max(self._versions[self.layers[layer].name], key=lambda version: version.step)

    async def _read(self, version: _Version, spec: LayerSpec, sections: tuple[str, ...]) -> PackedLayer:
        section_bytes = spec.section_bytes("float32")
        buffer = self._pool.take(len(sections) * section_bytes)
        path = self.directory / version.file
        held = list(version.sections)
        started_s = time.perf_counter()
        with self._opened(path, write=False, spec=spec) as file:
            for row, section in enumerate(sections):
                target = buffer[row * section_bytes : (row + 1) * section_bytes]
                if section not in version.sections:
                    target[:] = 0  # moments before the first step
                    continue
                start = version.data_start + held.index(section) * section_bytes
                got = await self._blocks(file.read_into, target, start)
                if got != section_bytes:
                    raise StoreError(
                        f"{spec.name}: read {got} of {section_bytes} bytes of {section} from {path}: the file is "
                        "truncated; resume from the newest checkpoint",
                        context={"layer": spec.index, "path": str(path), "expected": section_bytes, "got": got},
                    )
                checksum = await asyncio.to_thread(_checksum, target)
                if checksum != version.sections[section]:
                    raise StoreError(
                        f"{spec.name}: {section} in {path} has checksum {checksum}, expected "
                        f"{version.sections[section]}: the file is damaged; resume from the newest checkpoint",
                        context={"layer": spec.index, "path": str(path)},
                    )
                self._read_bytes += got
        self._busy_s += time.perf_counter() - started_s
        return PackedLayer(spec.index, version.step, "float32", sections, buffer)

    async def _write(self, spec: LayerSpec, key: str, name: str, packed: PackedLayer) -> WriteReceipt:
        header = _header(spec, packed)
        started_s = time.perf_counter()
        path = self.directory / name
        try:
            with self._opened(path, write=True, spec=spec) as file:
                padded = aligned_empty(len(header))
                padded[:] = np.frombuffer(header, np.uint8)
                await self._blocks(file.write_from, padded, 0)
                await self._blocks(self._staged(file), packed.data, len(header))
                file.truncate(len(header) + packed.data.nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StoreError(
                f"{spec.name}: {path} needs {packed.data.nbytes} bytes and the disk has "
                f"{shutil.disk_usage(self.directory).free} free: free some, then resume from the newest checkpoint"
            ) from error
        size = packed.section_bytes
        sections = {
            section: await asyncio.to_thread(_checksum, packed.data[row * size : (row + 1) * size])
            for row, section in enumerate(packed.sections)
        }
        version = _Version(name, packed.step, len(header), sections)
        self._versions[key] = [*(other for other in self._versions.get(key, []) if other.file != name), version]
        await self._write_manifest()
        self._written_bytes += packed.data.nbytes
        self._busy_s += time.perf_counter() - started_s
        return WriteReceipt(spec.index, packed.step, packed.data.nbytes)

    def _opened(self, path: Path, *, write: bool, spec: LayerSpec) -> BlockFile:
        try:
            return BlockFile(path, write=write, policy=self._policy)
        except FileNotFoundError:
            raise StoreError(
                f"{spec.name}: {path} is missing; resume from the newest checkpoint", context={"layer": spec.index}
            ) from None

    async def _blocks(self, transfer: Any, data: NDArray[np.uint8], offset: int) -> int:
        """Moves ``data`` in blocks, several at a time; returns the bytes moved."""
        loop = asyncio.get_running_loop()
        view = data.data
        moved = await asyncio.gather(
            *(
                loop.run_in_executor(self._transfers, transfer, view[start : start + BLOCK_BYTES], offset + start)
                for start in range(0, len(view), BLOCK_BYTES)
            )
        )
        return sum(moved)

    def _staged(self, file: BlockFile) -> Any:
        """Writes through an aligned block where the source is not aligned, as in the object store."""

        def write(source: memoryview, offset: int) -> int:
            data = np.frombuffer(source, np.uint8)
            if data.ctypes.data % ALIGNMENT == 0:
                return file.write_from(source, offset)
            block = self._staging.pop() if self._staging else aligned_empty(BLOCK_BYTES)
            try:
                block[: data.nbytes] = data
                return file.write_from(block[: data.nbytes].data, offset)
            finally:
                self._staging.append(block)

        return write

    async def _write_manifest(self) -> None:
        async with self._commit:
            text = json.dumps({key: [asdict(version) for version in self._versions[key]] for key in self._versions})
            partial = self.directory / f".{MANIFEST}.partial"
            async with aiofiles.open(partial, "w", encoding="utf-8") as file:
                await file.write(text)
            await aiofiles.os.replace(partial, self.directory / MANIFEST)


def _grads_key(spec: LayerSpec) -> str:
    return f"{spec.name}.grads"


def _checksum(data: NDArray[np.uint8]) -> str:
    return xxhash.xxh3_64_hexdigest(data.data)


def _header(spec: LayerSpec, packed: PackedLayer) -> bytes:
    """The header under which the packed bytes are a safetensors file; gaps between tensors become fillers."""
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for section in packed.sections:
        end = 0
        for tensor in spec.tensors:
            if tensor.offset > end:
                tensors.append((f"_padding.{len(tensors)}", (tensor.offset - end,)))
            tensors.append((f"{section}.{tensor.name}", tensor.shape))
            end = tensor.end
        if spec.numel > end:
            tensors.append((f"_padding.{len(tensors)}", (spec.numel - end,)))
    fields: dict[str, Any] = {"__metadata__": {"format": "pt", "layer": spec.name, "step": str(packed.step)}}
    offset = 0
    for name, shape in tensors:
        end = offset + 4 * math.prod(shape)
        fields[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    length = align_up(8 + len(text), ALIGNMENT) - 8
    return struct.pack("<Q", length) + text.ljust(length)
