"""A run as a Ray job, through the scripts of ray_configs, on a Ray of its own that is gone afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatrain_ray.checkpoint.directory import newest_complete
from megatrain_ray.control import ask
from megatrain_ray.observe.status import read_status
from megatrain_ray.run_directory import RunDirectory
from megatrain_ray.trainer import Trainer
from tests.runs import digest, trace
from tests.test_control import wait_for

pytestmark = pytest.mark.ray

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
STEPS = 60


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass
class Workstation:
    """A home that never saw Ray, and the environment of a terminal in it."""

    home: Path
    environment: dict[str, str]

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=cwd or self.home, env=self.environment, text=True, capture_output=True, timeout=180
        )

    def megatrain(self, *arguments: str) -> str:
        done = self.run("megatrain-ray", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def family(self) -> list[psutil.Process]:
        """Processes of this Ray: those that name its directory, and their descendants."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(self.environment["RAY_TEMP_DIR"] in word for word in process.cmdline()):
                    found |= {each.pid: each for each in (process, *process.children(recursive=True))}
        return list(found.values())


@pytest.fixture(scope="module")
def workstation() -> Iterator[Workstation]:
    """Ray as start.sh starts it."""
    root = Path(tempfile.mkdtemp(prefix="mt-"))  # short: sockets lie below
    home = root / "home"
    home.mkdir()
    port, dashboard_port = free_ports(2)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_PORT": str(port),
        "RAY_DASHBOARD_PORT": str(dashboard_port),
        "RAY_TEMP_DIR": str(root / "ray"),
        "RAY_START_OPTIONS": "--min-worker-port 0 --max-worker-port 0",  # any free ones: others may run here
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    made = Workstation(home, environment)
    try:
        started = made.run(str(ROOT / "ray_configs/start.sh"), "200000000")
        assert started.returncode == 0, started.stderr
        assert started.stdout.splitlines()[-1] == f"Ray takes jobs at http://127.0.0.1:{dashboard_port}"
        yield made
    finally:
        family = made.family()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=30)
        shutil.rmtree(root)
    assert not made.family()


def read_until(master: int, pattern: str) -> re.Match[str]:
    """What a terminal shows, up to a line that matches."""
    shown = ""
    while True:
        try:
            shown += os.read(master, 4096).decode()
        except OSError:  # the other side has ended
            raise AssertionError(f"no {pattern} in {shown}") from None
        if found := re.search(pattern, shown):
            return found


