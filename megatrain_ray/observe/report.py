"""A run's report: one HTML file that needs nothing else, from whatever files the run has."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2
import psutil
import yaml

from megatrain_ray.checkpoint.directory import list_checkpoints
from megatrain_ray.errors import RunDirectoryError
from megatrain_ray.observe.about import ABOUT, MINIMUM_FORMULA
from megatrain_ray.observe.svg import Lane, Slice, bars, curve, timeline
from megatrain_ray.run_directory import replace_text

__all__ = ["Gap", "RunFiles", "explain_gaps", "redact", "write_report"]

_SECRET = re.compile(
    r"(?im)(?P<key>^\s*[\w.-]*(?:token|secret|password|passwd|api_?key)\s*:\s*)(?!null\b)\S.*$"
    r"|(?P<url>://)[^/\s:@]+:[^/\s@]+(?=@)|\b(?:hf_|sk-|ghp_)[A-Za-z0-9_-]{16,}"
)
_KINDS = {
    "forward": "forward", "backward": "backward", "head": "head", "evaluate": "head", "begin": "move", "load": "move",
    "grads": "move", "import_layer": "move", "save": "save", "snapshot": "save",
}  # fmt: skip
_TIERS = ("gpu_worker", "cpu_optimizer", "nvme_store")
"""In the order in which a timeline shows them: from the device down."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run's directory holds; what is missing or cannot be read is empty.

    Attributes:
        path: The directory.
        config: Text of config.yaml.
        plan, about, trace: The JSON files.
        records: Whole lines of metrics.jsonl.
        notes: What could not be read.
    """

    path: Path
    config: str
    plan: dict[str, Any]
    about: dict[str, Any]
    trace: dict[str, Any]
    records: list[dict[str, Any]]
    notes: list[str]

    @classmethod
    def read(cls, path: Path) -> RunFiles:
        """Reads the files of a run.

        Raises:
            RunDirectoryError: There is no run.
        """
        names = ("config.yaml", "plan.json", "metrics.jsonl")
        if not any((path / name).is_file() for name in names):
            raise RunDirectoryError(f"{path}: no run here: expected a directory with {', '.join(names)}")
        notes: list[str] = []

        def mapping(name: str) -> dict[str, Any]:
            try:
                value = json.loads((path / name).read_text(encoding="utf-8"))
            except FileNotFoundError:
                return {}
            except (OSError, ValueError) as error:
                notes.append(f"{name} cannot be read: {error}")
                return {}
            return value if isinstance(value, dict) else {}

        records: list[dict[str, Any]] = []
        for number, line in enumerate(_text(path / "metrics.jsonl").splitlines(), 1):
            try:
                record = json.loads(line)
                records.append({**record, "step": int(record["step"]), "loss": float(record["loss"])})
            except (ValueError, KeyError, TypeError):
                notes.append(f"metrics.jsonl: line {number} is cut off or damaged, and left out")
        return cls(
            path=path,
            config=_text(path / "config.yaml"),
            plan=mapping("plan.json"),
            about=mapping(ABOUT),
            trace=mapping("trace.json"),
            records=records,
            notes=notes,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration, parsed."""
        try:
            value = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def steps(self) -> int:
        """Done, by the metrics."""
        return self.records[-1]["step"] if self.records else 0

    @property
    def total_steps(self) -> int | None:
        """Of the whole run."""
        return self.about.get("total_steps") or (self.settings.get("training") or {}).get("max_steps")

    def is_live(self) -> bool:
        """Whether the process that trains still runs."""
        try:
            return bool(psutil.Process(int(self.about["pid"])).create_time() == self.about["pid_started_s"])
        except (psutil.Error, KeyError, TypeError, ValueError):
            return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def redact(text: str) -> str:
    """A configuration without values that look like secrets."""
    return _SECRET.sub(lambda match: f"{match['key'] or match['url'] or ''}[left out]", text)


