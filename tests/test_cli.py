"""The command line as a person meets it: exit status, last line, files."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.commands import ROOT, Command, run

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


@pytest.fixture
def config_path(tmp_path: Path, model_dir: ModelDir, make_config: MakeConfig) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(make_config(model_dir("llama"), training__max_steps=3).to_yaml())
    return path


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("model.name_or_path=./absent", "./absent: no such directory"),
        ("data.path=absent.jsonl", "absent.jsonl"),
        ("tiers.device=cuda:7", "tiers.device is cuda:7"),
        ("tiers.host_memory=1MiB", "needs"),
        ("training.learning_rate=fast", "training.learning_rate"),
    ],
)
def test_bad_input_exits_2_with_the_cause_last(config_path: Path, override: str, cause: str) -> None:
    command = run("train", str(config_path), "--set", override, cwd=config_path.parent)
    assert command.returncode == 2, command.err
    assert cause in command.last_line
    assert not (config_path.parent / "run").exists()


def test_a_token_beyond_the_embedding_is_refused(config_path: Path) -> None:
    bad = config_path.parent / "bad.jsonl"
    bad.write_text('{"input_ids": [1, 2, 3]}\n\n{"input_ids": [1, 100000]}\n')
    command = run("train", str(config_path), "--set", f"data.path={bad}", cwd=config_path.parent)
    assert command.returncode == 2
    assert "100000" in command.err and "97" in command.err and "bad.jsonl" in command.err


@pytest.mark.ray
def test_a_local_run_listens_on_the_loopback_interface_only_and_leaves_no_process(config_path: Path) -> None:
    command = Command("train", str(config_path), "--set", "training.max_steps=100000", cwd=config_path.parent)
    command.until((config_path.parent / "run" / "metrics.jsonl").exists)
    family = command.family()
    listening, thresholds = [], set()
    for member in family:
        with contextlib.suppress(psutil.Error):
            listening += [c.laddr for c in member.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            if member.name() == "raylet":
                thresholds.add(member.environ()["RAY_memory_usage_threshold"])
    os.killpg(command.pid, signal.SIGINT)  # Ctrl-C: to whatever the terminal runs
    assert command.wait(120) == 130, command.err
    assert list((config_path.parent / "run").glob("checkpoint-*")), command.err
    assert command.leaves_nothing(), command.family()
    assert listening
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening
    assert thresholds == {"0.98"}  # the memory monitor is set on purpose


@pytest.mark.ray
def test_train_and_export(config_path: Path) -> None:
    folder = config_path.parent
    trained = run("train", str(config_path), cwd=folder)
    assert trained.returncode == 0, trained.err
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    # Not a terminal: a plain line a step, no codes that move a cursor.
    for record in records:
        assert f"\nstep {record['step']}/3  lr {record['learning_rate']:.3g}  loss {record['loss']:.4f}" in trained.err
    assert "\x1b" not in trained.err and "\r" not in trained.err
    assert trained.last_line.startswith(
        f"done: step 3 of 3, loss {records[0]['loss']:.4f} -> {records[-1]['loss']:.4f}"
    )
    exported = run("export", str(folder / "run" / "checkpoint-3"), str(folder / "out"), cwd=folder)
    assert exported.returncode == 0, exported.err
    AutoModelForCausalLM.from_pretrained(exported.out.strip())


@pytest.mark.ray
def test_a_quiet_run_prints_its_closing_line_only(config_path: Path) -> None:
    command = run("train", str(config_path), "--quiet", cwd=config_path.parent)
    assert command.returncode == 0, command.err
    assert command.out == ""
    assert len(command.err.splitlines()) == 1 and command.last_line.startswith("done: step 3 of 3"), command.err


@pytest.mark.ray
def test_a_terminal_shows_what_the_step_waits_for(config_path: Path) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "megatrain_ray", "train", str(config_path), "--set", "training.max_steps=20"],
        cwd=config_path.parent, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "160"},
    )  # fmt: skip
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the other side has ended
        while block := os.read(master, 65536):
            shown += block
    os.close(master)
    assert process.wait(60) == 0, shown
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "Ray and the actors" in text  # while it starts
    waits = re.findall(r"(nvme_store|cpu_optimizer|gpu_worker): (\w+) of (embed|layer-\d+|head)", text)
    assert "gpu_worker" in {actor for actor, _, _ in waits}, text
    assert re.search(r"\d+/20 .* loss \d+\.\d{4}  norm .* tokens/s", text)
    assert not re.search(r"step \d+/20  lr", text)  # the line is redrawn instead
    assert "done: step 20 of 20" in text


def test_plan_and_data_start_nothing(config_path: Path) -> None:
    planned = run("plan", str(config_path), "--json", cwd=config_path.parent)
    assert planned.returncode == 0, planned.err
    facts = json.loads(planned.out)
    assert set(facts["peak_bytes"]) >= {"driver", "nvme_store", "cpu_optimizer", "gpu_worker", "object_store"}
    assert not (config_path.parent / "run").exists()
    shown = run("data", str(config_path), cwd=config_path.parent)
    assert shown.returncode == 0, shown.err
    assert "14" in shown.out
