"""The report: every section, the files' own values, text that stays text, and runs in every state."""

from __future__ import annotations

import itertools
import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatrain_ray.actors.gpu_worker import GradInfo
from megatrain_ray.cluster import Receipt
from megatrain_ray.errors import RunDirectoryError
from megatrain_ray.layout import pack_layer
from megatrain_ray.observe.about import minimum_bytes
from megatrain_ray.observe.activity import call_seconds, measure_activity, time_covered
from megatrain_ray.observe.report import RunFiles, explain_gaps, redact, write_report
from megatrain_ray.observe.svg import short, thin, ticks
from megatrain_ray.observe.trace import build_trace
from megatrain_ray.pipeline import Record
from megatrain_ray.schedule import Action, Op, StepShape, Tier, build_step

SECTIONS = [
    "summary", "curves", "timeline", "memory", "bytes", "restarts", "checkpoints", "configuration", "machine"
]  # fmt: skip
VOID = {"meta", "br", "link", "img", "input", "hr"}
EVIL = "<script>alert('run')</script>"


class Page(HTMLParser):
    """What a browser would see of a page: tags that nest, text by section, attributes, references to elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, str] = {}
        self.tags: set[str] = set()
        self.data: list[tuple[str, str]] = []
        self.references: list[str] = []
        self._section = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        if tag == "section":
            self._section = values["id"] or ""
            self.sections[self._section] = ""
        self.data += [(name, value or "") for name, value in attrs if name.startswith("data-")]
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        assert not any(name.startswith("on") for name in values)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self._section and self.open and self.open[-1] != "style":
            self.sections[self._section] += data


def read_page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert list(page.sections) == SECTIONS
    assert not page.references and not page.tags & {"script", "link", "img", "iframe"}
    assert "@import" not in text and "url(" not in text and "http" not in text.replace("http-equiv", "")
    return page


def run_step(shape: StepShape, step_s: float = 0.01) -> list[Record]:
    """Records of a step whose actions take one unit of time each, by simulation."""
    schedule = build_step(shape, pending=True)
    simulation = schedule.simulate(lambda action: 0.0 if action.op is Op.LOAD else step_s)
    origin_s, records = 1_000.0, []
    for index, (action, start, end) in enumerate(zip(schedule, simulation.starts_s, simulation.ends_s, strict=True)):
        submitted = max((simulation.ends_s[other] for other in action.after), default=0.0)
        info = GradInfo(1.0, 1.0, 0.0, 0) if action.op is Op.GRADS else None
        receipt = Receipt(origin_s + start, origin_s + end, info, 4096 * len(action.writes), 1)
        records.append(Record(action, origin_s + submitted, receipt, index))
    return records


SHAPE = StepShape(numels=(1024,) * 5, head_reads=(4,), paged=frozenset({3}), prefetch_depth=1)
LAYERS = tuple(
    pack_layer(index, name, [(f"{name}.weight", (32, 32))])
    for index, name in enumerate(("embed", "layer-0000", "layer-0001", "layer-0002", "head"))
)


def record(step: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "step": step, "epoch": 0.1 * step, "loss": 4.0 - step / 10, "grad_norm": 1.5, "learning_rate": 1e-4 * step,
        "tokens": 100, "step_time_s": 2.0, "tokens_per_s": 50.0, "device_idle_fraction": 0.25,
        "nvme_read_bytes": 24_576,
        "nvme_write_bytes": 12_288, "peak_bytes": {"driver": 5 << 20, "gpu_worker": 3 << 20}, "restarts": {},
        "replay_s": 0.0, "tiers": {"gpu_worker": {"bytes_in": 40_960, "bytes_out": 20_480}}, "ended_s": 1e9 + step,
    }  # fmt: skip
    return {**values, **changes}


def write_run(path: Path, *, steps: int = 12, total: int = 12, **about: Any) -> Path:
    path.mkdir(parents=True)
    lines = [json.dumps(record(step, **({"restarts": {"gpu_worker": 1}, "replay_s": 7.5} if step == 3 else {})))
             for step in range(1, steps + 1)]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (path / "config.yaml").write_text(f"model:\n  name_or_path: models/{EVIL}\ntraining:\n  max_steps: {total}\n")
    (path / "plan.json").write_text(json.dumps({"peak_bytes": {"driver": 6 << 20, "gpu_worker": 2 << 20}}))
    (path / "trace.json").write_text(json.dumps(build_trace(run_step(SHAPE), LAYERS, step=steps)))
    facts = {
        "starts": [
            {"time_s": 1e9, "step": 0, "repeated_steps": 0},
            {"time_s": 1e9 + 9, "step": 4, "repeated_steps": 2},
        ],
        "total_steps": total,
        "model": {"architecture": EVIL, "parameters": 5120, "layers": [{}] * 5, "compute_dtype": "float32"},
        "device": "cpu",
        "minimum_bytes": minimum_bytes(LAYERS, frozenset({3}), "float32"),
        "machine": {
            "processor": "P & Q",
            "cores": 2,
            "memory_bytes": 1 << 34,
            "system": "Linux",
            "versions": {"ray": "9"},
        },
        **about,
    }
    (path / "about.json").write_text(json.dumps(facts))
    return path


def test_a_report_shows_the_values_of_the_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run & <b>")
    page = read_page(write_report(run))
    sections = page.sections
    assert "3.9000 → 2.8000" in sections["summary"] and "12" in sections["summary"]
    assert "50.0" in sections["summary"] and "24.0 s" in sections["summary"] and "25%" in sections["summary"]
    assert "step 12: 2.8" in sections["curves"] and "step 3: 0.0003" in sections["curves"]
    assert ("data-measured", str(5 << 20)) in page.data and ("data-planned", str(6 << 20)) in page.data
    assert "150%" in sections["memory"]  # the worker, above its plan
    moved = [int(value) for name, value in page.data if name == "data-bytes"]
    assert moved == [
        40_960, 36_864, 40_960 * 12, 20_480, 20_480, 20_480 * 12,
        24_576, 12_288, 24_576 * 12, 12_288, 12_288, 12_288 * 12
    ]  # fmt: skip
    assert "7.5 s" in sections["restarts"] and "2 steps" in sections["restarts"]
    # 7.5 s, and two steps of 2 s again, of 24 s.
    assert "47.9%" in sections["restarts"]
    assert EVIL in sections["configuration"] and EVIL in sections["summary"]
    assert "P & Q" in sections["machine"]


def test_without_files_a_report_shows_what_there_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(RunDirectoryError, match=r"no run here.*metrics\.jsonl"):
        write_report(run)
    (run / "config.yaml").write_text("training: {max_steps: 3}\n")
    page = read_page(write_report(run))
    assert "no step is done yet" in page.sections["summary"] and "no trace yet" in page.sections["timeline"]
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    (run / "trace.json").write_text('{"traceEvents": [{"ph": "X"}, {"name"')
    page = read_page(write_report(run, tmp_path / "deep" / "out.html"))
    assert "2.5000" in page.sections["summary"] and "line 2 is cut off" in page.sections["summary"]
    assert "trace.json cannot be read" in page.sections["summary"]


@pytest.mark.parametrize("case", ["running", "ended early", "finished"])
def test_the_state_of_a_run(tmp_path: Path, case: str) -> None:
    me = {"pid": os.getpid(), "pid_started_s": psutil.Process().create_time()}
    gone = {**me, "pid_started_s": me["pid_started_s"] - 1}
    run = write_run(tmp_path / "run", steps=12 if case == "finished" else 5, **(me if case == "running" else gone))
    text = write_report(run).read_text()
    assert f'">{case}</span>' in text
    assert ("no complete checkpoint" in text) == (case == "ended early")


def test_no_secret_reaches_a_report() -> None:
    secret = [
        "a_token: abc",
        "loss_chunk_tokens: 64",
        "  api_key: 'x y'",
        "path: s3://me:pw@host/x",
        "a: hf_ABCDEFGHIJKLMNOPQRST",
    ]
    shown = ["a_token: [left out]", "loss_chunk_tokens: 64", "  api_key: [left out]", "path: s3://[left out]@host/x"]
    assert redact("\n".join(secret)).splitlines() == [*shown, "a: [left out]"]


def test_a_trace_has_lanes_names_and_arrows() -> None:
    records = run_step(SHAPE)
    trace = build_trace(records, LAYERS, step=7)
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(records) and trace["otherData"] == {"step": 7}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(processes.values()) == [str(tier) for tier in Tier]
    assert {"read", "write", "checkpoint", "update", "emit", "load (h2d)", "compute", "gradient (d2h)"} <= set(
        lanes.values()
    )
    by_lane: dict[Any, list[Any]] = {}
    for each, ran in zip(slices, records, strict=True):
        assert processes[each["pid"]] == str(ran.action.tier)
        assert each["name"] == f"{ran.action.op} {LAYERS[ran.action.layer].name}"
        by_lane.setdefault((each["pid"], each["tid"]), []).append(each)
    assert set(by_lane) <= set(lanes)
    for row in by_lane.values():  # nothing overlaps in a lane
        row.sort(key=lambda each: each["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(row))
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts and set(starts) == set(ends)
    arrows = set()
    for flow, start in starts.items():
        end = ends[flow]
        source = next(s for s in by_lane[start["pid"], start["tid"]] if s["ts"] <= start["ts"] < s["ts"] + s["dur"])
        target = next(s for s in by_lane[end["pid"], end["tid"]] if s["ts"] == end["ts"])
        arrows.add((source["cat"], target["cat"]))
    assert {
        ("update_emit", "load"),
        ("load", "forward"),
        ("backward", "grads"),
        ("read", "update_paged_emit"),
    } <= arrows


def test_gaps_are_explained_by_what_was_waited_for() -> None:
    records = run_step(SHAPE)
    gaps = explain_gaps(build_trace(records, LAYERS, step=1))
    for gap in gaps:
        assert sum(us for _, us in gap.causes) == gap.length_us
    first = gaps[0]
    assert first.before == "forward embed"
    assert ("begin (gpu_worker itself)", 10_000) in first.causes or "update_emit" in first.causes[0][0]
    causes = {cause for gap in gaps for cause, _ in gap.causes}
    assert "grads (gpu_worker itself)" in causes
    # The paged layer: its state is read and updated before its weights can be loaded.
    waiting = next(gap for gap in gaps if gap.before == "forward layer-0002")
    assert any("update_paged_emit (cpu_optimizer)" in cause for cause, _ in waiting.causes), waiting
    compute = [r.receipt for r in records if r.action.op in (Op.FORWARD, Op.HEAD, Op.BACKWARD)]
    last_us = round((max(r.receipt.ended_s for r in records) - 1_000.0) * 1e6)
    busy_us = round(sum(r.ended_s - r.started_s for r in compute) * 1e6)
    assert abs(sum(gap.length_us for gap in gaps) - (last_us - busy_us)) <= len(records) * 2


def test_activity_of_each_tier() -> None:
    records = run_step(SHAPE)
    facts = measure_activity(records, 2.0, lambda value: 10)
    worker = facts["tiers"]["gpu_worker"]
    loads = [r for r in records if r.action.op is Op.LOAD]
    assert worker["bytes_in"] == 10 * len(loads) and worker["bytes_out"] == 10 * 5
    assert worker["busy_s"] == pytest.approx(
        0.01 * sum(r.action.tier is Tier.WORKER for r in records) - 0.01 * len(loads)
    )
    assert facts["prefetch"]["loads"] == len(loads) and 0 < facts["prefetch"]["hits"] < len(loads)
    waited_s = sum(r.receipt.started_s - r.submitted_s for r in records if r.action.tier is Tier.OPTIMIZER)
    assert facts["tiers"]["cpu_optimizer"]["queue_depth"] == pytest.approx(waited_s / 2.0, abs=1e-3)
    assert time_covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4


def test_what_a_call_costs_is_seen_where_the_next_one_waits() -> None:
    def ran(op: Op, submitted_s: float, started_s: float, ended_s: float) -> Record:
        return Record(Action(op, 1), submitted_s, Receipt(started_s, ended_s, None, 0, 0))

    records = [
        ran(Op.FORWARD, 0.0, 0.5, 1.0),
        ran(Op.FORWARD, 0.1, 1.004, 2.0),
        ran(Op.BACKWARD, 2.5, 2.6, 3.0),  # nothing waited before it
        ran(Op.BACKWARD, 2.6, 3.002, 4.0),
        ran(Op.GRADS, 2.7, 4.003, 5.0),
    ]
    assert call_seconds(records) == pytest.approx(0.003)
    assert call_seconds(records[:1]) is None


def test_minimum_bytes_by_hand() -> None:
    # Five layers of 1024 elements: twice each, but the head once; with one graph kept, that layer once too.
    assert minimum_bytes(LAYERS, frozenset({3}), "bfloat16", keep_graph=1) == {
        "host_to_device": 2 * (2 * 5 - 2) * 1024,
        "device_to_host": 4 * 5 * 1024,
        "nvme_read": 12 * 1024,
        "nvme_write": 12 * 1024,
        "copied": (2 + 4) * 5 * 1024 + 24 * 1024,
    }


def test_axes_and_long_runs() -> None:
    assert ticks(0.0, 0.93) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert ticks(5.0, 5.0)[0] < 5.0 < ticks(5.0, 5.0)[-1]
    assert [short(value) for value in (0.00075, 0.0025, 0.01, 12345.0)] == ["7.5e-4", "2.5e-3", "0.01", "12.3k"]
    groups = thin(range(100_000), [float(x % 7) for x in range(100_000)])
    assert len(groups) <= 240 and groups[-1][0] == 99_999
    assert all(low == 0 and high == 6 for _, _, low, high in groups)


def test_a_damaged_run_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "about.json").write_text("[1]")
    (run / "plan.json").write_bytes(b"\xff{")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 13, "loss": \xff')
    files = RunFiles.read(run)
    assert files.steps == 12 and files.about == {} and len(files.notes) == 2
    read_page(write_report(run))