# --- a step's timeline ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which the device computed nothing.

    Attributes:
        start_us, length_us: Within the step.
        causes: (what was waited for, microseconds), in order of time; they add up to the length.
        before: The computation that came next; None at the end of the step.
    """

    start_us: int
    length_us: int
    causes: tuple[tuple[str, int], ...]
    before: str | None


def explain_gaps(trace: Mapping[str, Any]) -> list[Gap]:
    """The gaps of the compute lane, and what the worker waited for in each, from the trace alone.

    The worker does one thing at a time: in a gap it either moves weights or gradients itself, or it waits for the next
    call. Of what that call needed, the part that was ready last is what was waited for; a call that was submitted
    only when lookahead allowed it waited for what held lookahead back; the rest is the way of a call through Ray.
    """
    slices, processes, lanes = _slices(trace)
    by_action = {each["args"]["action"]: each for each in slices}
    worker = sorted((s for s in slices if processes.get(s["pid"]) == "gpu_worker"), key=lambda s: s["ts"])
    if not worker:
        return []
    gaps: list[Gap] = []
    causes: list[tuple[str, int]] = []
    start_us = reached_us = 0

    def close(end_us: int, before: str | None) -> None:
        if end_us > start_us and causes:
            gaps.append(Gap(start_us, end_us - start_us, tuple(causes), before))
        causes.clear()

    for each, following in zip_longest(worker, worker[1:]):
        begin_us, end_us = each["ts"], each["ts"] + each["dur"]
        if following is not None:  # an action of no length is drawn a microsecond long
            end_us = min(end_us, max(following["ts"], begin_us))
        if begin_us > reached_us:
            causes += _waits(each, reached_us, by_action, processes)
        if lanes.get(each["tid"]) == "compute":
            close(begin_us, each["name"])
            start_us = end_us
        elif end_us > max(begin_us, reached_us):
            causes.append((f"{_op(each)} (gpu_worker itself)", end_us - max(begin_us, reached_us)))
        reached_us = max(reached_us, end_us)
    end_us = max(each["ts"] + each["dur"] for each in slices)
    if end_us > reached_us:
        last = max(slices, key=lambda each: each["ts"] + each["dur"])
        causes.append((f"{_op(last)} ({processes.get(last['pid'], '?')}), the step's last", end_us - reached_us))
    close(end_us, None)
    return gaps


def _waits(
    each: Mapping[str, Any], idle_us: int, by_action: Mapping[int, Mapping[str, Any]], processes: Mapping[int, str]
) -> list[tuple[str, int]]:
    """Splits the wait from ``idle_us`` until this action began."""
    arguments = each["args"]
    causes: list[tuple[str, int]] = []

    def until(other: Mapping[str, Any] | None, end_us: float, text: str) -> None:
        nonlocal idle_us
        end = min(round(end_us), each["ts"])
        if end > idle_us:
            causes.append(
                (text if other is None else f"{_op(other)} ({processes.get(other['pid'], '?')}){text}", end - idle_us)
            )
            idle_us = end

    def last(indices: Sequence[int]) -> Mapping[str, Any] | None:
        known = [by_action[index] for index in indices if index in by_action]
        return max(known, key=lambda other: other["ts"] + other["dur"], default=None)

    if held := last(arguments.get("after", ())):
        until(held, min(held["ts"] + held["dur"], arguments["submitted_us"]), ", which held lookahead back")
    until(None, arguments["submitted_us"], "the driver, until it submitted the call")
    if needed := last(arguments.get("needs", ())):
        until(needed, needed["ts"] + needed["dur"], "")
    until(None, each["ts"], "the way of a call through Ray")
    return causes


def _op(each: Mapping[str, Any]) -> str:
    return str(each.get("cat") or str(each["name"]).partition(" ")[0])


def _slices(trace: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[int, str], dict[int, str]]:
    """Slices, names of processes, names of lanes; whatever is not as this program writes it is left out."""
    slices: list[dict[str, Any]] = []
    processes: dict[int, str] = {}
    lanes: dict[int, str] = {}
    events = trace.get("traceEvents")
    for event in events if isinstance(events, list) else ():
        arguments = event.get("args") or {}
        if event.get("ph") == "X" and {"action", "submitted_us"} <= set(arguments):
            slices.append(event)
        elif event.get("name") == "process_name":
            processes[event["pid"]] = str(arguments.get("name"))
        elif event.get("name") == "thread_name":
            lanes[event["tid"]] = str(arguments.get("name"))
    return slices, processes, lanes


def _timeline(trace: Mapping[str, Any]) -> dict[str, Any] | None:
    slices, processes, names = _slices(trace)
    if not slices:
        return None
    length_us = max(each["ts"] + each["dur"] for each in slices)
    gaps = explain_gaps(trace)
    rows: dict[int, Lane] = {}
    order = {pid: _TIERS.index(name) if name in _TIERS else len(_TIERS) for pid, name in processes.items()}
    for each in sorted(slices, key=lambda s: (order.get(s["pid"], 9), s["tid"], s["ts"])):
        tier = processes.get(each["pid"], "?")
        lane = rows.setdefault(each["tid"], Lane(tier, f"{tier} {names.get(each['tid'], '')}"))
        kind = _KINDS.get(_op(each), {"cpu_optimizer": "update", "nvme_store": "disk"}.get(tier, "move"))
        lane.slices.append(Slice(each["ts"], each["dur"], f"{each['name']}: {_ms(each['dur'])}", kind))
        if tier == "gpu_worker" and names.get(each["tid"]) == "compute" and len(lane.slices) == 1:
            lane.slices[:0] = [
                Slice(gap.start_us, gap.length_us, f"idle {_ms(gap.length_us)}: {_why(gap)}", "idle") for gap in gaps
            ]
    totals: dict[str, int] = defaultdict(int)
    for gap in gaps:
        for cause, part_us in gap.causes:
            totals[cause] += part_us
    idle_us = sum(gap.length_us for gap in gaps)
    return {
        "picture": timeline(list(rows.values()), length_us),
        "step": (trace.get("otherData") or {}).get("step"),
        "length_us": length_us,
        "idle_us": idle_us,
        "causes": sorted(totals.items(), key=lambda item: -item[1]),
        "longest": [(gap, _why(gap)) for gap in sorted(gaps, key=lambda gap: -gap.length_us)[:6]],
    }


def _why(gap: Gap) -> str:
    parts: dict[str, int] = defaultdict(int)
    for cause, part_us in gap.causes:
        parts[cause] += part_us
    return "; ".join(f"{cause} {_ms(us)}" for cause, us in sorted(parts.items(), key=lambda item: -item[1])[:3])


# --- numbers for people -----------------------------------------------------------------------------------------------


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e6:,.2f} s" if microseconds >= 1e6 else f"{microseconds / 1e3:,.1f} ms"


def _size(nbytes: float) -> str:
    for limit, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= limit:
            return f"{nbytes / limit:,.2f} {unit}"
    return f"{nbytes:,.0f} B"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{days} d"] * bool(days) + [f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes)
    return " ".join([*parts, f"{seconds} s"][:2])


def _count(number: float) -> str:
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{letter}"
    return f"{number:g}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


# --- sections ---------------------------------------------------------------------------------------------------------


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    held = [(float(record["step"]), record[key]) for record in records if isinstance(record.get(key), int | float)]
    return [step for step, _ in held], [float(value) for _, value in held]


def _state(files: RunFiles, checkpoints: Sequence[int]) -> tuple[str, str]:
    """A word and a sentence."""
    total = files.total_steps
    if total and files.steps >= total and (files.steps in checkpoints or not files.is_live()):
        return "finished", f"all {total} steps done"
    if files.is_live():
        return "running", f"step {files.steps} of {total or '?'}"
    newest = max(checkpoints, default=0)
    if files.steps and newest == files.steps:
        return "stopped", f"at step {files.steps} of {total or '?'}; --resume goes on from there"
    lost = files.steps - newest
    return "ended early", (
        f"after step {files.steps} of {total or '?'}; --resume goes on from "
        + (
            f"checkpoint-{newest} and repeats {lost} steps"
            if newest
            else "the beginning: there is no complete checkpoint"
        )
    )


def _curves(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    evaluations = list(zip(*_series(records, "eval_loss"), strict=True))
    wanted = (
        ("loss", "Loss", False),
        ("learning_rate", "Learning rate", True),
        ("grad_norm", "Gradient norm (before clipping)", True),
        ("tokens_per_s", "Tokens per second", True),
    )
    return [
        (title, curve(title, *_series(records, key), points=evaluations if key == "loss" else (), zero=zero))
        for key, title, zero in wanted
    ]


def _memory(files: RunFiles) -> list[dict[str, Any]]:
    planned = {name: size for name, size in (files.plan.get("peak_bytes") or {}).items() if name != "total_ram"}
    measured: dict[str, int] = {}
    for record in files.records:
        for name, size in (record.get("peak_bytes") or {}).items():
            measured[name] = max(measured.get(name, 0), size)
    names = [name for name in dict.fromkeys((*planned, *measured)) if planned.get(name) or measured.get(name)]
    largest = max([*planned.values(), *measured.values()], default=0)
    return [
        {
            "tier": name,
            "planned": planned.get(name),
            "measured": measured.get(name),
            "bar": bars(measured.get(name) or 0, planned.get(name), largest),
        }
        for name in names
    ]


def _bytes(files: RunFiles) -> list[dict[str, Any]]:
    def worker(direction: str) -> list[int]:
        tiers = [((record.get("tiers") or {}).get("gpu_worker") or {}).get(direction) for record in files.records]
        return [size for size in tiers if size is not None]

    moved = {
        "host_to_device": worker("bytes_in"),
        "device_to_host": worker("bytes_out"),
        "nvme_read": [record["nvme_read_bytes"] for record in files.records if "nvme_read_bytes" in record],
        "nvme_write": [record["nvme_write_bytes"] for record in files.records if "nvme_write_bytes" in record],
        "copied": [record["copied_bytes"] for record in files.records if "copied_bytes" in record],
    }
    least = files.about.get("minimum_bytes") or {}
    return [
        {
            "path": name.replace("_", " ").replace("nvme", "NVMe"),
            "median": statistics.median_low(values),
            "minimum": least.get(name),
            "total": sum(values),
            "formula": MINIMUM_FORMULA[name],
        }
        for name, values in moved.items()
        if values
    ]


def _restarts(files: RunFiles) -> dict[str, Any]:
    deaths = [record for record in files.records if record.get("restarts")]
    step_s = statistics.median([r["step_time_s"] for r in files.records if "step_time_s" in r] or [0.0])
    starts = [start for start in files.about.get("starts") or () if isinstance(start, dict)]
    repeated = sum(int(start.get("repeated_steps", 0)) for start in starts)
    replay_s = sum(float(record.get("replay_s", 0.0)) for record in files.records)
    trained_s = sum(float(record.get("step_time_s", 0.0)) for record in files.records)
    return {
        "known": any("restarts" in record for record in files.records),
        "deaths": deaths,
        "count": sum(sum(record["restarts"].values()) for record in deaths),
        "replay_s": replay_s,
        "starts": starts,
        "repeated": repeated,
        "repeated_s": repeated * step_s,
        "share": (replay_s + repeated * step_s) / trained_s if trained_s else 0.0,
    }


def _summary(files: RunFiles) -> list[tuple[str, str, str]]:
    """(name, value, explanation) of each tile."""
    records, about = files.records, files.about
    tiles: list[tuple[str, str, str]] = []
    if records:
        first, last = records[0], records[-1]
        tiles.append(("steps", f"{files.steps:,}", f"of {files.total_steps or '?'}"))
        tiles.append(("loss", f"{first['loss']:.4f} → {last['loss']:.4f}", f"step {first['step']} to {last['step']}"))
        evaluated = [record for record in records if isinstance(record.get("eval_loss"), int | float)]
        if evaluated:
            text = f"{evaluated[-1]['eval_loss']:.4f}"
            if len(evaluated) > 1:
                text = f"{evaluated[0]['eval_loss']:.4f} → {text}"
            tiles.append(("held-out loss", text, f"step {evaluated[-1]['step']}"))
        spent_s = sum(float(record.get("step_time_s", 0.0)) for record in records)
        tokens = sum(int(record.get("tokens", 0)) for record in records)
        if spent_s:
            tiles.append(("tokens/s", f"{tokens / spent_s:,.1f}", f"{tokens:,} tokens in all"))
            tiles.append(("training time", _duration(spent_s), f"{_duration(spent_s / len(records))} a step"))
        idle = [float(r["device_idle_fraction"]) for r in records if "device_idle_fraction" in r]
        if idle:
            tiles.append(("device idle", f"{statistics.fmean(idle):.0%}", "of the time, mean of all steps"))
    model = about.get("model") or {}
    name = str((files.settings.get("model") or {}).get("name_or_path", "")).rstrip("/").rpartition("/")[2]
    if name or model:
        tiles.append(("model", name or str(model.get("architecture")), str(model.get("architecture", ""))))
    if model.get("parameters"):
        layers = len(model.get("layers") or ())
        tiles.append(("parameters", _count(model["parameters"]), f"{model['parameters']:,} in {layers} layers"))
    if about.get("device"):
        tiles.append(("device", str(about["device"]), f"computes in {model.get('compute_dtype', '?')}"))
    return tiles


def write_report(run: Path, out: Path | None = None) -> Path:
    """Writes the report of a run.

    Args:
        run: Its directory.
        out: The file; None: ``report.html`` in it.

    Returns:
        The file.

    Raises:
        RunDirectoryError: There is no run, or the file cannot be written.
    """
    files = RunFiles.read(run)
    found = list_checkpoints(run)
    state, sentence = _state(files, [each.step for each in found if each.problem is None])
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(ms=_ms, size=_size, duration=_duration, when=_when)
    text = environment.get_template("report.html").render(
        name=run.absolute().name,
        state=state,
        sentence=sentence,
        written_s=time.time(),
        files=files,
        tiles=_summary(files),
        curves=_curves(files.records),
        timeline=_timeline(files.trace),
        memory=_memory(files),
        bytes=_bytes(files),
        restarts=_restarts(files),
        checkpoints=[
            (each, sum(f.stat().st_size for f in each.path.iterdir() if f.is_file()), each.path.stat().st_mtime)
            for each in found
        ],
        config=redact(files.config),
        machine=files.about.get("machine") or {},
    )
    out = run / "report.html" if out is None else out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(out, text)
    except OSError as error:
        raise RunDirectoryError(f"{out}: cannot be written: {error.strerror}") from error
    return out
