"""Memory that the control groups of this process leave it: containers, batch systems and systemd limit it there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = ["Room", "memory_room"]

_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes the largest number of pages where there is no limit; version 2 writes ``max``."""


class Room(NamedTuple):
    """What a group may still take, and the limit that it comes from."""

    free_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class _Interface:
    """Where a version of control groups keeps its figures: files of each group, and a line of ``memory.stat``."""

    mount: str
    limit: str
    usage: str
    inactive_file: str


_V1 = _Interface("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Interface("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def memory_room(root: Path = Path("/")) -> Room | None:
    """The least that any group leaves, of those that this process is in; None where none has a limit.

    Args:
        root: Has ``proc`` and ``sys``.
    """
    rooms = (
        _room(root / interface.mount / level.relative_to("/"), interface)
        for interface, group in _groups(root)
        for level in (group, *group.parents)
    )
    return min((room for room in rooms if room is not None), default=None)


def _groups(root: Path) -> Iterator[tuple[_Interface, PurePosixPath]]:
    """Those that account for memory; in a container their paths may be the host's, which are not mounted here."""
    try:
        text = os.fsdecode((root / "proc/self/cgroup").read_bytes())
    except OSError:
        return
    for line in text.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            yield _V2, PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield _V1, PurePosixPath(path)


def _room(directory: Path, interface: _Interface) -> Room | None:
    limit = _number(directory / interface.limit)
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    # The kernel drops cached files before it refuses memory to anyone.
    used = (_number(directory / interface.usage) or 0) - _statistic(directory / "memory.stat", interface.inactive_file)
    return Room(max(limit - used, 0), limit)


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # absent, as in the root of version 2; `max`
        return int(path.read_text(encoding="ascii"))
    return None


def _statistic(path: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
