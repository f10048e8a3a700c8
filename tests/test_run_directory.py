"""Who owns a run's directory."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from psutil import _pslinux

from megatrain_ray import run_directory
from megatrain_ray.errors import RunDirectoryError
from megatrain_ray.run_directory import RunDirectory


def test_of_two_that_begin_at_once_one_gets_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = json.dump

    def slow_dump(*arguments: Any) -> None:
        time.sleep(0.2)  # the lock is there, and says nothing yet
        dump(*arguments)

    monkeypatch.setattr(run_directory.json, "dump", slow_dump)
    outcomes: list[str] = []

    def claim() -> None:
        try:
            RunDirectory(tmp_path / "run").claim(resume=False, overwrite=False)
            outcomes.append("claimed")
        except RunDirectoryError as error:
            outcomes.append("in use" if "is in use by process" in str(error) else str(error))

    threads = [threading.Thread(target=claim) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["claimed", "in use"]


def test_setting_the_clock_frees_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = RunDirectory(tmp_path / "run")
    holder.claim(resume=False, overwrite=False)
    boot_time = _pslinux.boot_time()
    monkeypatch.setattr(_pslinux, "boot_time", lambda: boot_time + 1)  # what the kernel says after a step of the clock
    with pytest.raises(RunDirectoryError, match="is in use by process"):
        RunDirectory(tmp_path / "run").claim(resume=False, overwrite=False)
    holder.release()
    RunDirectory(tmp_path / "run").claim(resume=False, overwrite=False)
