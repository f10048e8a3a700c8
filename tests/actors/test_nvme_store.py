"""The disk tier: what it writes it reads back, whatever the file system does, and damage never passes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from megatrain_ray import direct_io
from megatrain_ray.actors import nvme_store
from megatrain_ray.actors.nvme_store import NvmeStore, is_store_file
from megatrain_ray.direct_io import ALIGNMENT, AlignedPool, BlockFile, DirectPolicy
from megatrain_ray.errors import StoreError
from megatrain_ray.layout import LayerSpec, pack_layer
from megatrain_ray.packed import GRADS, MASTER, STATE, PackedLayer

LAYERS = (
    pack_layer(0, "embed", [("embed.weight", (97, 66))]),
    pack_layer(1, "layer-0000", [("a.weight", (66, 50)), ("a.bias", (66,)), ("norm.weight", (66,))]),
    pack_layer(2, "layer-0001", [("a.weight", (66, 50)), ("a.bias", (66,)), ("norm.weight", (66,))]),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a section, the last one partial."""
    monkeypatch.setattr(nvme_store, "BLOCK_BYTES", 2 * ALIGNMENT)


def make(directory: Path, **options: Any) -> NvmeStore:
    return NvmeStore(directory, LAYERS, output_dir=directory, pool_bytes=1 << 20, **options)


def packed(layer: int, step: int, sections: tuple[str, ...] = STATE) -> PackedLayer:
    """Bytes that differ by layer and step; not aligned, as in the object store."""
    nbytes = len(sections) * LAYERS[layer].section_bytes("float32")
    owner = np.empty(nbytes + 64, np.uint8)
    start = -owner.ctypes.data % 64 + (64 if owner.ctypes.data % ALIGNMENT == 0 else 0)
    data = owner[start : start + nbytes]
    data[:] = np.random.default_rng((layer, step)).integers(0, 256, nbytes, np.uint8)
    data.flags.writeable = False
    return PackedLayer(layer, step, "float32", sections, data)


def same(got: PackedLayer, wanted: PackedLayer) -> bool:
    return (got.layer, got.step, got.sections) == (wanted.layer, wanted.step, wanted.sections) and bool(
        (got.data == wanted.data).all()
    )


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read_back(tmp_path: Path, direct: bool) -> None:
    async def work() -> None:
        store = make(tmp_path, direct_io=direct)
        await asyncio.gather(*(store.write(spec.index, packed(spec.index, 1)) for spec in LAYERS))
        for spec in LAYERS:
            assert same(await store.read(spec.index), packed(spec.index, 1))
        await store.write_grads(1, packed(1, 2, GRADS))
        assert same(await store.read_grads(1), packed(1, 2, GRADS))
        again = make(tmp_path, direct_io=direct)  # another process
        assert same(await again.read(2), packed(2, 1))
        master = await again.read_master(0)
        assert master.sections == MASTER
        assert (master.data == packed(0, 1).section("master")).all()

    asyncio.run(work())


def test_layer_files_are_safetensors_with_aligned_data(tmp_path: Path) -> None:
    layer = packed(1, 3)
    asyncio.run(make(tmp_path).write(1, layer))
    (path,) = tmp_path.glob("layer-0000*.safetensors")
    assert int.from_bytes(path.read_bytes()[:8], "little") % ALIGNMENT == ALIGNMENT - 8
    assert path.stat().st_size == ALIGNMENT + layer.data.nbytes
    with safe_open(path, framework="np") as file:
        for section in STATE:
            values = layer.section(section).view(np.float32)
            for tensor in LAYERS[1].tensors:
                got: NDArray[np.float32] = file.get_tensor(f"{section}.{tensor.name}")
                assert got.shape == tensor.shape
                assert got.tobytes() == values[tensor.offset : tensor.end].tobytes()


def test_moments_that_were_never_written_are_zero(tmp_path: Path) -> None:
    async def work() -> None:
        store = make(tmp_path)
        await store.write(1, packed(1, 0, MASTER))
        state = await store.read(1)
        assert (state.section("master") == packed(1, 0, MASTER).data).all()
        assert not state.section("exp_avg").any() and not state.section("exp_avg_sq").any()

    asyncio.run(work())


