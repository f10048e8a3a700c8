"""What a plan knows of a machine: its limits, its speeds, and files that describe one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from megatrain_ray import prepare, speeds
from megatrain_ray.config import Config
from megatrain_ray.direct_io import TRANSFERS
from megatrain_ray.errors import ConfigError, PlanError
from megatrain_ray.machine import Speeds
from megatrain_ray.machine_file import load_machine

H100 = Path(__file__).resolve().parent.parent / "ray_configs" / "machines" / "h100-512gb.yaml"


def test_a_machine_file_may_say_how_fast_checksums_are(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    for line, expected in (("", 40e9), ("checksum: 12GB\n", 12e9)):
        path.write_text(H100.read_text() + line)
        assert load_machine(path).speeds.checksum_bytes_per_s == expected


@pytest.mark.parametrize(("given", "missing"), [("device_memory", "link"), ("link", "device_memory")])
def test_a_gpu_is_described_with_its_link_or_not_at_all(tmp_path: Path, given: str, missing: str) -> None:
    path = tmp_path / "machine.yaml"
    lines = H100.read_text().splitlines()
    line = next(number for number, each in enumerate(lines, 1) if each.startswith(given))
    for instead in ("", f"{missing}: null"):
        path.write_text("\n".join(instead if each.startswith(missing) else each for each in lines))
        with pytest.raises(ConfigError, match=rf"machine\.yaml:{line}: {missing} is missing; add it: {given} is given"):
            load_machine(path)
    path.write_text("\n".join(each for each in lines if not each.startswith((given, missing))))
    machine = load_machine(path)
    assert machine.device_memory_bytes is None and machine.speeds.link_bytes_per_s is None


def test_no_plan_for_a_gpu_that_is_not_described(
    tmp_path: Path, make_config: Callable[..., Any], model_dir: Callable[[str], Path]
) -> None:
    path = tmp_path / "machine.yaml"
    lines = [each for each in H100.read_text().splitlines() if not each.startswith(("device_memory", "link"))]
    path.write_text("\n".join(lines))

    def plan(machine: Path, device: str) -> dict[str, int]:
        config: Config = make_config(model_dir("llama"), tiers__device=device)
        return prepare.plan_elsewhere(config, load_machine(machine))[0].peak_bytes

    with pytest.raises(PlanError, match=r"tiers\.device is cuda:0, and .* \(H100 80 GB, 512 GB\) describes no GPU"):
        plan(path, "cuda:0")
    assert "device" not in plan(path, "auto") and "device" not in plan(H100, "cpu")
    assert "device" in plan(H100, "cuda:0")


def test_checksums_are_measured_as_the_store_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    together, blocks = Barrier(TRANSFERS), []

    def digest(block: memoryview) -> None:
        together.wait(timeout=10)  # breaks if fewer are under way
        blocks.append(block)

    monkeypatch.setattr(speeds.xxhash, "xxh3_64_digest", digest)
    monkeypatch.setattr(speeds, "LEAST_S", 0.0)
    assert speeds._checksum() > 0
    different = {id(block): block.nbytes for block in blocks}
    assert set(different.values()) == {8 << 20} and sum(different.values()) == speeds.DISK_BYTES
    assert len(blocks) == speeds.ROUNDS * len(different)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures in this process, with a cache of its own; all but disk and checksums are numbers made up."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(speeds, "DISK_BYTES", speeds.BLOCK_BYTES)
    monkeypatch.setattr(speeds, "LEAST_S", 0.0)
    monkeypatch.setattr(speeds, "_adamw", lambda threads: 2e9)
    monkeypatch.setattr(speeds, "_memcpy", lambda: 3e9)
    monkeypatch.setattr(speeds, "_layer_speeds", lambda dtype, device, memcpy: (4e9, 1e-6))
    monkeypatch.setattr(speeds.torch, "set_num_threads", lambda threads: None)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        measured = json.dumps(speeds._measure(Path(command[-2]), command[-1]))
        return subprocess.CompletedProcess(command, 0, f"a warning\n{measured}\n", "")

    monkeypatch.setattr(speeds.subprocess, "run", run)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(speeds.BlockFile, "write_from", write)


@pytest.mark.usefixtures("quick")
def test_what_is_measured_is_remembered(tmp_path: Path) -> None:
    assert speeds.known_speeds(tmp_path, "cpu") is None
    found = speeds.measure_speeds(tmp_path, "cpu")
    assert found.adamw_numel_per_s == 2e9 and found.disk_write_bytes_per_s != Speeds().disk_write_bytes_per_s
    assert found.source.startswith("measured on") and "assumed" not in found.source
    assert speeds.known_speeds(tmp_path, "cpu") == found
    speeds.remember_call(tmp_path, "cpu", 0.5)
    assert speeds.measure_speeds(tmp_path, "cpu").call_s == 0.5


@pytest.mark.usefixtures("quick")
def test_another_version_measures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = speeds.measure_speeds(tmp_path, "cpu")
    with monkeypatch.context() as other:
        other.setattr(speeds, "__version__", "0.0.1")
        assert speeds.known_speeds(tmp_path, "cpu") is None
    with monkeypatch.context() as other:
        more = make_dataclass("Speeds", [("tape_bytes_per_s", float, 1e9)], bases=(Speeds,), frozen=True)
        other.setattr(speeds, "Speeds", more)
        assert speeds.known_speeds(tmp_path, "cpu") is None
    assert speeds.known_speeds(tmp_path, "cpu") == found


@pytest.mark.usefixtures("quick", "full_disk")
def test_a_disk_that_cannot_be_measured_is_assumed_and_not_remembered(tmp_path: Path) -> None:
    found = speeds.measure_speeds(tmp_path, "cpu")
    assert (found.disk_read_bytes_per_s, found.disk_write_bytes_per_s) == (1e9, 1e9)
    assert found.adamw_numel_per_s == 2e9
    assert found.source.startswith("measured on 20")
    assert found.source.endswith(", but for the disk: No space left on device; 1 GB/s assumed")
    assert speeds.known_speeds(tmp_path, "cpu") is None
    assert not list(tmp_path.glob(".speed-*"))


@pytest.mark.usefixtures("quick", "full_disk")
def test_a_plan_says_what_could_not_be_measured_and_the_next_one_tries_again(
    make_config: Callable[..., Any], model_dir: Callable[[str], Path]
) -> None:
    told: list[str] = []
    for times in (1, 2):
        plan, _ = prepare.plan_here(make_config(model_dir("llama")), measure=False, tell=told.append)
        assert plan.speeds.endswith("but for the disk: No space left on device; 1 GB/s assumed")
        assert len(told) == times
