"""What processes really take: private memory, its peaks, and what the object store has touched (no ray, no torch)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

__all__ = ["PeakWatch", "RayMemory", "private_bytes"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def private_bytes(pid: int | None = None) -> int:
    """Resident bytes of a process (None: this one) that it does not share: heap and anonymous memory.

    The object store, the masters' memory and mapped libraries are shared (``/proc/PID/statm``: resident - shared).
    """
    with open(f"/proc/{pid or 'self'}/statm", encoding="ascii") as statm:
        _, resident, shared, *_ = statm.read().split()
    return (int(resident) - int(shared)) * _PAGE_BYTES


class PeakWatch:
    """Samples this process's private memory: what is allocated and freed within one call shows at no call's end.

    Args:
        interval_s: Between samples; one costs about 20 microseconds.
    """

    def __init__(self, interval_s: float = 0.02) -> None:
        self._peak = 0
        self._interval_s = interval_s
        threading.Thread(target=self._run, name="memory-watch", daemon=True).start()

    def take(self) -> int:
        """The most since the last call, this moment included."""
        peak, self._peak = max(self._peak, private_bytes()), 0
        return peak

    def _run(self) -> None:
        while True:
            self._peak = max(self._peak, private_bytes())
            time.sleep(self._interval_s)


class RayMemory:
    """What Ray itself takes on this host, as seen from its raylet.

    Args:
        object_store_socket: Of this node, as `ray.nodes` names it.
        ours: Gives the processes that are accounted for elsewhere; those of actors change when these restart.
    """

    def __init__(self, object_store_socket: str, ours: Callable[[], set[int]]) -> None:
        self._ours = ours
        self._raylet = next((each for each in psutil.process_iter() if _serves(each, object_store_socket)), None)
        self._plasma = self._find_plasma()

    def object_store_bytes(self) -> int | None:
        """Memory that the object store has touched so far, and therefore keeps; None where it cannot be seen."""
        if self._plasma is None:
            return None
        with contextlib.suppress(OSError):
            return self._plasma.stat().st_blocks * 512
        return None

    def processes_bytes(self) -> int:
        """Private memory of Ray's processes now, without ours; 0 where they cannot be seen."""
        total, ours = 0, self._ours()
        with contextlib.suppress(psutil.Error):
            if self._raylet is not None:
                # The raylet's siblings are the other services, its children agents and idle workers.
                parent = self._raylet.parent()
                family = parent.children(recursive=True) if parent is not None and parent.pid != 1 else []
                for process in family or [self._raylet, *self._raylet.children(recursive=True)]:
                    if process.pid not in ours:
                        with contextlib.suppress(OSError, ValueError):
                            total += private_bytes(process.pid)
        return total

    def _find_plasma(self) -> Path | None:
        if self._raylet is None:
            return None
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{self._raylet.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if "/plasma" in os.readlink(descriptor):
                        return descriptor
        return None


def _serves(process: psutil.Process, object_store_socket: str) -> bool:
    try:
        return process.name() == "raylet" and any(object_store_socket in word for word in process.cmdline())
    except psutil.Error:
        return False