@pytest.mark.parametrize("generations", [1, 2])
def test_a_layer_takes_one_file_a_generation_and_spares_are_used_again(tmp_path: Path, generations: int) -> None:
    async def work() -> None:
        store = make(tmp_path, generations=generations)
        sizes = set()
        for step in range(6):
            for spec in LAYERS:
                await store.write(spec.index, packed(spec.index, step))
            if step >= 2:
                sizes.add(len(list(tmp_path.glob("*.safetensors"))))
        # The spare is what the last write has left.
        assert sizes == {generations * len(LAYERS) + 1}
        for spec in LAYERS:
            assert same(await store.read(spec.index), packed(spec.index, 5))
            if generations == 2:
                assert (await store.read_master(spec.index, 4)).step == 4
            else:  # never those of another step
                with pytest.raises(AssertionError, match="step 4 was asked for"):
                    await store.read_master(spec.index, 4)

    asyncio.run(work())


def inodes(directory: Path) -> set[int]:
    return {path.stat().st_ino for path in directory.glob("*.safetensors")}


@pytest.mark.parametrize("generations", [1, 2])
def test_a_layer_that_is_looked_at_is_not_written_over(
    tmp_path: Path, generations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, written = threading.Event(), threading.Event()
    describe = nvme_store.describe_state

    def slowly(*arguments: Any) -> dict[str, Any]:
        looked.set()
        assert written.wait(30)
        return describe(*arguments)

    async def work() -> None:
        store = make(tmp_path, generations=generations)
        await store.write(1, packed(1, 1))
        expected = await store.inspect(1, None)
        monkeypatch.setattr(nvme_store, "describe_state", slowly)
        looking = asyncio.ensure_future(store.inspect(1, None))
        await asyncio.to_thread(looked.wait)
        for step in range(2, 6):
            await asyncio.gather(*(store.write(spec.index, packed(spec.index, step)) for spec in LAYERS))
            assert same(await store.read(1), packed(1, step))
        written.set()
        assert await looking == expected and expected["step"] == 1
        held = inodes(tmp_path)
        for step in range(6, 16):
            for spec in LAYERS:
                await store.write(spec.index, packed(spec.index, step))
        assert inodes(tmp_path) == held  # the file that was looked at is a spare like any other

    with np.errstate(all="ignore"):  # random bytes are no sensible numbers
        asyncio.run(work())


def test_a_write_that_dies_leaves_the_state_before(tmp_path: Path) -> None:
    async def work() -> None:
        store = make(tmp_path, generations=1)
        await store.write(1, packed(1, 1))
        await store.write(2, packed(2, 1))
        before = shutil.copytree(tmp_path, tmp_path.parent / "before")
        await store.write(1, packed(1, 2))
        # As if the process had died before the new manifest: new bytes, old manifest.
        shutil.copy(before / "manifest.json", tmp_path / "manifest.json")
        survivor = make(tmp_path, generations=1)
        for layer in (1, 2):
            assert same(await survivor.read(layer), packed(layer, 1))
        await survivor.write(1, packed(1, 2))
        assert same(await survivor.read(1), packed(1, 2))
        assert same(await survivor.read(2), packed(2, 1))

    asyncio.run(work())


def test_repeated_and_simultaneous_writes_of_one_step(tmp_path: Path) -> None:
    async def work() -> None:
        store = make(tmp_path, generations=1)
        await store.write(1, packed(1, 1))
        receipts = await asyncio.gather(*(store.write(1, packed(1, 2)) for _ in range(3)))
        assert all(receipt.step == 2 for receipt in receipts)
        assert (await store.write(1, packed(1, 2))).written_bytes == 0
        await store.write(2, packed(2, 2))
        await store.write(2, packed(2, 3))
        assert same(await store.read(1), packed(1, 2))
        assert same(await store.read(2), packed(2, 3))

    asyncio.run(work())


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("somebody's")

    async def work() -> None:
        store = make(tmp_path)
        for step in range(3):
            await store.write(0, packed(0, step))

    asyncio.run(work())
    assert (tmp_path / "model.safetensors").read_text() == "somebody's"
    assert all(is_store_file(path.name) for path in tmp_path.iterdir() if path.name != "model.safetensors")


def lose(path: Path) -> None:
    path.unlink()


def damage_length(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5000)


def damage_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3000] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose, "is missing"),
        (damage_length, r"read \d+ of \d+ bytes of exp_avg_sq .*truncated"),
        (damage_bit, r"exp_avg_sq .* has checksum \w+, expected \w+: the file is damaged"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    async def work() -> None:
        store = make(tmp_path)
        await store.write(1, packed(1, 1))
        (path,) = tmp_path.glob("layer-0000*.safetensors")
        damage(path)
        with pytest.raises(StoreError, match=f"layer-0000: .*{message}"):
            await store.read(1)

    asyncio.run(work())


@pytest.mark.parametrize("damage", [lose, damage_length])
def test_looking_at_a_damaged_layer_names_it(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    async def work() -> None:
        store = make(tmp_path)
        await store.write(1, packed(1, 1))
        (path,) = tmp_path.glob("layer-0000*.safetensors")
        damage(path)
        with pytest.raises(StoreError, match=r"layer-0000: .*layer-0000\S* cannot be read"):
            await store.inspect(1, None)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose, "layer-0000: .*manifest.json does not name it"),
        (lambda path: path.write_text(path.read_text()[:-20]), "manifest.json: is damaged"),
        (lambda path: path.write_text("[1]"), "manifest.json: is damaged"),
    ],
)
def test_a_manifest_that_was_lost_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    """A process that takes over has only the manifest to go by."""
    asyncio.run(make(tmp_path).write(1, packed(1, 1)))
    damage(tmp_path / "manifest.json")
    with pytest.raises(StoreError, match=message):
        asyncio.run(make(tmp_path).read(1))


