"""What a run leaves in its logs, and what it shows at once."""

from __future__ import annotations

import logging
import os
import re
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.observe.logs import ActorLog, DriverLog, Place
from megatrain_ray.schedule import Tier
from megatrain_ray.trainer import Trainer
from tests.runs import page

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} (?P<actor>\w+) step (?P<step>\d+|-) (?P<layer>[\w-]+) "
    r"(?P<level>INFO|WARNING|ERROR) (?P<text>.*)"
)
SECRET = "swordfish-4711"


def read_log(path: Path) -> list[re.Match[str]]:
    """The lines of a log, each of which has all its parts."""
    lines = [LINE.fullmatch(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines and all(lines), path.read_text(encoding="utf-8")
    found = [line for line in lines if line is not None]
    assert {line["actor"] for line in found} == {path.stem}
    return found


class Warns:
    """A tier that warns, once."""

    def __init__(self, build: Callable[[], Any], method: str) -> None:
        self._tier = build()
        self._method = method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            warnings.warn("the drive is warm", stacklevel=1)
        return getattr(self._tier, name)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_instance")
def test_a_run_tells_its_story(
    model_dir: Callable[[str], Path], make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    build = Trainer._start.__globals__["tier_builders"]

    def builders(*arguments: Any, **options: Any) -> Any:
        made = build(*arguments, **options)
        return {**made, Tier.STORE: partial(Warns, made[Tier.STORE], "write")}

    monkeypatch.setitem(Trainer._start.__globals__, "tier_builders", builders)
    config = make_config(model_dir("llama"), training__max_steps=4, training__save_steps=2)
    told: list[str] = []
    with Trainer(config, tell=told.append) as trainer:
        page(trainer, {1})
        pids = []
        for record in trainer.steps():
            cluster = trainer._cluster
            assert cluster is not None
            pids.append(cluster.pids[Tier.OPTIMIZER])
            if record["step"] == 2:
                os.kill(pids[-1], signal.SIGKILL)
        logs = trainer.run.path / "logs"
    assert sorted(path.name for path in logs.iterdir()) == [
        "cpu_optimizer.log", "driver.log", "gpu_worker.log", "nvme_store.log",
    ]  # fmt: skip
    optimizer = [line["text"] for line in read_log(logs / "cpu_optimizer.log")]
    assert optimizer[0] == f"starts as process {pids[0]}"
    assert f"starts as process {pids[-1]}" in optimizer[1:]
    store = read_log(logs / "nvme_store.log")
    warned = [line for line in store if line["text"].startswith("the drive is warm")]
    assert [(line["level"], line["layer"]) for line in warned] == [("WARNING", "embed")]
    shown = [message for message in told if "the drive is warm" in message]
    assert len(shown) == 1 and shown[0].startswith("nvme_store: ")
    assert any(line["text"] == "checkpoint-2 begins" for line in store)
    driver = read_log(logs / "driver.log")
    died = [line for line in driver if line["text"].startswith("cpu_optimizer died in")]
    assert [(line["level"], line["step"]) for line in died] == [("WARNING", "2")]
    assert driver[-1]["text"] == "finished"
    assert SECRET not in "".join(path.read_text() for path in logs.iterdir())

    with Trainer(config, overwrite=True):  # begins anew
        assert not list(logs.iterdir())


@pytest.mark.ray
@pytest.mark.usefixtures("ray_instance")
def test_what_fails_is_logged_where_it_failed_and_in_the_driver(
    model_dir: Callable[[str], Path], make_config: Callable[..., Any]
) -> None:
    config = make_config(model_dir("llama"), training__max_steps=3)
    with Trainer(config) as trainer:
        page(trainer, {1})
        with pytest.raises(Exception, match="truncated"):
            for _ in trainer.steps():
                for file in trainer.run.store.glob("layer-0000.*"):
                    os.truncate(file, 8192)
        logs = trainer.run.path / "logs"
    failed = [line for line in read_log(logs / "nvme_store.log") if line["level"] == "ERROR"]
    assert failed[0]["layer"] == "layer-0000" and failed[0]["step"] == "2" and "truncated" in failed[0]["text"]
    driver = [line["text"] for line in read_log(logs / "driver.log") if line["level"] == "ERROR"]
    assert driver[0] == "failed" and any("Traceback" in text for text in driver) and "truncated" in driver[-1]


@pytest.fixture
def restored() -> Any:
    """Logging as it was."""
    root, package = logging.getLogger(), logging.getLogger("megatrain_ray")
    before = (list(root.handlers), package.level, warnings.showwarning)
    yield
    for handler in set(root.handlers) - set(before[0]):
        root.removeHandler(handler)
        handler.close()
    package.setLevel(before[1])
    warnings.showwarning = before[2]


@pytest.mark.usefixtures("restored")
def test_notes_are_the_warnings_and_few(tmp_path: Path) -> None:
    log = ActorLog(tmp_path / "logs", "gpu_worker")
    log.enter(Place(3, "head"))
    logger = logging.getLogger("megatrain_ray.actors.gpu_worker")
    logger.info("an event")
    logger.error("raised too")
    assert log.take_notes() == ()
    for number in range(25):
        logger.warning("number %d", number)
    notes = log.take_notes()
    assert notes[0] == "number 0" and len(notes) == 21 and notes[-1].startswith("5 more")
    assert log.take_notes() == ()
    lines = read_log(tmp_path / "logs" / "gpu_worker.log")
    assert len(lines) == 27 and {(line["step"], line["layer"]) for line in lines} == {("3", "head")}


def test_what_the_driver_says_before_it_has_a_directory(tmp_path: Path) -> None:
    log = DriverLog()
    log.write("early")
    log.open(tmp_path / "logs")
    log.write("two\nlines", Place(5), level=logging.WARNING)
    logging.getLogger("ray._private.node").warning("from Ray")
    log.close()
    assert logging.getLogger("ray").propagate
    expected = ["early", "two", "lines", "from Ray"]
    assert [line["text"] for line in read_log(tmp_path / "logs" / "driver.log")] == expected
    resumed = DriverLog()  # goes on in the same file
    resumed.open(tmp_path / "logs")
    resumed.write("later")
    resumed.close()
    assert [line["text"] for line in read_log(tmp_path / "logs" / "driver.log")][3:] == ["from Ray", "later"]
    unused = DriverLog()
    unused.write("of a run that was refused")
    unused.close()
