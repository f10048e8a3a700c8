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
from megatrain_ray.observe.status import read_status
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


def test_a_live_run_keeps_its_directory_whatever_store_another_names(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holder = RunDirectory(run, tmp_path / "store")
    holder.claim(resume=False, overwrite=False)
    holder.write_state("running")
    assert read_status(run)["state"] == "not answering"
    saving = run / ".checkpoint-3.partial"
    saving.mkdir()
    with pytest.raises(RunDirectoryError, match=r"run is in use .* name another training\.output_dir"):
        RunDirectory(run, tmp_path / "other").claim(resume=True, overwrite=False)
    assert saving.exists() and not (tmp_path / "other").exists()
    with pytest.raises(RunDirectoryError, match=r"store is in use .* set tiers\.nvme_dir"):
        RunDirectory(tmp_path / "second", tmp_path / "store").claim(resume=False, overwrite=False)
    assert not (tmp_path / "second").exists(), "a refusal leaves nothing behind"
    lock = json.loads((run / ".lock").read_text())
    holder.release()
    assert not list(tmp_path.rglob(".lock"))
    (run / ".lock").write_text(json.dumps({**lock, "started_s": lock["started_s"] - 100}))
    assert read_status(run)["state"] == "killed"
    RunDirectory(run, tmp_path / "other").claim(resume=True, overwrite=False)