@pytest.mark.parametrize(("number", "call"), [(errno.EIO, "preadv"), (errno.EROFS, "pwritev")])
def test_a_drive_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str) -> None:
    async def work() -> None:
        store = make(tmp_path)
        await store.write(1, packed(1, 1))

        def fail(*_: Any) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(StoreError, match=f"layer-0000: .*{os.strerror(number)}"):
            await (store.read(1) if call == "preadv" else store.write(1, packed(1, 2)))

    asyncio.run(work())


def test_a_full_disk_says_what_is_needed_and_keeps_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        store = make(tmp_path, generations=1)
        await store.write(1, packed(1, 1))
        with monkeypatch.context() as patch:

            def full(*_: Any) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(os, "pwritev", full)
            nbytes = packed(1, 2).data.nbytes
            with pytest.raises(StoreError, match=f"layer-0000: .* needs {nbytes} bytes .* the disk has \\d+ free"):
                await store.write(1, packed(1, 2))
        assert same(await store.read(1), packed(1, 1))
        await store.write(1, packed(1, 2))  # space again
        assert same(await store.read(1), packed(1, 2))

    asyncio.run(work())


# --- transfers

SIZES = [1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 2 * ALIGNMENT + 3, 5 * ALIGNMENT]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("direct", [True, False])
def test_any_length_passes(tmp_path: Path, nbytes: int, direct: bool) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    source, target = direct_io.aligned_empty(nbytes), direct_io.aligned_empty(nbytes)
    source[:] = data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tmpfs refuses direct I/O
        policy = DirectPolicy(direct)
        with BlockFile(tmp_path / "file", write=True, policy=policy) as file:
            assert file.write_from(source.data, 0) == nbytes
        with BlockFile(tmp_path / "file", write=False, policy=policy) as file:
            assert file.read_into(target.data, 0) == nbytes
            assert file.read_into(target.data, nbytes + ALIGNMENT - nbytes % ALIGNMENT) == 0
    assert (tmp_path / "file").stat().st_size == nbytes
    assert (target == data).all()


@pytest.mark.parametrize("most", [1, 700, ALIGNMENT])
def test_short_transfers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    nbytes = 3 * ALIGNMENT
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    source, target = direct_io.aligned_empty(nbytes), direct_io.aligned_empty(nbytes)
    source[:] = data
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:most]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:most]], at))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = DirectPolicy(True)
        with BlockFile(tmp_path / "file", write=True, policy=policy) as file:
            assert file.write_from(source.data, 0) == nbytes
        with BlockFile(tmp_path / "file", write=False, policy=policy) as file:
            assert file.read_into(target.data, 0) == nbytes
    assert (target == data).all()


