"""The command line in processes of its own, and what such a process leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
MARK = "MEGATRAIN_TEST_COMMAND"
"""Environment variable by which all processes that a command has started are known, orphans too."""


class Command(subprocess.Popen[str]):
    """``megatrain-ray ARGUMENTS`` in a process group of its own, its output in files.

    Args:
        *arguments: Of the command line.
        cwd: Working directory; output goes to files there.
        prefix: A command that runs this one, for example in another namespace.
    """

    def __init__(self, *arguments: str, cwd: Path, prefix: Sequence[str] = ()) -> None:
        self.mark = uuid.uuid4().hex
        self._out, self._err = cwd / f"out-{self.mark}.txt", cwd / f"err-{self.mark}.txt"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark}
        environment.pop("RAY_ADDRESS", None)
        with self._out.open("w") as out, self._err.open("w") as err:
            super().__init__(
                [*prefix, sys.executable, "-m", "megatrain_ray", *arguments],
                cwd=cwd, env=environment, text=True, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def last_line(self) -> str:
        """Of stderr: the cause of a failure."""
        return next(line for line in reversed(self.err.splitlines()) if line.strip())

    def until(self, condition: Callable[[], object], *, poll_s: float = 0.02, deadline_s: float = 300) -> None:
        """Waits for a condition; the process must live until then."""
        give_up_s = time.monotonic() + deadline_s
        while not condition():
            assert self.poll() is None, f"ended with {self.returncode}: {self.err}"
            assert time.monotonic() < give_up_s, f"nothing within {deadline_s} s: {self.err}"
            time.sleep(poll_s)

    def family(self) -> list[psutil.Process]:
        """All processes that it has started and that live, itself included."""
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        return members

    def kill_family(self) -> None:
        """What the death of the machine does: all processes end at one moment."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for member in self.family():
                with contextlib.suppress(psutil.Error):
                    member.send_signal(number)
        self.wait(60)

    def leaves_nothing(self, deadline_s: float = 90) -> bool:
        """Whether all that it has started ends; agents of Ray notice the death of a driver within a minute."""
        give_up_s = time.monotonic() + deadline_s
        while self.family():
            if time.monotonic() > give_up_s:
                return False
            time.sleep(0.2)
        return True


def run(*arguments: str, cwd: Path, prefix: Sequence[str] = (), deadline_s: float = 300) -> Command:
    """Runs a command to its end."""
    command = Command(*arguments, cwd=cwd, prefix=prefix)
    try:
        command.wait(deadline_s)
    finally:
        if command.poll() is None:
            command.kill_family()
    return command
