"""A run's directory: who owns it, its metrics, and what a new run may do with an old one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain_ray.actors.nvme_store import is_store_file
from megatrain_ray.checkpoint.directory import list_checkpoints, remove_debris, remove_tree
from megatrain_ray.errors import RunDirectoryError
from megatrain_ray.observe.logs import LOGS

__all__ = ["RunDirectory", "output_path", "replace_text"]

LOCK = ".lock"
STATE = "state.json"
RUNS_HOME = "megatrain_runs"
"""Folder in the home directory for relative output directories of submitted jobs."""


def output_path(output_dir: str) -> Path:
    """``output_dir`` as an absolute path.

    Relative ones count from the working directory. Under ``ray job submit`` that is a copy inside Ray's session
    directory, which disappears: there they count from ``~/megatrain_runs``.
    """
    path = Path(output_dir).expanduser()
    if not path.is_absolute() and "runtime_resources" in Path.cwd().parts:
        return Path.home() / RUNS_HOME / path
    return path.absolute()


class RunDirectory:
    """One ``output_dir``, and the store directory that belongs to it.

    Args:
        path: Absolute.
        store: Absolute; None: ``path/store``.
    """

    def __init__(self, path: Path, store: Path | None = None) -> None:
        self.path = path
        self.store = store or path / "store"
        self.metrics = path / "metrics.jsonl"
        self._locked: list[Path] = []
        self._made: list[Path] = []

    @property
    def name(self) -> str:
        """Of the run, in the names of its actors."""
        return self.path.name

    def holds_a_run(self) -> bool:
        return self.metrics.exists() or (self.path / "config.yaml").exists() or bool(list_checkpoints(self.path))

    def claim(self, *, resume: bool, overwrite: bool) -> list[Path]:
        """Takes the directory and the store's for this process.

        Returns:
            What an interrupted save or removal had left behind, which is gone now.

        Raises:
            RunDirectoryError: It holds another run, or somebody works in it, or it cannot be written.
        """
        if self.holds_a_run() and not resume and not overwrite:
            raise RunDirectoryError(
                f"{self.path} holds a run: continue it with --resume, replace it with --overwrite, or name another "
                "training.output_dir"
            )
        try:
            self._lock(self.path, "name another training.output_dir")
            if self.store != self.path:  # which may lie elsewhere, and be another run's too
                self._lock(self.store, "set tiers.nvme_dir to another directory")
            if overwrite and not resume:
                self._clear()
            debris = remove_debris(self.path)
            for entry in self.store.iterdir():  # a store is disposable: the run's state is in its checkpoints
                if is_store_file(entry.name):
                    entry.unlink()
        except OSError as error:
            self.release()
            raise RunDirectoryError(f"{error.filename or self.path}: cannot be used: {error.strerror}") from error
        except RunDirectoryError:
            self.release()
            raise
        return debris

    def release(self) -> None:
        """Gives up the locks; a run that was refused leaves no empty directories."""
        while self._locked:
            self._locked.pop().unlink(missing_ok=True)
        while self._made:
            with contextlib.suppress(OSError):  # not empty: the run has begun
                self._made.pop().rmdir()

    def _lock(self, directory: Path, instead: str) -> None:
        """Makes a directory this run's; ``instead`` says what one may do when it is another's."""
        made = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        lock = directory / LOCK
        me = os.getpid()
        mine = {"pid": me, "started_s": _started_s(me), "host": socket.gethostname(), "run": str(self.path)}
        with _alone(directory):
            holder = _read_holder(lock)
            if holder is not None and _may_live(holder):
                raise RunDirectoryError(
                    f"{directory} is in use by process {holder['pid']} on {holder['host']} (run {holder['run']}): "
                    f"stop it first, or {instead}; if it is gone, remove {lock}"
                )
            lock.unlink(missing_ok=True)  # stale: its process is gone
            with lock.open("x", encoding="utf-8") as file:
                self._locked.append(lock)
                self._made += [directory] if made else []
                json.dump(mine, file)

    def _clear(self) -> None:
        for checkpoint in list_checkpoints(self.path):
            remove_tree(checkpoint.path)
        names = ("metrics.jsonl", "config.yaml", "plan.json", "trace.json", "about.json", "report.html", STATE)
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        for log in (self.path / LOGS).glob("*.log"):
            log.unlink()

    def stored_bytes(self) -> int:
        """Bytes of the store's layers now."""
        total = 0
        for path in filter(lambda path: is_store_file(path.name), self.store.glob("*.safetensors")):
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                total += path.stat().st_size
        return total

    # --- metrics ----------------------------------------------------------------------------------------------------

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records so far; a line that a crash cut off is left out."""
        records = []
        if self.metrics.exists():
            for line in self.metrics.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):
                    records.append(json.loads(line))
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Adds one record, and flushes it."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def cut_after(self, step: int) -> None:
        """Drops records of steps after ``step``, and a last line that a crash cut off."""
        if self.metrics.exists():
            kept = [json.dumps(record) for record in self.read_metrics() if record["step"] <= step]
            replace_text(self.metrics, "".join(f"{line}\n" for line in kept))

    # --- state ------------------------------------------------------------------------------------------------------

    def write_state(self, state: str, **facts: Any) -> None:
        """Says in a file, for those who look later, what the run is doing."""
        replace_text(self.path / STATE, json.dumps({"state": state, "pid": os.getpid(), **facts}, indent=2))

    def read_state(self) -> dict[str, Any] | None:
        """What `write_state` said last."""
        try:
            state: dict[str, Any] = json.loads((self.path / STATE).read_text(encoding="utf-8"))
            return state
        except (OSError, ValueError):
            return None

    def is_locked(self) -> bool:
        """Whether a process that may be alive holds the run."""
        holder = _read_holder(self.path / LOCK)
        return holder is not None and _may_live(holder)


def replace_text(path: Path, text: str) -> None:
    """Replaces a small file; readers see the old or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process of this host at a time: a lock that another is about to write or to replace looks stale."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems know no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _started_s(pid: int) -> float | None:
    """When a process started, or None: a number used again belongs to another process.

    Seconds after boot, not of the day: when the clock is set, a process stays the one it was.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _may_live(holder: dict[str, Any]) -> bool:
    """Whether a lock's process may still run; of another host's nobody here can tell."""
    return bool(holder["host"] != socket.gethostname() or _started_s(holder["pid"]) == holder["started_s"])


def _read_holder(lock: Path) -> dict[str, Any] | None:
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
        return holder if {"pid", "started_s", "host", "run"} <= set(holder) else None
    except (OSError, ValueError, TypeError):
        return None
