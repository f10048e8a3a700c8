"""A live run seen from outside: Ray's metrics endpoint, its timeline, a real Prometheus, dashboard, report."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain_ray.observe.report import write_report
from megatrain_ray.schedule import Tier
from megatrain_ray.trainer import Trainer
from tests.conftest import write_tokens
from tests.test_report import read_page

CONFIGS = Path(__file__).resolve().parent.parent / "ray_configs"
PROMETHEUS = shutil.which("prometheus")
DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"


def expressions() -> list[str]:
    """Every expression of the dashboard, with all runs chosen."""
    dashboard = json.loads((CONFIGS / "grafana-dashboard.json").read_text())
    return [target["expr"].replace("$run", ".*") for panel in dashboard["panels"] for target in panel["targets"]]


def names(expression: str) -> set[str]:
    return set(re.findall(r"\bray_megatrain_\w+", expression))


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def eventually(check: Callable[[], Any], what: str) -> Any:
    """What ``check`` returns once that is true: Ray's processes report every ten seconds."""
    for _ in range(150):
        if value := check():
            return value
        time.sleep(0.4)
    raise AssertionError(f"{what}: not within a minute")


def watched(make_config: Callable[..., Any], model: Path, directory: Path) -> Any:
    """Of a run that has a value for every expression."""
    held_out = write_tokens(directory / "eval.jsonl", [9, 12], 97)
    return make_config(
        model,
        training__output_dir=str(directory / "watched"),  # a name of its own in a Ray that other tests use
        training__max_steps=4,
        training__eval_steps=2,
        data__eval_path=str(held_out),
    )


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    dashboard = json.loads((CONFIGS / "grafana-dashboard.json").read_text())
    assert dashboard["title"] and dashboard["schemaVersion"] >= 30
    assert dashboard.get("id") is None and 0 < len(dashboard["uid"]) <= 40  # an id belongs to one Grafana alone
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24  # nothing overlaps
    assert all(names(expression) for expression in expressions())
    source = {"type": "prometheus", "uid": "${datasource}"}  # chosen on import, or Grafana's default
    for panel in dashboard["panels"]:
        assert panel["type"] in ("timeseries", "stat") and panel["datasource"] == source
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        assert all(target["datasource"] == source and target["legendFormat"] for target in panel["targets"])
        assert {"defaults", "overrides"} <= panel["fieldConfig"].keys()
    datasource, run = dashboard["templating"]["list"]
    assert (datasource["name"], datasource["type"], datasource["query"]) == ("datasource", "datasource", "prometheus")
    assert (run["name"], run["type"], run["datasource"], run["allValue"]) == ("run", "query", source, ".*")
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"])))
    assert used == {"datasource", "run"}


@pytest.mark.ray
def test_a_live_run_is_seen_from_outside(
    ray_instance: None, model_dir: Callable[[str], Path], make_config: Callable[..., Any], tmp_path: Path
) -> None:
    import ray

    with Trainer(watched(make_config, model_dir("llama"), tmp_path)) as trainer:
        records = []
        for record in trainer.steps():
            records.append(record)
            if record["step"] == 2:
                assert trainer._cluster is not None
                trainer._cluster.kill(Tier.WORKER)
        run = trainer.run.path
        port = ray.nodes()[0]["MetricsExportPort"]
        endpoint = f"http://127.0.0.1:{port}/metrics"
        wanted = set().union(*map(names, expressions()))
        metrics = eventually(lambda: _samples(fetch(endpoint), wanted, records[-1]["step"]), f"{wanted} at {endpoint}")
        assert metrics["ray_megatrain_loss"] == {"": pytest.approx(records[-1]["loss"])}
        assert metrics["ray_megatrain_restarts"] == {"nvme_store": 0, "cpu_optimizer": 0, "gpu_worker": 1}
        assert metrics["ray_megatrain_memory_peak_bytes"] == records[-1]["peak_bytes"]
        assert metrics["ray_megatrain_drive_written_bytes"] == {"": sum(r["nvme_write_bytes"] for r in records)}
        assert metrics["ray_megatrain_step_seconds_count"] == {"": 4}
        loads = sum(r["prefetch"]["loads"] for r in records)
        assert metrics["ray_megatrain_prefetch_loads"] == {"": loads}

        page = read_page(write_report(run))
    # Ray's own timeline names operation and layer.
    tasks = {event["cat"].removeprefix("task::") for event in ray.timeline()}
    layers = {"embed", "layer-0000", "layer-0001", "layer-0002", "head"}
    assert {f"forward {layer}" for layer in layers - {"head"}} | {f"update {layer}" for layer in layers} <= tasks, tasks
    assert [r["restarts"] for r in records] == [{}, {}, {"gpu_worker": 1}, {}]
    # The process that took the worker's place is not taken for one of Ray's.
    ray_bytes = [r["peak_bytes"]["ray"] for r in records]
    assert ray_bytes[-1] - ray_bytes[1] < records[1]["peak_bytes"]["gpu_worker"] / 2
    assert records[2]["replay_s"] > 0 and all(r["replay_s"] == 0 for r in records if r["step"] != 3)
    assert "Actor restarts: 1" in page.sections["restarts"]
    text = page.sections["summary"]
    assert f"{records[0]['loss']:.4f} → {records[-1]['loss']:.4f}" in text
    assert f"{records[-1]['eval_loss']:.4f}" in text
    assert ("data-measured", str(records[-1]["peak_bytes"]["nvme_store"])) in page.data
    assert "Step 4, action by action" in page.sections["timeline"] and "idle" in page.sections["timeline"]
    assert "max_steps: 4" in page.sections["configuration"] and "checkpoint-4" in page.sections["checkpoints"]
    # On the CPU with everything in RAM nothing travels more often than the minimum says.
    moved = [int(value) for name, value in page.data if name == "data-bytes"]
    assert moved[0] == moved[1] == records[-1]["tiers"]["gpu_worker"]["bytes_in"]
    assert moved[3] == moved[4] == records[-1]["tiers"]["gpu_worker"]["bytes_out"]
    assert moved[-3] == moved[-2] == records[-1]["copied_bytes"]


