"""Our safetensors files against the safetensors package, and broken headers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from megatrain_ray.checkpoint import safetensors_file
from megatrain_ray.checkpoint.safetensors_file import SafetensorsWriter, StoredTensor, read_as_float32, read_header
from megatrain_ray.errors import ModelError


def read(path: Path, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    tensor = read_header(path)[name]
    out = np.full(tensor.numel, -1, np.float32)
    file_descriptor = os.open(path, os.O_RDONLY)
    read_as_float32(file_descriptor, tensor, out)
    os.close(file_descriptor)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_read_as_the_package_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -3e-5, 6e4, 1e-8, float("inf"), float("nan")]).to(dtype)
    random = torch.randn(3, 5, 7).to(dtype)
    save_file({"values": values, "random": random, "empty": values[:0]}, tmp_path / "a.safetensors")
    for name, expected in (("values", values), ("random", random), ("empty", values[:0])):
        assert read(tmp_path / "a.safetensors", name).tobytes() == expected.float().numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_reads_and_many_blocks(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000).to(dtype)
    save_file({"values": values}, tmp_path / "a.safetensors")
    preadv = os.preadv
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 256)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:37]], offset))
    assert np.array_equal(read(tmp_path / "a.safetensors", "values"), values.float().numpy())


def test_a_tensor_beyond_two_gibibytes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    numel = (2 << 30) // 2 + 5
    header = json.dumps({"big": {"dtype": "BF16", "shape": [numel], "data_offsets": [0, 2 * numel]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * numel)  # a hole: zeros without disk space
        file.seek(-2, os.SEEK_END)
        file.write((0x3F80).to_bytes(2, "little"))  # the last value is 1
    tensor = read_header(path)["big"]
    tail = np.empty(3, np.float32)
    file_descriptor = os.open(path, os.O_RDONLY)
    read_as_float32(file_descriptor, tensor, tail, start=numel - 3)
    os.close(file_descriptor)
    assert tail.tolist() == [0.0, 0.0, 1.0]


def test_written_files_open_with_the_package(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    first, second = np.arange(6, dtype=np.float32), np.arange(4, dtype=np.uint16)
    writer = SafetensorsWriter(path, {"first": ("F32", (2, 3)), "second": ("BF16", (4,))}, {"step": "7"})
    writer.write([first.reshape(2, 3)])
    writer.write([second[:1], second[1:]])
    record = writer.close()
    content = path.read_bytes()
    assert (record.bytes, record.xxh3_64) == (len(content), xxhash.xxh3_64_hexdigest(content))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}
        assert torch.equal(file.get_tensor("first"), torch.from_numpy(first).view(2, 3))
        assert torch.equal(file.get_tensor("second").view(torch.uint16), torch.from_numpy(second))


def test_a_file_with_missing_values_is_not_closed_quietly(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "a.safetensors", {"first": ("F32", (2, 3))})
    writer.write([np.zeros(5, np.float32)])
    with pytest.raises(AssertionError, match=r"wrote .* of .* bytes"):
        writer.close()
    writer.abandon()


def entry(dtype: str = "F32", shape: object = (2,), begin: object = 0, end: object = 8) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"a": entry()}, 7, "expected .*: it is truncated"),
        ({"a": entry()}, 9, "longer than its header says"),
        ({"a": entry(begin=4, end=12)}, 12, "starts at byte"),
        ({"a": entry(), "b": entry(begin=4, end=12)}, 12, "starts at byte"),
        ({"a": entry(end=4)}, 4, r"a of shape \[2\] in F32 cannot lie at bytes 0 to 4"),
        ({"a": entry(shape=[-2], end=8)}, 8, "entry of a is malformed"),
        ({"a": entry(shape="2")}, 8, "malformed"),
        ({"a": 5}, 8, "malformed"),
        ({"a": entry(dtype="F4")}, 8, "dtype F4"),
        ([], 0, "must be a JSON object"),
        ("{broken", 0, "no JSON"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, header: object, data_bytes: int, message: str) -> None:
    encoded = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"\0" * data_bytes)
    with pytest.raises(ModelError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 64, (10**6).to_bytes(8, "little") + b"{}"])
def test_a_nonsense_header_length_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"header has \d+ bytes, but the file has \d+"):
        read_header(tmp_path / "a.safetensors")


def test_a_file_that_shrinks_while_reading_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\0" * 10)
    file_descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(ModelError, match="ended 6 bytes early"):
        read_as_float32(file_descriptor, StoredTensor(path, "a", "F32", (4,), 0), np.empty(4, np.float32))
    os.close(file_descriptor)