@pytest.mark.parametrize("where", ["open", "write"])
def test_refused_direct_io_falls_back_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real_open, pwritev = os.open, os.pwritev

    def no_direct_open(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *mode)

    def no_direct_write(descriptor: int, views: Any, offset: int) -> int:
        if direct_io.fcntl.fcntl(descriptor, direct_io.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwritev(descriptor, views, offset)

    if where == "open":
        monkeypatch.setattr(os, "open", no_direct_open)
    else:
        monkeypatch.setattr(os, "pwritev", no_direct_write)

    async def work() -> None:
        store = make(tmp_path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                for spec in LAYERS:
                    await store.write(spec.index, packed(spec.index, step))
        assert len([one for one in caught if "direct I/O refused" in str(one.message)]) == 1
        assert (await store.status())["io"] == "buffered"
        for spec in LAYERS:
            assert same(await store.read(spec.index), packed(spec.index, 1))

    asyncio.run(work())


def test_pooled_buffers_are_aligned_and_never_shared_while_in_use() -> None:
    pool = AlignedPool(4 * ALIGNMENT + 4 * ALIGNMENT)
    first = pool.take(ALIGNMENT)
    second = pool.take(ALIGNMENT)
    assert first.ctypes.data % ALIGNMENT == second.ctypes.data % ALIGNMENT == 0
    assert first.ctypes.data != second.ctypes.data
    view = first[10:20]
    address = first.ctypes.data
    del first
    assert pool.take(ALIGNMENT).ctypes.data != address  # a view still looks at it
    del view
    assert pool.take(ALIGNMENT).ctypes.data == address


def test_no_transfer_is_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux moves at most 0x7ffff000 bytes a call: no call asks for more than a block, so sections over 2 GiB pass."""
    asked: list[int] = []
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: (asked.append(len(views[0])), pwritev(fd, views, at))[1])
    asyncio.run(make(tmp_path).write(0, packed(0, 0)))
    assert max(asked) <= nvme_store.BLOCK_BYTES < 0x7FFFF000
    assert sum(asked) == ALIGNMENT + packed(0, 0).data.nbytes


def test_layer_spec_names_are_store_files() -> None:
    def names(spec: LayerSpec) -> list[str]:
        return [f"{spec.name}.0.safetensors", f"{spec.name}.grads.1.safetensors"]

    assert all(is_store_file(name) for spec in LAYERS for name in names(spec))
    assert not any(map(is_store_file, ["model.safetensors", "layer.safetensors", "notes.txt", ".lock"]))


def test_a_layer_written_in_parts_counts_with_its_last_one(tmp_path: Path) -> None:
    async def work() -> None:
        store = make(tmp_path, generations=1)
        spec, half = LAYERS[1], LAYERS[1].numel // 2
        masters = packed(1, 1, MASTER).data
        for start in (0, half):
            part = masters[4 * start : 4 * (start + half)]
            await store.write(1, PackedLayer(1, 1, "float32", MASTER, part, start))
        whole = packed(1, 2)
        rows = whole.data.reshape(len(STATE), -1)
        first = PackedLayer(1, 2, "float32", STATE, rows[:, : 4 * half].flatten())
        last = PackedLayer(1, 2, "float32", STATE, rows[:, 4 * half :].flatten(), half)
        await store.write(1, first)
        assert (await store.read_master(1)).step == 1
        assert same(await store.read(1, (0, half)), PackedLayer(1, 1, "float32", STATE, first_of(masters)))
        await store.write(1, first)  # a replay
        await store.write(1, last)
        assert same(await store.read(1), whole)
        assert same(await store.read(1, (half, spec.numel)), last)
        assert (await store.read(1, (half, spec.numel))).start == half
        again = make(tmp_path, generations=1)
        assert same(await again.read(1, (0, half)), first)
        path = next(path for path in tmp_path.glob("layer-0000.*") if json.loads(
            (tmp_path / "manifest.json").read_text())["layer-0000"][0]["file"] == path.name)  # fmt: skip
        with path.open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\xff\xff\xff\xff")
        assert same(await again.read(1, (0, half)), first)
        with pytest.raises(StoreError, match=r"exp_avg_sq .* damaged"):
            await again.read(1, (half, spec.numel))

    def first_of(masters: NDArray[np.uint8]) -> NDArray[np.uint8]:
        part = masters[: masters.nbytes // 2]
        return np.concatenate([part, np.zeros(2 * part.nbytes, np.uint8)])

    asyncio.run(work())