def _samples(text: str, wanted: set[str], step: int) -> dict[str, dict[str, float]]:
    """Samples of this run by name and tier, once all are there and show this step; else nothing."""
    metrics: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        sample = re.fullmatch(r"(ray_megatrain_\w+)\{(.*)\} (\S+)", line)
        if sample and 'run="watched"' in sample[2]:
            tier = re.search(r'\btier="(\w+)"', sample[2])
            metrics.setdefault(sample[1], {})[tier[1] if tier else ""] = float(sample[3])
    shown = metrics.get("ray_megatrain_step", {}).get("")
    if not wanted <= set(metrics) or shown != step:
        print(f"missing {wanted - set(metrics)}, step {shown} of {step}")
        return {}
    return metrics


@pytest.mark.ray
@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on PATH: names were looked up at the endpoint only")
def test_prometheus_answers_every_expression_of_the_dashboard(
    ray_instance: None, model_dir: Callable[[str], Path], make_config: Callable[..., Any], tmp_path: Path
) -> None:
    import ray

    with Trainer(watched(make_config, model_dir("llama"), tmp_path)) as trainer:
        assert len(list(trainer.steps())) == 4
        _ask_prometheus(ray.nodes()[0]["MetricsExportPort"], tmp_path)


def _ask_prometheus(port: int, directory: Path) -> None:
    """Every expression of the dashboard, by a real Prometheus with our configuration."""
    assert PROMETHEUS is not None
    configuration = (CONFIGS / "prometheus.yml").read_text()
    assert configuration.count(DISCOVERY) == 1
    targets = directory / "targets.json"
    targets.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": [f"127.0.0.1:{port}"]}]))
    values = yaml.safe_load(configuration.replace(DISCOVERY, str(targets)))
    values["global"]["scrape_interval"] = "1s"
    (directory / "prometheus.yml").write_text(yaml.safe_dump(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--config.file", str(directory / "prometheus.yml"), "--storage.tsdb.path", str(directory / "tsdb")]
    with (directory / "prometheus.log").open("w") as log:
        server = subprocess.Popen([PROMETHEUS, *options, "--web.listen-address", address], stdout=log, stderr=log)
    try:

        def empty() -> list[str]:
            missing = []
            for expression in expressions():
                try:
                    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
                    if not json.loads(fetch(url))["data"]["result"]:
                        missing.append(expression)
                except OSError:
                    missing.append(expression)
            return missing

        for _ in range(60):
            missing = empty()
            if not missing:
                break
            time.sleep(0.5)
        assert not missing, f"{missing}; {(directory / 'prometheus.log').read_text()[-1500:]}"
        print(f"prometheus: all {len(expressions())} expressions of the dashboard return data")
    finally:
        server.terminate()
        server.wait(timeout=30)
