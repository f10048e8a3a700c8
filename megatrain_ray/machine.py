"""A machine: memory as the cgroup allows it, shared memory, disk, cores, and how fast each tier moves its bytes."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from megatrain_ray.cgroup import memory_room

__all__ = ["Machine", "Speeds", "existing_parent", "openmp_environment", "probe"]


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast a machine's tiers are.

    Attributes:
        disk_read_bytes_per_s, disk_write_bytes_per_s: Direct I/O in large blocks, several at a time.
        checksum_bytes_per_s: xxh3 of blocks, by the store's transfer threads together.
        memcpy_bytes_per_s: Between large buffers in host memory, by a few threads.
        adamw_numel_per_s: Parameters that AdamW updates, with the optimizer's threads.
        float32_flops_per_s, bfloat16_flops_per_s: That the device reaches in a decoder layer, not its data sheet's.
        link_bytes_per_s: Host to device, pinned; None where the device is the host.
        operator_s: Of calling one of torch's operators, however small.
        call_s: Between two actions of an actor that has the next one waiting; a run measures it.
        call_cpu_s: Of one core, that driver, Ray and the actor's own threads work for a call, beside the call itself.
        source: Where the figures come from, for messages.
    """

    disk_read_bytes_per_s: float = 1e9
    disk_write_bytes_per_s: float = 1e9
    checksum_bytes_per_s: float = 20e9
    memcpy_bytes_per_s: float = 5e9
    adamw_numel_per_s: float = 0.4e9
    float32_flops_per_s: float = 100e9
    bfloat16_flops_per_s: float = 100e9
    link_bytes_per_s: float | None = None
    operator_s: float = 0.0
    call_s: float = 0.001
    call_cpu_s: float = 0.004
    source: str = "assumed: `megatrain-ray plan` measures this machine"

    def flops_per_s(self, dtype: str) -> float:
        """Of the device in a compute dtype."""
        return self.float32_flops_per_s if dtype == "float32" else self.bfloat16_flops_per_s

    @property
    def resources(self) -> tuple[str, ...]:
        """What can bound a step."""
        link = () if self.link_bytes_per_s is None else ("link",)
        return ("compute", "disk", "checksum", "optimizer", "memory", *link)

    def faster(self, resource: str, factor: float) -> Speeds:
        """The same machine with one resource ``factor`` times as fast."""
        fields = {
            "compute": ("float32_flops_per_s", "bfloat16_flops_per_s"),
            "disk": ("disk_read_bytes_per_s", "disk_write_bytes_per_s"),
            "checksum": ("checksum_bytes_per_s",),
            "optimizer": ("adamw_numel_per_s",),
            "memory": ("memcpy_bytes_per_s",),
            "link": ("link_bytes_per_s",),
        }[resource]
        return replace(self, **{name: getattr(self, name) * factor for name in fields})

    def describe(self, resource: str, factor: float, dtype: str) -> str:
        """``NVMe bounds the step: 7.0 GB/s instead of 0.7``, to be continued."""
        what, rate, unit = {
            "compute": ("the device's arithmetic bounds", self.flops_per_s(dtype) / 1e12, f"{dtype} TFLOP/s"),
            "disk": ("NVMe bounds", self.disk_read_bytes_per_s / 1e9, "GB/s"),
            "checksum": ("checksums bound", self.checksum_bytes_per_s / 1e9, "GB/s"),
            "optimizer": ("AdamW on the CPU bounds", self.adamw_numel_per_s / 1e9, "G parameters/s"),
            "memory": ("copying in host memory bounds", self.memcpy_bytes_per_s / 1e9, "GB/s"),
            "link": ("the link between host and device bounds", (self.link_bytes_per_s or 0) / 1e9, "GB/s"),
        }[resource]
        return f"{what} the step: {_short(rate * factor)} instead of {_short(rate)} {unit}"


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits that a plan must keep, and speeds that it counts on.

    Attributes:
        host_memory_bytes: Memory that the run may use, now.
        host_memory_source: Where that number comes from, for messages.
        shared_memory_bytes: Free bytes of /dev/shm, where Ray keeps its object store.
        disk_free_bytes: Free bytes where the store will be.
        output_free_bytes: Free bytes where checkpoints go; None: on the store's disk.
        cores: Processors that this process may run on.
        device_memory_bytes: Of the GPU; None for the CPU, whose memory is the host's.
        speeds: Measured, described or assumed.
        drive_endurance_bytes: That the drives may be written in their life (TBW); None: unknown.
    """

    host_memory_bytes: int
    host_memory_source: str
    shared_memory_bytes: int
    disk_free_bytes: int
    cores: int
    device_memory_bytes: int | None
    speeds: Speeds = Speeds()
    drive_endurance_bytes: int | None = None
    output_free_bytes: int | None = None


def _short(value: float) -> str:
    """Two or three digits, never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def existing_parent(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def openmp_environment(threads: int) -> dict[str, str]:
    """For a process that shares the machine with the other tiers."""
    # Idle OpenMP threads sleep: spinning ones would take the cores from the other tiers.
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def probe(
    store_dir: Path, output_dir: Path, device: str, speeds: Speeds | None = None, *, root: Path = Path("/")
) -> Machine:
    """Reads the limits of this machine.

    Args:
        store_dir: Where the store will be; it need not exist.
        output_dir: Where checkpoints go; the same.
        device: ``cpu`` or ``cuda:N``.
        speeds: Of this machine, where they are known.
        root: Has the ``proc`` and ``sys`` that tell the limits of control groups.
    """
    available, source = psutil.virtual_memory().available, "available memory of the host"
    room = memory_room(root)
    if room is not None and room.free_bytes < available:
        available, source = room.free_bytes, f"cgroup limit of {room.limit_bytes / 2**30:.1f} GiB"
    device_memory = None
    if device != "cpu":
        import torch

        device_memory = torch.cuda.mem_get_info(device)[0]
    disk, output = existing_parent(store_dir), existing_parent(output_dir)
    return Machine(
        host_memory_bytes=available,
        host_memory_source=source,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        disk_free_bytes=shutil.disk_usage(disk).free,
        cores=len(os.sched_getaffinity(0)),
        device_memory_bytes=device_memory,
        speeds=speeds or Speeds(),
        output_free_bytes=None if disk.stat().st_dev == output.stat().st_dev else shutil.disk_usage(output).free,
    )
