"""The last step as a Chrome trace (chrome://tracing, ui.perfetto.dev).

A process is a tier, a lane in it a stream: what the tier does at the same time lies in different lanes. One slice is
one action; an arrow leads from the action that made something (a value in the object store, weights on the device)
to the one that used it. A slice's arguments say what it needed, so that a gap can be explained from the file alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain_ray.layout import LayerSpec
from megatrain_ray.pipeline import Record
from megatrain_ray.run_directory import replace_text
from megatrain_ray.schedule import COMPUTE, Op, Tier

__all__ = ["STREAMS", "build_trace", "write_trace"]

STREAMS: dict[Tier, tuple[str, ...]] = {
    Tier.STORE: ("read", "write", "checkpoint"),
    Tier.OPTIMIZER: ("update", "emit"),
    Tier.WORKER: ("load (h2d)", "compute", "gradient (d2h)"),
}
"""Lanes of each tier, in the order in which they are shown."""

_STREAM_OF = {
    **dict.fromkeys((Op.READ, Op.READ_MASTER, Op.READ_GRADS), "read"),
    **dict.fromkeys((Op.WRITE, Op.WRITE_GRADS), "write"),
    Op.SAVE: "checkpoint",
    **dict.fromkeys((Op.PARAMS, Op.CAST, Op.SNAPSHOT), "emit"),
    **dict.fromkeys((Op.IMPORT, Op.BEGIN, Op.LOAD), "load (h2d)"),
    **dict.fromkeys(COMPUTE, "compute"),
    Op.GRADS: "gradient (d2h)",
}
_LANES_A_TIER = 100


def write_trace(path: Path, records: Sequence[Record], layers: Sequence[LayerSpec], *, step: int) -> None:
    """Replaces ``path`` with the trace of these records."""
    replace_text(path, json.dumps(build_trace(records, layers, step=step)))


def build_trace(records: Sequence[Record], layers: Sequence[LayerSpec], *, step: int) -> dict[str, Any]:
    """The trace; times are microseconds since the first submission.

    Args:
        records: Of one step, in the order of submission.
        layers: The stream.
        step: Its number.
    """
    origin_s = min((record.submitted_s for record in records), default=0.0)
    needs = _needs(records)
    slices: list[dict[str, Any]] = []
    ends_us: dict[tuple[Tier, str], list[int]] = {}
    for index, record in enumerate(records):
        receipt, action = record.receipt, record.action
        start_us = round((receipt.started_s - origin_s) * 1e6)
        end_us = max(round((receipt.ended_s - origin_s) * 1e6), start_us + 1)  # a slice of no length is not drawn
        stream = _STREAM_OF.get(action.op, "update")
        slices.append(
            {
                "ph": "X",
                "name": f"{action.op} {layers[action.layer].name}",
                "cat": str(action.op),
                "pid": list(Tier).index(action.tier) + 1,
                "tid": _lane(ends_us.setdefault((action.tier, stream), []), action.tier, stream, start_us, end_us),
                "ts": start_us,
                "dur": end_us - start_us,
                "args": {
                    "action": index,
                    "layer": layers[action.layer].name,
                    "submitted_us": round((record.submitted_s - origin_s) * 1e6),
                    "queued_us": max(start_us - round((record.submitted_s - origin_s) * 1e6), 0),
                    "put_bytes": receipt.put_bytes,
                    "needs": needs[index][0],
                    "after": needs[index][1],
                },
            }
        )
    events = [*_names(slices), *slices, *_flows(slices)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step}}


def _needs(records: Sequence[Record]) -> list[tuple[list[int], list[int]]]:
    """For each action, by position: the actions that made what it used, and those that its submission waited for."""
    position = {record.index: at for at, record in enumerate(records)}
    made: dict[Any, int] = {}
    loaded: dict[int, int] = {}
    computed: dict[int, int] = {}
    last_compute: int | None = None
    needs = []
    for at, record in enumerate(records):
        action = record.action
        used = [made[value] for value in action.reads if value in made]
        if action.op in COMPUTE:
            used += [loaded.pop(action.layer)] if action.layer in loaded else []
            used += [last_compute] if last_compute is not None else []
            last_compute = computed[action.layer] = at
        elif action.op is Op.LOAD:
            loaded[action.layer] = at
        elif action.op is Op.GRADS and action.layer in computed:
            used.append(computed[action.layer])
        made.update(dict.fromkeys(action.writes, at))
        needs.append((used, [position[other] for other in action.after if other in position]))
    return needs


def _lane(ends_us: list[int], tier: Tier, stream: str, start_us: int, end_us: int) -> int:
    """The first lane of a stream that is free: what a concurrent tier does at the same time lies side by side."""
    base = (list(Tier).index(tier) + 1) * _LANES_A_TIER * 10 + STREAMS[tier].index(stream) * _LANES_A_TIER
    for lane, end in enumerate(ends_us):
        if end <= start_us:
            ends_us[lane] = end_us
            return base + lane
    ends_us.append(end_us)
    return base + len(ends_us) - 1


def _names(slices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    def event(what: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}

    events = []
    used = {(each["pid"], each["tid"]) for each in slices}
    for pid, tier in enumerate(Tier, 1):
        events.append(event("process_name", pid, 0, name=str(tier)))
        events.append(event("process_sort_index", pid, 0, sort_index=pid))
        for lane, stream in enumerate(STREAMS[tier]):
            base = (pid * 10 + lane) * _LANES_A_TIER
            for tid in sorted({base} | {tid for of, tid in used if of == pid and base < tid < base + _LANES_A_TIER}):
                name = stream if tid == base else f"{stream} {tid - base + 1}"
                events.append(event("thread_name", pid, tid, name=name))
                events.append(event("thread_sort_index", pid, tid, sort_index=tid))
    return events


def _flows(slices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arrows between slices of different lanes: an end binds to the slice that begins there."""
    events: list[dict[str, Any]] = []
    for target in slices:
        for needed in target["args"]["needs"]:
            source = slices[needed]
            if source["tid"] == target["tid"]:
                continue
            common = {"name": source["args"]["layer"], "cat": "flow", "id": len(events) // 2 + 1}
            leaves_us = source["ts"] + source["dur"] - 1
            events.append({**common, "ph": "s", "pid": source["pid"], "tid": source["tid"], "ts": leaves_us})
            events.append(
                {**common, "ph": "f", "bp": "e", "pid": target["pid"], "tid": target["tid"], "ts": target["ts"]}
            )
    return events
