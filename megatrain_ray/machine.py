"""What this machine has: memory as the cgroup allows it, shared memory, disk, cores."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Machine", "existing_parent", "probe"]

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USAGE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits that a plan must keep.

    Attributes:
        host_memory_bytes: Memory that the run may use, now.
        host_memory_source: Where that number comes from, for messages.
        shared_memory_bytes: Free bytes of /dev/shm, where Ray keeps its object store.
        disk_free_bytes: Free bytes where the store will be.
        cores: Processors that this process may run on.
        device_memory_bytes: Of the GPU; None for the CPU, whose memory is the host's.
    """

    host_memory_bytes: int
    host_memory_source: str
    shared_memory_bytes: int
    disk_free_bytes: int
    cores: int
    device_memory_bytes: int | None


def _first_number(paths: tuple[str, ...]) -> int | None:
    for path in paths:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def existing_parent(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def probe(store_dir: Path, device: str) -> Machine:
    """Reads the limits of this machine.

    Args:
        store_dir: Where the store will be; it need not exist.
        device: ``cpu`` or ``cuda:N``.
    """
    available, source = psutil.virtual_memory().available, "available memory of the host"
    limit, usage = _first_number(_CGROUP_LIMITS), _first_number(_CGROUP_USAGE)
    if limit is not None and limit - (usage or 0) < available:
        available, source = limit - (usage or 0), f"cgroup limit of {limit / 2**30:.1f} GiB"
    device_memory = None
    if device != "cpu":
        import torch

        device_memory = torch.cuda.mem_get_info(device)[0]
    return Machine(
        host_memory_bytes=available,
        host_memory_source=source,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        disk_free_bytes=shutil.disk_usage(existing_parent(store_dir)).free,
        cores=len(os.sched_getaffinity(0)),
        device_memory_bytes=device_memory,
    )
