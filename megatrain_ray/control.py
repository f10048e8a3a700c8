"""How another process talks to a live run: one JSON line each way over a Unix socket in the run's directory.

The driver owns the schedule and the actors, so it is the driver that answers: this works the same with a local Ray and
with one that is shared, with authentication and without, and after the terminal is closed. Only the owner of the
directory may connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatrain_ray.errors import MegatrainError, TrainingError

__all__ = ["ControlServer", "NotLiveError", "ask"]

SOCKET = "control.sock"
_LONGEST_REQUEST = 1 << 16
_CLIENT_PATIENCE_S = 10.0

Command = Callable[..., Any]


class NotLiveError(TrainingError):
    """Nobody answers for this run. Scenario: it has ended, or its process was killed."""


@contextlib.contextmanager
def _address(directory: Path) -> Iterator[str]:
    """A name of the socket that fits into 108 bytes, however long the directory's path is."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


class ControlServer:
    """Answers commands in threads of its own until it is closed.

    Args:
        directory: Of the run; this process holds its lock.
        commands: By name: called with the request's other fields, returns what JSON can hold.
    """

    def __init__(self, directory: Path, commands: Mapping[str, Command]) -> None:
        self._commands = commands
        self._path = directory / SOCKET
        self._path.unlink(missing_ok=True)  # of a process that was killed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(directory) as address:
            self._socket.bind(address)
        self._path.chmod(0o600)
        self._socket.listen()
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def close(self) -> None:
        """Takes no more commands."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # wakes the accepting thread
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="control", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # a client that hangs up
            connection.settimeout(_CLIENT_PATIENCE_S)
            with connection.makefile("rb") as lines:
                reply = self._answer(lines.readline(_LONGEST_REQUEST))
            connection.settimeout(None)
            connection.sendall(json.dumps(reply).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            name = request.pop("command")
            command = self._commands[name]
        except (ValueError, KeyError, AttributeError, TypeError):
            return {"error": f"not a command: {line[:100]!r}; there are {', '.join(sorted(self._commands))}"}
        try:
            return {"result": command(**request)}
        except MegatrainError as error:
            return {"error": str(error)}
        except Exception as error:  # a fault of ours must not end the run
            return {"error": f"{type(error).__name__}: {error}"}


def ask(directory: Path, command: str, *, deadline_s: float = 300.0, **arguments: Any) -> Any:
    """Sends a command to the run that lives in ``directory``.

    Args:
        directory: Of the run.
        command: Its name.
        deadline_s: Longest wait for the answer.
        **arguments: Of the command.

    Returns:
        What the command returned.

    Raises:
        NotLiveError: Nobody answers there.
        TrainingError: The run refuses the command.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(deadline_s)
        try:
            with _address(directory) as address:
                connection.connect(address)
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                line = lines.readline()
        except TimeoutError:
            raise TrainingError(f"{directory}: the run gave no answer to {command} within {deadline_s:.0f} s") from None
        except OSError:
            raise NotLiveError(f"{directory}: no process trains here now") from None
    if not line:
        raise NotLiveError(f"{directory}: the run ended before it answered")
    reply = json.loads(line)
    if "error" in reply:
        raise TrainingError(reply["error"])
    return reply["result"]
