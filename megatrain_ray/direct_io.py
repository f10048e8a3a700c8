"""Block-wise reads and writes past the page cache, and the aligned memory that they need.

O_DIRECT wants file offset, length and memory address to be multiples of the drive's logical block; 4096 suits all.
File systems without it (tmpfs, some overlays) refuse at open or at the first transfer: then the same transfers go
through the page cache, once and for all, with one warning.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_BYTES", "TRANSFERS", "AlignedPool", "BlockFile", "DirectPolicy", "aligned_empty"]

ALIGNMENT = 4096
BLOCK_BYTES = 8 << 20
"""One transfer: long enough for full speed, short enough that several are under way."""
TRANSFERS = 4
"""Under way at once: enough for a drive's queue, few enough to bound staging memory."""


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """Uninitialized memory that starts at a multiple of `ALIGNMENT`."""
    return _aligned(np.empty(nbytes + ALIGNMENT, np.uint8), nbytes)


def _aligned(owner: NDArray[np.uint8], nbytes: int) -> NDArray[np.uint8]:
    start = -owner.ctypes.data % ALIGNMENT
    return owner[start : start + nbytes]


class AlignedPool:
    """Aligned buffers that are used again once nobody looks at them: fresh pages cost more than the copy into them.

    Args:
        capacity_bytes: Most memory to keep: for a buffer of a new size idle ones go, and what is over is forgotten
            after use.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._owners: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A buffer; it is free again when the last view of it is gone."""
        with self._lock:
            idle = []
            for index in range(len(self._owners)):
                # References: the list and the argument; each view adds one.
                if sys.getrefcount(self._owners[index]) > 2:
                    continue
                size = self._owners[index].nbytes - ALIGNMENT
                if nbytes <= size <= 2 * nbytes:
                    return _aligned(self._owners[index], nbytes)
                idle.append(index)
            while idle and self._kept_bytes() + nbytes > self._capacity_bytes:
                del self._owners[idle.pop()]
            owner = np.empty(nbytes + ALIGNMENT, np.uint8)
            if self._kept_bytes() + nbytes <= self._capacity_bytes:
                self._owners.append(owner)
            return _aligned(owner, nbytes)

    def _kept_bytes(self) -> int:
        return sum(owner.nbytes - ALIGNMENT for owner in self._owners)


class DirectPolicy:
    """Whether O_DIRECT is (still) tried; shared by all files of a store."""

    def __init__(self, wanted: bool) -> None:
        self.direct = wanted

    def give_up(self, path: Path, reason: OSError) -> None:
        """The file system refuses; says so once."""
        if self.direct:
            self.direct = False
            warnings.warn(
                f"{path.parent}: direct I/O refused ({reason.strerror}); using buffered I/O, which competes for memory",
                stacklevel=3,
            )


class BlockFile:
    """One open file.

    Args:
        path: The file; created when written.
        write: Open for writing instead of reading.
        policy: Of the store.
    """

    def __init__(self, path: Path, *, write: bool, policy: DirectPolicy) -> None:
        self.path = path
        self._policy = policy
        self._flags = (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | os.O_CLOEXEC
        self._descriptor = self._open()

    def _open(self) -> int:
        if self._policy.direct:
            try:
                return os.open(self.path, self._flags | os.O_DIRECT, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._policy.give_up(self.path, error)
        return os.open(self.path, self._flags, 0o644)

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fills ``target`` from ``offset`` on; returns fewer bytes only at the end of the file."""
        return self._transfer(os.preadv, target, offset)

    def write_from(self, source: memoryview, offset: int) -> int:
        """Writes all of ``source``."""
        return self._transfer(os.pwritev, source, offset)

    def truncate(self, length: int) -> None:
        os.ftruncate(self._descriptor, length)

    def _transfer(self, call: Callable[[int, Any, int], int], view: memoryview, offset: int) -> int:
        done = 0
        while done < len(view):
            try:
                moved = call(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct():
                    raise
                # Also after a short transfer that left offset or address unaligned.
                if done % ALIGNMENT == 0:
                    self._policy.give_up(self.path, error)
                self._drop_direct()
                continue
            if moved == 0:
                return done
            done += moved
        return done

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def _drop_direct(self) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
