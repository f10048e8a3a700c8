"""The command line as a person meets it: exit status, last line, files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


def start(*arguments: str, cwd: Path, own_group: bool = False) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "megatrain_ray", *arguments],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=own_group,
    )  # fmt: skip


def run(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


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
    status, _, err = run("train", str(config_path), "--set", override, cwd=config_path.parent)
    assert status == 2, err
    assert cause in err.strip().splitlines()[-1]
    assert not (config_path.parent / "run").exists()


def test_a_token_beyond_the_embedding_is_refused(config_path: Path) -> None:
    bad = config_path.parent / "bad.jsonl"
    bad.write_text('{"input_ids": [1, 2, 3]}\n\n{"input_ids": [1, 100000]}\n')
    status, _, err = run("train", str(config_path), "--set", f"data.path={bad}", cwd=config_path.parent)
    assert status == 2
    assert "100000" in err and "97" in err and "bad.jsonl" in err


@pytest.mark.ray
def test_a_local_run_listens_on_the_loopback_interface_only_and_leaves_no_process(config_path: Path) -> None:
    process = start(
        "train", str(config_path), "--set", "training.max_steps=100000", cwd=config_path.parent, own_group=True
    )
    metrics = config_path.parent / "run" / "metrics.jsonl"
    for _ in range(600):
        time.sleep(0.2)
        if metrics.exists():
            break
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    listening, thresholds = [], set()
    for member in family:
        with contextlib.suppress(psutil.Error):
            listening += [c.laddr for c in member.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            if member.name() == "raylet":
                thresholds.add(member.environ()["RAY_memory_usage_threshold"])
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C: to whatever the terminal runs
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert list((config_path.parent / "run").glob("checkpoint-*")), err
    _, left = psutil.wait_procs(family, timeout=30)
    assert not left
    assert listening
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening
    assert thresholds == {"0.98"}  # the memory monitor is set on purpose


@pytest.mark.ray
def test_train_stop_resume_export(config_path: Path) -> None:
    folder = config_path.parent
    process = start("train", str(config_path), "--set", "training.max_steps=100000", cwd=folder)
    metrics = folder / "run" / "metrics.jsonl"
    for _ in range(600):
        time.sleep(0.2)
        if metrics.exists() and metrics.read_text().count("\n") >= 2:
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    checkpoint = max((folder / "run").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, int(checkpoint.name.split("-")[1]) + 1))
    more = len(steps) + 2
    status, _, err = run("train", str(config_path), "--resume", "--set", f"training.max_steps={more}", cwd=folder)
    assert status == 0, err
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, more + 1))
    status, out, err = run("export", str(folder / "run" / f"checkpoint-{more}"), str(folder / "out"), cwd=folder)
    assert status == 0, err
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(out.strip())


def test_plan_and_data_start_nothing(config_path: Path) -> None:
    status, out, err = run("plan", str(config_path), "--json", cwd=config_path.parent)
    assert status == 0, err
    facts = json.loads(out)
    assert set(facts["peak_bytes"]) >= {"driver", "nvme_store", "cpu_optimizer", "gpu_worker", "object_store"}
    assert not (config_path.parent / "run").exists()
    status, out, err = run("data", str(config_path), cwd=config_path.parent)
    assert status == 0, err
    assert "14" in out
