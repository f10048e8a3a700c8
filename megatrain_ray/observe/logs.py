"""Logs under ``output_dir/logs``: one file a process, each line with time, actor, step and layer (no ray, no torch).

Each process appends to its own file, a line at a time, so that nothing is lost with a process that is killed and a new
one goes on where the old one ended. Only events are logged, never single actions; warnings travel to the driver's
terminal as well, with the next receipt.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from contextvars import ContextVar
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import NamedTuple, TextIO

__all__ = ["LOGS", "NOWHERE", "ActorLog", "DriverLog", "Place"]

LOGS = "logs"
_PACKAGE = __package__.partition(".")[0]
_RAY = logging.getLogger("ray")
_MOST_NOTES = 20
"""Warnings between two receipts that are shown in the terminal; the file has them all."""

_FOR_DEVELOPERS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
"""Warnings that stay in the file."""


class Place(NamedTuple):
    """Where in the run a process is."""

    step: int | None = None
    layer: str | None = None


NOWHERE = Place()
_place: ContextVar[Place] = ContextVar("place")


class _Lines(logging.Formatter):
    """``TIME ACTOR step N LAYER LEVEL MESSAGE``, before every line of a traceback too."""

    def __init__(self, actor: str) -> None:
        super().__init__()
        self._actor = actor

    def format(self, record: logging.LogRecord) -> str:
        place: Place = getattr(record, "place", None) or _place.get(NOWHERE)
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        step = "-" if place.step is None else place.step
        head = f"{when}.{int(record.msecs):03d} {self._actor} step {step} {place.layer or '-'} {record.levelname}"
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return "\n".join(f"{head} {line}" for line in text.splitlines())


class _File(logging.FileHandler):
    """Flushes each record."""

    def handleError(self, record: logging.LogRecord) -> None:
        """A disk that is full stops the run where state is written, not here."""


def _file_handler(directory: Path, actor: str) -> logging.Handler:
    directory.mkdir(exist_ok=True)
    handler = _File(directory / f"{actor}.log", mode="a", encoding="utf-8")
    handler.setFormatter(_Lines(actor))
    return handler


class _Notes(logging.Handler):
    """Collects warnings for the driver."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._notes: list[str] = []
        self._swap = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:  # errors reach the driver as exceptions
            with self._swap:
                self._notes.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        if not self._notes:
            return ()
        with self._swap:
            notes, self._notes = self._notes, []
        more = len(notes) - _MOST_NOTES
        return (*notes[:_MOST_NOTES], f"{more} more warnings are in its log") if more > 0 else tuple(notes)


class ActorLog:
    """Logging of an actor's process: what this package logs, and everybody's warnings.

    Args:
        directory: For logs; its parent exists.
        actor: ``nvme_store``, ``cpu_optimizer`` or ``gpu_worker``.
    """

    def __init__(self, directory: Path, actor: str) -> None:
        self._notes = _Notes()
        root = logging.getLogger()
        root.addHandler(_file_handler(directory, actor))
        root.addHandler(self._notes)
        logging.getLogger(_PACKAGE).setLevel(logging.INFO)
        warnings.showwarning = _log_warning

    def enter(self, place: Place) -> None:
        """What is logged from here on, by this call, belongs to ``place``."""
        _place.set(place)

    def take_notes(self) -> tuple[str, ...]:
        """Warnings since the last time."""
        return self._notes.take()


class DriverLog:
    """The driver's own log, and what Ray says in this process.

    What comes before the run has a directory is kept until it has.
    """

    def __init__(self) -> None:
        self._logger = logging.Logger("driver", logging.INFO)  # of this run alone: a process may have several
        self._handler: logging.Handler = MemoryHandler(1000, flushLevel=logging.CRITICAL + 1)
        self._logger.addHandler(self._handler)

    def open(self, directory: Path) -> None:
        """Writes to ``driver.log`` in ``directory`` from now on."""
        memory, self._handler = self._handler, _file_handler(directory, "driver")
        assert isinstance(memory, MemoryHandler)
        self._logger.removeHandler(memory)
        memory.setTarget(self._handler)
        memory.close()
        self._logger.addHandler(self._handler)
        _RAY.addHandler(self._handler)
        _RAY.propagate = False  # its warnings are about clusters; this run's own reach the terminal

    def write(
        self, message: str, place: Place = NOWHERE, *, level: int = logging.INFO, error: BaseException | None = None
    ) -> None:
        """One event; ``error``: an exception whose traceback follows."""
        self._logger.log(level, "%s", message, exc_info=error, extra={"place": place})

    def close(self) -> None:
        """Writes no more."""
        if self._handler in _RAY.handlers:
            _RAY.removeHandler(self._handler)
            _RAY.propagate = True
        self._logger.removeHandler(self._handler)
        self._handler.close()


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """For `warnings.showwarning`: this package's own speak for themselves, others' say where they are from."""
    own = Path(filename).is_relative_to(Path(__file__).parent.parent)
    where = "" if own else f" ({category.__name__}, {filename}:{lineno})"
    level = logging.INFO if issubclass(category, _FOR_DEVELOPERS) else logging.WARNING
    logging.getLogger(_PACKAGE).log(level, "%s%s", message, where)
