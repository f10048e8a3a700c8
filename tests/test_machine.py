"""What a plan knows of a machine: its limits, its speeds, and files that describe one."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier

import pytest

from megatrain_ray import speeds
from megatrain_ray.actors import nvme_store
from megatrain_ray.machine_file import load_machine

H100 = Path(__file__).resolve().parent.parent / "ray_configs" / "machines" / "h100-512gb.yaml"


def test_a_machine_file_may_say_how_fast_checksums_are(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    for line, expected in (("", 40e9), ("checksum: 12GB\n", 12e9)):
        path.write_text(H100.read_text() + line)
        assert load_machine(path).speeds.checksum_bytes_per_s == expected


def test_checksums_are_measured_as_the_store_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    together, blocks = Barrier(nvme_store._TRANSFERS), []

    def digest(block: memoryview) -> None:
        together.wait(timeout=10)  # breaks if fewer are under way
        blocks.append(block)

    monkeypatch.setattr(speeds.xxhash, "xxh3_64_digest", digest)
    monkeypatch.setattr(speeds, "LEAST_S", 0.0)
    assert speeds._checksum() > 0
    different = {id(block): block.nbytes for block in blocks}
    assert set(different.values()) == {8 << 20} and sum(different.values()) == speeds.DISK_BYTES
    assert len(blocks) == speeds.ROUNDS * len(different)
