"""A live run watched and steered from another process, and what is said of it afterwards."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from megatrain_ray.cli import pause
from megatrain_ray.control import SOCKET, ControlServer, NotLiveError, ask
from megatrain_ray.errors import ConfigError, RunDirectoryError, TrainingError
from megatrain_ray.layout import pack_layer
from megatrain_ray.observe.layer_facts import describe_state
from megatrain_ray.observe.status import read_status, render_status
from megatrain_ray.schedule import Tier
from megatrain_ray.trainer import Trainer
from tests.commands import Command, run
from tests.runs import digest, trace

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]

STEPS = 12


def wait_for(directory: Path, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    for _ in range(6000):  # a loaded machine takes its time to start a run
        try:
            status: dict[str, Any] = ask(directory, "status")
        except NotLiveError:
            status = {}
        if status and wanted(status):
            return status
        time.sleep(0.05)
    raise AssertionError(f"never so: {status}")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_instance")
def test_a_run_that_is_steered_ends_as_one_that_is_not(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    options = {"training__max_steps": STEPS, "training__save_steps": 5, "tiers__placement": "nvme"}
    undisturbed = make_config(model_dir("llama"), training__output_dir=str(tmp_path / "plain"), **options)
    with Trainer(undisturbed) as trainer:
        expected = list(trainer.steps())
    config = make_config(model_dir("llama"), **options)
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    directory = tmp_path / "run"
    process = Command("train", str(path), cwd=tmp_path)
    try:
        wait_for(directory, lambda status: status["state"] == "running")
        ask(directory, "pause")
        status = wait_for(directory, lambda status: status["state"] == "paused")
        held_at = status["step"]
        assert {"run", "state", "step", "max_steps", "actors"} <= status.keys()
        assert (status["run"], status["max_steps"]) == (str(directory), STEPS)
        pids = {name: actor["pid"] for name, actor in status["actors"].items()}
        assert set(pids) == {"nvme_store", "cpu_optimizer", "gpu_worker"}
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids.values())
        facts = ask(directory, "inspect", layer="embed")
        assert facts["step"] in (held_at, held_at - 1)  # with clipping an update waits for the next forward
        assert {tensor["name"] for tensor in facts["tensors"]} == {"model.embed_tokens.weight"}
        assert 0 < status["peak_bytes"]["nvme"] <= status["planned_bytes"]["nvme"]
        for actor, pid in pids.items():
            assert ask(directory, "restart", actor=actor) != pid
        assert ask(directory, "status")["step"] == held_at

        done = run("set", str(directory), "learning_rate=1e-3", cwd=tmp_path)
        assert done.returncode == 0, done.err
        done = run("set", str(directory), "seed=3", cwd=tmp_path)
        assert done.returncode == 1 and "learning_rate can" in done.last_line
        done = run("inspect", str(directory), "9", cwd=tmp_path)
        assert done.returncode == 1 and "there is no layer 9" in done.last_line
        done = run("resume", str(directory), cwd=tmp_path)
        assert done.returncode == 0, done.err
        with contextlib.suppress(TrainingError):  # the run may end first
            for actor in pids:
                ask(directory, "restart", actor=actor)
        assert process.wait(300) == 0, process.err
    finally:
        process.kill()
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert trace(records) == trace(expected)
    for number in (10, STEPS):
        assert digest(directory / f"checkpoint-{number}") == digest(tmp_path / "plain" / f"checkpoint-{number}")
    assert not (directory / SOCKET).exists()

    done = run("status", str(directory), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.err
    after = json.loads(done.out)
    assert (after["state"], after["step"]) == ("finished", STEPS)
    assert all(actor["restarts"] >= 1 for actor in after["actors"].values())
    done = run("inspect", str(directory), "layer-0001", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.err
    saved: dict[str, torch.Tensor] = {}
    for file in (directory / f"checkpoint-{STEPS}").glob("*.safetensors"):
        saved |= load_file(file)
    tensors = json.loads(done.out)["tensors"]
    assert len(tensors) == 9
    for tensor in tensors:
        assert tensor["norm"] == pytest.approx(float(saved[tensor["name"]].double().norm()), rel=1e-6)
        moment = saved[f"exp_avg.{tensor['name']}"]
        assert tensor["exp_avg"]["norm"] == pytest.approx(float(moment.double().norm()), rel=1e-6)
        assert sum(tensor["histogram"]["counts"]) == saved[tensor["name"]].numel()
    done = run("pause", str(directory), cwd=tmp_path)
    assert done.returncode == 1 and "the run is finished" in done.last_line


def test_layers_are_not_shown_before_they_are_there(model_dir: ModelDir, make_config: MakeConfig) -> None:
    with Trainer(make_config(model_dir("llama"), tiers__placement="nvme")) as trainer:
        # As during an import, which takes minutes: the actors answer, and have nothing yet.
        trainer._cluster = Mock(pids=dict.fromkeys(Tier, 1))
        with pytest.raises(TrainingError, match="the run is starting: its layers are not there yet"):
            trainer.inspect("1")


def test_a_run_that_is_paused_while_it_starts_is_pausing(model_dir: ModelDir, make_config: MakeConfig) -> None:
    with Trainer(make_config(model_dir("llama"))) as trainer:
        assert trainer.status()["state"] == "starting"
        trainer.pause()
        assert trainer.status()["state"] == "pausing"
        trainer.resume()
        assert trainer.status()["state"] == "starting"


@pytest.mark.parametrize("end", ["paused", "running", "failed"])
def test_pause_waits_and_says_what_became_of_the_run(
    end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = iter(["pausing", "pausing", end])
    commands = {"pause": lambda: None, "status": lambda: {"state": next(states), "step": 3}}
    server = ControlServer(tmp_path, commands)
    try:
        with contextlib.nullcontext() if end == "paused" else pytest.raises(TrainingError, match=f"the run is {end}"):
            pause(tmp_path)
    finally:
        server.close()
    assert capsys.readouterr().out == (f"{tmp_path}: paused at step 3\n" if end == "paused" else "")
    assert not list(states)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_instance")
def test_stop_set_and_inspect_in_process(model_dir: ModelDir, make_config: MakeConfig) -> None:
    config = make_config(model_dir("llama"), training__lr_scheduler_type="constant", tiers__placement="nvme")
    rates = []
    with Trainer(config) as trainer:
        for record in trainer.steps():
            rates.append(record["learning_rate"])
            if record["step"] == 3:
                ask(trainer.run.path, "set", key="learning_rate", value="5e-4")
                paged = ask(trainer.run.path, "inspect", layer="1", tensor="model.layers.0.mlp.up_proj.weight")
                assert paged["step"] == 2 and len(paged["tensors"]) == 1
                with pytest.raises(TrainingError, match="has no tensor x; it has "):
                    ask(trainer.run.path, "inspect", layer="1", tensor="x")
                with pytest.raises(ConfigError, match="learning_rate"):
                    trainer.change("learning_rate", "fast")
            if record["step"] == 5:
                ask(trainer.run.path, "stop")
        directory = trainer.run.path
    assert rates == [1e-3, 1e-3, 1e-3, 5e-4, 5e-4]
    assert (directory / "checkpoint-5").is_dir()
    assert read_status(directory)["state"] == "stopped"
    # The checkpoint knows the new rate: whoever resumes with the old one is asked.
    with pytest.raises(RunDirectoryError, match=r"training.learning_rate was 0.0005 and is 0.001"):
        Trainer(config, resume=True)


@pytest.mark.ray
def test_a_killed_run_is_called_killed_and_leaves_no_process(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / ("deep" * 30)  # longer than the name of a socket may be
    far.mkdir()
    monkeypatch.setenv("TMPDIR", str(far))
    path = tmp_path / "run.yaml"
    path.write_text(make_config(model_dir("llama"), training__max_steps=100000).to_yaml())
    process = Command("train", str(path), cwd=tmp_path)
    directory = tmp_path / "run"
    try:
        status = wait_for(directory, lambda status: status["eta_s"] is not None)
        family = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert f"{far} is too long" in process.err
    _, left = psutil.wait_procs(family, timeout=10)
    assert len(family) > len(Tier)
    assert {each.name() for each in left} <= {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}  # these look once a minute
    assert status["eta_s"] > 0 and status["gb_per_s"]["object_store_put"] > 0
    assert {f"{tier}_{way}" for tier in Tier for way in ("in", "out")} <= status["gb_per_s"].keys()
    after = read_status(directory)
    assert after["state"] == "killed" and after["step"] > 0
    with pytest.raises(NotLiveError):
        ask(directory, "pause")


@pytest.mark.ray
def test_a_live_run_is_watched_reported_and_stopped(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(make_config(model_dir("llama"), training__max_steps=100000).to_yaml())
    directory = tmp_path / "run"
    process = Command("train", str(path), cwd=tmp_path)
    try:
        wait_for(directory, lambda status: status["step"] > 0)
        watching = Command("status", str(directory), "--watch", cwd=tmp_path)
        done = run("report", str(directory), cwd=tmp_path)
        assert done.returncode == 0, done.err
        assert "<title>run: running" in Path(done.out.strip()).read_text()
        done = run("inspect", str(directory), "layer-0002", "--json", cwd=tmp_path)
        assert done.returncode == 0 and json.loads(done.out)["step"] > 0, done.err
        done = run("stop", str(directory), cwd=tmp_path)
        assert done.returncode == 0, done.err
        assert process.wait(120) == 0, process.err
        assert watching.wait(60) == 0, watching.err
    finally:
        process.kill()
    # Not a terminal: what was shown last. A terminal is redrawn in place.
    assert "stopped" in watching.out and "gpu_worker" in watching.out
    stopped = read_status(directory)
    assert stopped["state"] == "stopped" and (directory / f"checkpoint-{stopped['step']}").is_dir()


# --- the socket


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / ("deep" * 40) / ("deep" * 40)  # longer than a socket's name may be
    directory.mkdir(parents=True)

    def fail() -> None:
        raise ZeroDivisionError("oops")

    server = ControlServer(directory, {"double": lambda number: 2 * number, "fail": fail})
    yield directory
    server.close()
    with pytest.raises(NotLiveError):
        ask(directory, "double", number=1)


def send(directory: Path, line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        descriptor = os.open(directory, os.O_PATH)
        connection.connect(f"/proc/self/fd/{descriptor}/{SOCKET}")
        os.close(descriptor)
        connection.sendall(line)
        return connection.makefile("rb").readline()


def test_a_command_and_its_answer(server: Path) -> None:
    assert (server / SOCKET).stat().st_mode & 0o777 == 0o600
    assert ask(server, "double", number=21) == 42


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b"[]\n", b"3\n", b'{"command": []}\n', b'{"command": "x"}\n', b"\xff\n"]
)
def test_nonsense_is_answered(server: Path, line: bytes) -> None:
    assert "there are double, fail" in json.loads(send(server, line))["error"]
    assert ask(server, "double", number=1) == 2


def test_a_command_that_fails_does_not_end_the_run(server: Path) -> None:
    with pytest.raises(TrainingError, match="ZeroDivisionError: oops"):
        ask(server, "fail")
    with pytest.raises(TrainingError, match="TypeError"):
        ask(server, "double", wrong=1)
    assert ask(server, "double", number=1) == 2


def test_clients_that_hang_up_or_say_nothing_disturb_nobody(server: Path) -> None:
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptor = os.open(server, os.O_PATH)
    silent.connect(f"/proc/self/fd/{descriptor}/{SOCKET}")
    gone = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    gone.connect(f"/proc/self/fd/{descriptor}/{SOCKET}")
    gone.sendall(b'{"command": "double", "number": 1}\n')
    gone.close()
    os.close(descriptor)
    assert ask(server, "double", number=3) == 6
    silent.close()


# --- what is shown


def test_statistics_of_a_layer() -> None:
    spec = pack_layer(1, "layer-0000", [("a.weight", (3, 4)), ("a.bias", (4,))])
    master, exp_avg = np.zeros(spec.numel, np.float32), np.full(spec.numel, 2.0, np.float32)
    offset = spec.tensors[0].offset
    master[offset : offset + 12] = [1.0, -2.0, 3.0, float("nan")] * 3
    facts = describe_state(spec, 7, {"master": master, "exp_avg": exp_avg})
    first, second = facts["tensors"]
    assert (facts["layer"], facts["step"], first["shape"]) == ("layer-0000", 7, [3, 4])
    assert (first["non_finite"], first["min"], first["max"]) == (3, -2.0, 3.0)
    assert first["norm"] == pytest.approx(42**0.5) and first["mean"] == pytest.approx(6 / 9)
    assert first["histogram"] == {"from": -2.0, "to": 3.0, "counts": [3, *[0] * 11, 3, *[0] * 6, 3]}
    assert first["exp_avg"]["norm"] == pytest.approx(2 * 12**0.5) and "exp_avg_sq" not in first
    assert second["histogram"] == {"from": 0.0, "to": 0.0, "counts": [4]}
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    with pytest.raises(RunDirectoryError, match=r"has no tensor b; it has a.weight, a.bias"):
        describe_state(spec, 7, {"master": master}, "b")


def test_statistics_of_many_blocks_are_those_of_the_whole() -> None:
    spec = pack_layer(0, "embed", [("w", (1000, 1000))])
    values = np.random.default_rng(3).normal(size=spec.numel).astype(np.float32)
    values[[5, 600_000]] = np.inf
    facts = describe_state(spec, 1, {"master": values})["tensors"][0]
    finite = np.delete(values[:1_000_000], [5, 600_000]).astype(np.float64)
    assert facts["norm"] == pytest.approx(np.linalg.norm(finite), rel=1e-6)
    assert facts["mean"] == pytest.approx(finite.mean(), abs=1e-7)
    counts, edges = np.histogram(finite, bins=20)
    assert (facts["min"], facts["max"], facts["non_finite"]) == (edges[0], edges[-1], 2)
    assert facts["histogram"]["counts"] == counts.tolist()


def test_statistics_beyond_the_range_of_fp32_sums() -> None:
    spec = pack_layer(0, "embed", [("large", (1024,)), ("small", (1024,))])
    values = np.repeat(np.array([3e38, 1e-30], np.float32), 1024)
    large, small = describe_state(spec, 1, {"master": values})["tensors"]
    assert large["mean"] == pytest.approx(3e38) and large["norm"] == pytest.approx(32 * 3e38)
    assert small["mean"] == pytest.approx(1e-30) and small["norm"] == pytest.approx(32e-30)
    assert large["non_finite"] == small["non_finite"] == 0


def test_status_of_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        read_status(tmp_path)
    with pytest.raises(RunDirectoryError, match="holds no run"):
        read_status(tmp_path / "absent")


def test_a_run_of_which_little_is_known_is_shown(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"state": "running", "pid": 1}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    status = read_status(tmp_path)
    assert status["state"] == "killed" and set(status["actors"]) == set(map(str, Tier))
    assert render_status(status)


def test_the_rate_of_each_tier_is_shown(tmp_path: Path) -> None:
    moved = {str(tier): {"bytes_in": int(4e9 * (at + 1)), "bytes_out": int(2e9)} for at, tier in enumerate(Tier)}
    record = {
        **dict.fromkeys(("loss", "learning_rate", "tokens_per_s", "device_idle_fraction"), 0.5),
        "step": 1,
        "step_time_s": 4.0,
        "nvme_read_bytes": int(8e9),
        "nvme_write_bytes": int(1e9),
        "object_store_put_bytes": int(12e9),
        "tiers": moved,
        "peak_bytes": dict.fromkeys((*map(str, Tier), "object_store", "nvme"), 1 << 20),
    }
    (tmp_path / "state.json").write_text('{"state": "finished", "max_steps": 1}')
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    status = read_status(tmp_path)
    assert status["gb_per_s"] == {
        "nvme_read": 2.0, "nvme_write": 0.25, "object_store_put": 3.0,
        "nvme_store_in": 1.0, "nvme_store_out": 0.5,
        "cpu_optimizer_in": 2.0, "cpu_optimizer_out": 0.5,
        "gpu_worker_in": 3.0, "gpu_worker_out": 0.5,
    }  # fmt: skip
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_status(status))
    rows = [line.split() for line in console.export_text().splitlines()]
    shown = {row[0]: " ".join(row[3:]) for row in rows if row and "GB/s" not in row}
    assert shown["cpu_optimizer"] == "2.00 in, 0.50 out" and shown["gpu_worker"] == "3.00 in, 0.50 out"
    assert shown["object_store"] == "3.00 put" and shown["nvme"] == "2.00 read, 0.25 written"