@pytest.mark.usefixtures("ray_instance")
def test_a_job_whose_terminal_is_closed_is_steered_and_ends_as_if_nothing_had_happened(
    workstation: Workstation, model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    options = {"training__max_steps": STEPS, "training__save_steps": 50, "tiers__placement": "nvme"}
    with Trainer(make_config(model_dir("llama"), **options)) as trainer:
        expected = list(trainer.steps())
    project = tmp_path / "project"
    project.mkdir()
    config = make_config(model_dir("llama"), training__output_dir="runs/mine", **options)
    (project / "run.yaml").write_text(config.to_yaml())

    master, slave = pty.openpty()
    submission = subprocess.Popen(
        ["setsid", "--ctty", str(ROOT / "ray_configs/submit.sh"), "run.yaml"],
        cwd=project, env=workstation.environment, stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    job = read_until(master, r"Job '(raysubmit_\w+)' submitted")[1]
    directory = Path(read_until(master, r"output: (\S+)\r?\n")[1])
    os.close(master)  # the terminal is closed
    wait_for(directory, lambda status: status["step"] > 1)
    ask(directory, "pause")  # a command takes longer to start than this run to end
    assert submission.wait(timeout=60) != 0  # by the hang-up, or by an error of writing to what is not there
    assert directory == workstation.home / "megatrain_runs" / "runs" / "mine"

    assert "paused at step" in workstation.megatrain("pause", str(directory))
    held = json.loads(workstation.megatrain("status", str(directory), "--json"))
    assert held["state"] == "paused" and held["step"] < STEPS
    facts = json.loads(workstation.megatrain("inspect", str(directory), "layer-0001", "--json"))
    assert facts["layer"] == "layer-0001" and facts["step"] in (held["step"], held["step"] - 1)
    optimizer = held["actors"]["cpu_optimizer"]["pid"]
    said = workstation.megatrain("restart", str(directory), "cpu_optimizer")
    assert not psutil.pid_exists(optimizer)
    workstation.megatrain("resume", str(directory))
    assert str(optimizer) not in said

    address = f"--address=http://127.0.0.1:{workstation.environment['RAY_DASHBOARD_PORT']}"
    workstation.environment["RAY_AUTH_MODE"] = "token"
    for _ in range(60):
        status = workstation.run("ray", "job", "status", address, job)
        if "succeeded" in status.stdout + status.stderr:
            break
        time.sleep(0.5)
    else:
        raise AssertionError(status.stdout + status.stderr)
    ended = read_status(directory)
    assert (ended["state"], ended["actors"]["cpu_optimizer"]["restarts"]) == ("finished", 1)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert trace(records) == trace(expected)
    for number in (50, STEPS):
        assert digest(directory / f"checkpoint-{number}") == digest(tmp_path / "run" / f"checkpoint-{number}")
    tail = workstation.run("ray", "job", "logs", address, job).stdout.splitlines()
    assert any(line.startswith(f"done: step {STEPS} of {STEPS}") for line in tail[-3:]), tail
    sessions = Path(workstation.environment["RAY_TEMP_DIR"])
    assert not list(sessions.rglob("metrics.jsonl")), "a run inside Ray's session directory"


def test_a_job_that_is_refused_says_why_and_fails(
    workstation: Workstation, model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(make_config(model_dir("llama")).to_yaml())
    larger = "tiers.object_store_memory=300MiB"
    done = workstation.run(str(ROOT / "ray_configs/submit.sh"), "run.yaml", "--set", larger, cwd=tmp_path)
    assert done.returncode != 0
    assert (
        f"object store of 200000000 bytes, this run needs {300 << 20}: start Ray with --object-store-memory "
        f"{300 << 20} or more"
    ) in done.stdout


def test_a_job_that_is_stopped_saves_first(
    workstation: Workstation, model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(make_config(model_dir("llama"), training__max_steps=100000).to_yaml())
    workstation.environment["RAY_AUTH_MODE"] = "token"
    address = f"--address=http://127.0.0.1:{workstation.environment['RAY_DASHBOARD_PORT']}"
    job = f"stopped-{os.getpid()}"
    command = ("megatrain-ray", "train", str(tmp_path / "run.yaml"))
    submitted = workstation.run("ray", "job", "submit", address, "--no-wait", "--submission-id", job, "--", *command)
    assert submitted.returncode == 0, submitted.stderr
    directory = tmp_path / "run"
    actors = wait_for(directory, lambda status: status["step"] > 1)["actors"]
    stopped = workstation.run("ray", "job", "stop", address, job)
    assert stopped.returncode == 0, stopped.stderr
    ended = read_status(directory)
    assert ended["state"] == "stopped" and not RunDirectory(directory).is_locked()
    found = newest_complete(directory, deep=True)
    assert found is not None and found.path.name == f"checkpoint-{ended['step']}"
    _, alive = psutil.wait_procs(
        [psutil.Process(each["pid"]) for each in actors.values() if psutil.pid_exists(each["pid"])], 10
    )
    assert not alive
    log = workstation.run("ray", "job", "logs", address, job).stdout
    assert f"stopped: step {ended['step']} of 100000" in log
    assert "runs code as you" not in log  # this Ray listens on the loopback interface


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ("", []),
        ("--dashboard-host 127.0.0.1 --block", []),
        ("--dashboard-host=localhost", []),
        ("--dashboard-host 0.0.0.0", ["--dashboard-host 0.0.0.0"]),
        (
            "--num-gpus 1  --dashboard-host=:: --node-ip-address 192.0.2.7",
            ["--dashboard-host ::", "--node-ip-address 192"],
        ),
        ("--dashboard-host 0.0.0.0 --dashboard-host 127.0.0.1", []),  # the last one counts
    ],
)
def test_starting_ray_beyond_the_loopback_interface_warns(options: str, warned: list[str], tmp_path: Path) -> None:
    ray = tmp_path / "ray"  # starts nothing
    ray.write_text("#!/bin/sh\n")
    ray.chmod(0o700)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [ROOT / "ray_configs/start.sh"],
        env=environment | {"RAY_START_OPTIONS": options},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert len(lines) == len(warned) and all(line.startswith("warning: ") for line in lines), done.stderr
    assert all(text in line and "runs code as you" in line for text, line in zip(warned, lines, strict=True))


def test_ray_and_its_jobs_listen_on_the_loopback_interface_only(workstation: Workstation) -> None:
    listening = set()
    for process in workstation.family():
        with contextlib.suppress(psutil.Error):
            listening |= {c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert int(workstation.environment["RAY_DASHBOARD_PORT"]) in {address.port for address in listening}
    assert {address.ip for address in listening} <= LOOPBACK
    token = workstation.home / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
