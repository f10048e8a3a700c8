"""The disk tier: one safetensors file a layer and generation, checked on every read.

A layer's file holds exactly the bytes of its `PackedLayer`, after a header padded to a block, so that transfers go
straight between file and buffer. A write never touches a file that the manifest names: it goes to a spare one, then
the manifest makes that the layer's newest, and what nobody needs any more becomes a spare. A process that dies in the
middle leaves the state before. The store survives the death of processes, not of the machine (checkpoints do): nothing
is flushed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import math
import os
import re
import shutil
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
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
from megatrain_ray.direct_io import (
    ALIGNMENT,
    BLOCK_BYTES,
    TRANSFERS,
    AlignedPool,
    BlockFile,
    DirectPolicy,
    aligned_empty,
)
from megatrain_ray.errors import StoreError
from megatrain_ray.layout import LayerSpec, align_up
from megatrain_ray.observe.layer_facts import describe_state
from megatrain_ray.packed import GRADS, MASTER, STATE, PackedLayer

__all__ = ["NvmeStore", "WriteReceipt", "is_store_file"]

_logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_FILE = re.compile(r"(embed|head|layer-\d+)(\.grads)?\.\d+\.safetensors|\.?manifest\.json(\.partial)?")


@dataclass(frozen=True, slots=True)
class WriteReceipt:
    """What a write did.

    Attributes:
        layer: Index in the stream.
        step: Of what was written.
        written_bytes: 0 when it was there already.
        read_bytes: From the store's own file, for a checkpoint.
        copied_bytes: Through aligned blocks, because the source was not aligned.
    """

    layer: int
    step: int
    written_bytes: int
    read_bytes: int = 0
    copied_bytes: int = 0


@dataclass(slots=True)
class _Version:
    """One complete file, as the manifest knows it."""

    file: str
    step: int
    data_start: int
    sections: list[str]
    spans: list[tuple[int, int, list[str]]]  # elements as they were written, and xxh3_64 of them in each section

    def checksums(self, section: str, start: int, stop: int) -> list[tuple[int, int, str]]:
        """Of the spans that lie in this one."""
        row = self.sections.index(section)
        return [(first, last, sums[row]) for first, last, sums in self.spans if start <= first and last <= stop]


Transfer = Callable[[memoryview, int], tuple[int, bytes]]
"""Moves a block from or to an offset of a file; returns the bytes moved and the checksum of the block."""


class NvmeStore:
    """Owns every byte on disk.

    Args:
        directory: Exists, locked by the run.
        layers: The stream.
        output_dir: Where checkpoints go.
        keep: Checkpoints to keep; None: all.
        pool_bytes: Most memory for read buffers that are used again.
        generations: Newest states of a layer to keep: 2 when a replay may ask for the one before the newest.
        direct_io: Try O_DIRECT.
    """

    def __init__(
        self,
        directory: Path,
        layers: Sequence[LayerSpec],
        *,
        output_dir: Path,
        pool_bytes: int,
        keep: int | None = None,
        generations: int = 2,
        direct_io: bool = True,
    ) -> None:
        self.directory = directory
        self.generations = generations
        self.layers = tuple(layers)
        self.output_dir = output_dir
        self.keep = keep
        self._writers: dict[int, CheckpointWriter] = {}
        self._policy = DirectPolicy(direct_io)
        self._pool = AlignedPool(pool_bytes)
        self._transfers = ThreadPoolExecutor(TRANSFERS, "transfer")
        self._staging: list[NDArray[np.uint8]] = []
        self._commit = asyncio.Lock()
        self._versions: dict[str, list[_Version]] = {}
        self._read_bytes = self._written_bytes = 0
        self._busy_s = 0.0
        manifest = directory / MANIFEST
        if manifest.exists():
            try:
                for name, versions in json.loads(manifest.read_text(encoding="utf-8")).items():
                    self._versions[name] = [_Version(**version) for version in versions]
            except (ValueError, TypeError, AttributeError) as error:
                raise StoreError(f"{manifest}: is damaged ({error}); resume from the newest checkpoint") from error
        named = {version.file for versions in self._versions.values() for version in versions}
        self._writing: set[str] = set()
        self._reading: Counter[str] = Counter()
        self._unfinished: dict[str, _Version] = {}  # states of which not every part has been written
        files = {path.name for path in directory.glob("*.safetensors") if is_store_file(path.name)}
        self._spares = files - named

    # --- what the schedule calls ------------------------------------------------------------------------------------

    async def read(self, layer: int, span: tuple[int, int] | None = None) -> PackedLayer:
        """The newest state of a layer, or of these elements of it. Moments that were never written are zero."""
        return await self._read(self._newest(layer), self.layers[layer], STATE, span)

    async def read_master(
        self, layer: int, step: int | None = None, span: tuple[int, int] | None = None
    ) -> PackedLayer:
        """The masters of a layer, the newest or those of a step, or these elements of them."""
        return await self._read(self._newest(layer, step), self.layers[layer], MASTER, span)

    async def read_grads(self, layer: int) -> PackedLayer:
        """The gradients of a layer that wait here for the norm."""
        return await self._read(self._named(_grads_key(self.layers[layer]))[0], self.layers[layer], GRADS)

    async def write(self, layer: int, packed: PackedLayer) -> WriteReceipt:
        """Writes a layer's state, or a part of it, beside the current one; the last part makes it current."""
        spec = self.layers[layer]
        versions = self._versions.setdefault(spec.name, [])
        if any(version.step == packed.step and set(version.sections) == set(packed.sections) for version in versions):
            return WriteReceipt(layer, packed.step, 0)
        return await self._write(spec, spec.name, packed, keep=self.generations)

    async def write_grads(self, layer: int, packed: PackedLayer) -> WriteReceipt:
        """Writes a layer's gradients."""
        spec = self.layers[layer]
        return await self._write(spec, _grads_key(spec), packed, keep=1)

    async def begin_save(self, number: int, save_spec: SaveSpec) -> None:
        """Starts checkpoint ``number``, which consists of ``save_spec``; a half-written one of that number is gone."""
        self._writers = {number: await asyncio.to_thread(CheckpointWriter, str(self.output_dir), number, save_spec)}
        _logger.info("checkpoint-%d begins", number)

    async def save(self, layer: int, number: int, packed: PackedLayer | None = None) -> WriteReceipt:
        """Writes a layer into checkpoint ``number``: as given, or as its file here has it."""
        writer = self._writers.get(number)
        if writer is None:  # this process was restarted in the middle: half a checkpoint is none
            return WriteReceipt(layer, number, 0)
        spec, read_bytes = self.layers[layer], 0
        if packed is not None:
            await asyncio.to_thread(writer.write_layer, spec, packed)
        else:
            version = self._newest(layer)
            with self._held(version):
                packed = await asyncio.to_thread(self._checked, version, spec)
                read_bytes = packed.data.nbytes
                await asyncio.to_thread(writer.write_layer, spec, packed)
        self._written_bytes += packed.data.nbytes
        self._read_bytes += read_bytes
        return WriteReceipt(layer, number, packed.data.nbytes, read_bytes)

    async def finish_save(self, number: int, trainer_state: dict[str, Any]) -> str | None:
        """Completes checkpoint ``number``, drops those beyond ``keep``; returns its path, or None if it was lost."""
        writer = self._writers.pop(number, None)
        if writer is None:
            return None
        path = await asyncio.to_thread(writer.finish, trainer_state)
        _logger.info("%s is complete", path)
        if self.keep is not None:
            await asyncio.to_thread(prune_checkpoints, self.output_dir, self.keep)
        return str(path)

    async def inspect(self, layer: int, tensor: str | None) -> dict[str, Any]:
        """Statistics of the newest state of a layer, or of one of its tensors, straight from its file."""
        spec, version = self.layers[layer], self._newest(layer)
        with self._held(version):
            state = self._map(version, spec, np.float32).reshape(len(version.sections), spec.numel)
            sections = dict(zip(version.sections, state, strict=True))
            return await asyncio.to_thread(describe_state, spec, version.step, sections, tensor)

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

    def _newest(self, layer: int, step: int | None = None) -> _Version:
        """The newest state of a layer, or that of a step: weights of another one would be wrong, and silently so."""
        name = self.layers[layer].name
        there = self._named(name)
        chosen = [version for version in there if step in (None, version.step)]
        assert chosen, f"{name}: step {step} was asked for; there are {[version.step for version in there]}"
        return max(chosen, key=lambda version: version.step)

    def _named(self, key: str) -> list[_Version]:
        """What the manifest names, which another process may have written."""
        if key not in self._versions:
            raise StoreError(
                f"{key}: {self.directory / MANIFEST} does not name it: the store was changed from outside; resume from "
                "the newest checkpoint"
            )
        return self._versions[key]

    async def _read(
        self, version: _Version, spec: LayerSpec, sections: tuple[str, ...], span: tuple[int, int] | None = None
    ) -> PackedLayer:
        start, stop = span or (0, spec.numel)
        size = 4 * (stop - start)
        buffer = self._pool.take(len(sections) * size)
        path = self.directory / version.file

        async def read_section(row: int, section: str) -> None:
            target = buffer[row * size : (row + 1) * size]
            if section not in version.sections:
                target[:] = 0  # moments before the first step
                return
            first_byte = version.data_start + version.sections.index(section) * spec.section_bytes("float32")
            spans = version.checksums(section, start, stop)
            assert sum(last - first for first, last, _ in spans) == stop - start, "read in other parts than written"
            for first, last, expected in spans:
                piece = target[4 * (first - start) : 4 * (last - start)]
                got, checksum = await self._blocks(_read_block(file), piece, first_byte + 4 * first)
                self._read_bytes += got
                if got != piece.nbytes:
                    raise StoreError(
                        f"{spec.name}: read {got} of {piece.nbytes} bytes of {section} from {path}: the file is "
                        "truncated; resume from the newest checkpoint",
                        context={"layer": spec.index, "path": str(path), "expected": piece.nbytes, "got": got},
                    )
                self._compare(version, spec, section, checksum, expected)

        started_s = time.perf_counter()
        try:
            with self._held(version), self._opened(path, write=False, spec=spec) as file:
                await _all(read_section(row, section) for row, section in enumerate(sections))
        except OSError as error:
            raise _unreadable(spec, path, error) from error
        self._busy_s += time.perf_counter() - started_s
        return PackedLayer(spec.index, version.step, "float32", sections, buffer, start)

    def _compare(self, version: _Version, spec: LayerSpec, section: str, checksum: str, expected: str) -> None:
        if checksum != expected:
            path = self.directory / version.file
            raise StoreError(
                f"{spec.name}: {section} in {path} has checksum {checksum}, expected {expected}: the file is "
                "damaged; resume from the newest checkpoint",
                context={"layer": spec.index, "path": str(path)},
            )

    def _map(self, version: _Version, spec: LayerSpec, dtype: type[np.generic]) -> NDArray[Any]:
        """A layer's state where its file has it: the page cache's memory, which the kernel takes back when it must."""
        path = self.directory / version.file
        nbytes = len(version.sections) * spec.section_bytes("float32")
        try:
            return np.memmap(path, dtype, "r", version.data_start, (nbytes // dtype().itemsize,))
        except (OSError, ValueError) as error:  # gone; shorter than it was
            raise _unreadable(spec, path, error) from error

    def _checked(self, version: _Version, spec: LayerSpec) -> PackedLayer:
        """`_map`, compared with its checksums."""
        data = self._map(version, spec, np.uint8)
        packed = PackedLayer(spec.index, version.step, "float32", tuple(version.sections), data)
        for section in version.sections:
            for first, last, expected in version.checksums(section, 0, spec.numel):
                checksum = _checksum(packed.section(section)[4 * first : 4 * last])
                self._compare(version, spec, section, checksum, expected)
        return packed

    async def _write(self, spec: LayerSpec, key: str, packed: PackedLayer, *, keep: int) -> WriteReceipt:
        header = _header(spec, packed)
        started_s = time.perf_counter()
        version = self._unfinished.get(key)
        if version is None or version.step != packed.step:
            if version is not None:  # of an attempt that has ended
                self._put_back(version.file)
            version = _Version(self._take_file(key), packed.step, len(header), list(packed.sections), [])
            self._unfinished[key] = version
        path = self.directory / version.file
        rows = [packed.section(section) for section in packed.sections]
        try:
            with self._opened(path, write=True, spec=spec) as file:
                padded = aligned_empty(len(header))
                padded[:] = np.frombuffer(header, np.uint8)
                offsets = [len(header) + row * 4 * spec.numel + 4 * packed.start for row in range(len(rows))]
                done = await _all(
                    [
                        self._blocks(self._write_block(file), padded, 0),
                        *(self._blocks(self._write_block(file), *each) for each in zip(rows, offsets, strict=True)),
                    ]
                )
                if packed.stop == spec.numel:
                    file.truncate(len(header) + len(rows) * 4 * spec.numel)
            others = [span for span in version.spans if span[0] != packed.start]  # a replay writes parts again
            version.spans = sorted([*others, (packed.start, packed.stop, [checksum for _, checksum in done[1:]])])
            if packed.stop == spec.numel:
                await self._commit_version(spec, key, version, keep)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = f"the disk has {shutil.disk_usage(self.directory).free} free" if full else error.strerror
            advice = "free some" if full else "look at the drive and its file system"
            raise StoreError(
                f"{spec.name}: {path} needs {packed.data.nbytes} bytes and cannot be written: {why}; {advice}, then "
                "resume from the newest checkpoint",
                context={"layer": spec.index, "path": str(path)},
            ) from error
        self._written_bytes += packed.data.nbytes
        self._busy_s += time.perf_counter() - started_s
        copied_bytes = sum(row.nbytes for row in rows if row.ctypes.data % ALIGNMENT)
        return WriteReceipt(spec.index, packed.step, packed.data.nbytes, copied_bytes=copied_bytes)

    async def _commit_version(self, spec: LayerSpec, key: str, version: _Version, keep: int) -> None:
        """Makes a state the newest of its key."""
        assert sum(stop - start for start, stop, _ in version.spans) == spec.numel, f"{spec.name}: parts are missing"
        self._unfinished.pop(key, None)
        before = self._versions.get(key, [])
        others = [other for other in before if other.step != version.step]
        self._versions[key] = sorted([*others, version], key=lambda each: each.step)[-keep:]
        await self._write_manifest()
        self._writing.discard(version.file)
        for name in {old.file for old in before} - {kept.file for kept in self._versions[key]}:
            self._put_back(name)

    def _take_file(self, key: str) -> str:
        """A file to write into, of which nobody knows; one that exists has its blocks on the disk already."""
        taken = {version.file for version in self._versions.get(key, [])} | self._writing | self._reading.keys()
        spares = self._spares - self._reading.keys()
        names = (f"{key}.{number}.safetensors" for number in itertools.count())
        name = next(name for name in names if name not in taken)
        if name not in spares and spares:
            spare = spares.pop()
            self._spares.remove(spare)
            os.rename(self.directory / spare, self.directory / name)
        self._spares.discard(name)
        self._writing.add(name)
        return name

    @contextlib.contextmanager
    def _held(self, version: _Version) -> Iterator[None]:
        """Nobody writes into the file meanwhile, even if it is no longer needed: people look at layers at any time."""
        self._reading[version.file] += 1
        try:
            yield
        finally:
            self._reading[version.file] -= 1
            self._reading += Counter()  # forgets what is at zero

    def _put_back(self, name: str) -> None:
        """Nobody needs this file any more."""
        self._writing.discard(name)
        self._spares.add(name)

    def _opened(self, path: Path, *, write: bool, spec: LayerSpec) -> BlockFile:
        try:
            return BlockFile(path, write=write, policy=self._policy)
        except FileNotFoundError:
            raise StoreError(
                f"{spec.name}: {path} is missing; resume from the newest checkpoint", context={"layer": spec.index}
            ) from None

    async def _blocks(self, transfer: Transfer, data: NDArray[np.uint8], offset: int) -> tuple[int, str]:
        """Moves ``data`` in blocks, several at a time; returns the bytes moved and the checksum of the blocks'."""
        loop = asyncio.get_running_loop()
        view = data.data
        done = await _all(
            loop.run_in_executor(self._transfers, transfer, view[start : start + BLOCK_BYTES], offset + start)
            for start in range(0, len(view), BLOCK_BYTES)
        )
        return sum(moved for moved, _ in done), _combined(digest for _, digest in done)

    def _write_block(self, file: BlockFile) -> Transfer:
        """Writes through an aligned block where the source is not aligned, as in the object store."""

        def write(source: memoryview, offset: int) -> tuple[int, bytes]:
            data = np.frombuffer(source, np.uint8)
            if data.ctypes.data % ALIGNMENT == 0:
                return file.write_from(source, offset), xxhash.xxh3_64_digest(source)
            block = self._staging.pop() if self._staging else aligned_empty(BLOCK_BYTES)
            try:
                staged = block[: data.nbytes]
                staged[:] = data
                return file.write_from(staged.data, offset), xxhash.xxh3_64_digest(staged.data)
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


async def _all(works: Iterable[Awaitable[Any]]) -> list[Any]:
    """Runs them side by side; when one fails, the others end before its error goes on: they use the same file."""
    done = await asyncio.gather(*works, return_exceptions=True)
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
    return done


def is_store_file(name: str) -> bool:
    """Whether a file of this name is the store's: its directory may hold files of others."""
    return _FILE.fullmatch(name) is not None


def _unreadable(spec: LayerSpec, path: Path, error: OSError | ValueError) -> StoreError:
    return StoreError(
        f"{spec.name}: {path} cannot be read: {getattr(error, 'strerror', error)}; look at the drive and its file "
        "system, then resume from the newest checkpoint",
        context={"layer": spec.index, "path": str(path)},
    )


def _grads_key(spec: LayerSpec) -> str:
    return f"{spec.name}.grads"


def _checksum(data: NDArray[np.uint8]) -> str:
    """As `NvmeStore._blocks` finds it: of the blocks' checksums, which the transfers compute on their way."""
    blocks = (data[start : start + BLOCK_BYTES] for start in range(0, data.nbytes, BLOCK_BYTES))
    return _combined(xxhash.xxh3_64_digest(block.data) for block in blocks)


def _combined(digests: Iterable[bytes]) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(digests))


def _read_block(file: BlockFile) -> Transfer:
    def read(target: memoryview, offset: int) -> tuple[int, bytes]:
        return file.read_into(target, offset), xxhash.xxh3_64_digest(target)

    return read


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
