"""The last step as a Chrome trace (chrome://tracing, ui.perfetto.dev): tiers as lanes, one slice an action."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatrain_ray.layout import LayerSpec
from megatrain_ray.pipeline import Record
from megatrain_ray.run_directory import replace_text
from megatrain_ray.schedule import Tier

__all__ = ["write_trace"]


def write_trace(path: Path, records: Sequence[Record], layers: Sequence[LayerSpec]) -> None:
    """Replaces ``path`` with the trace of these records; times are microseconds since the first submission."""
    lanes = {tier: lane for lane, tier in enumerate(Tier, 1)}
    origin_s = min((record.submitted_s for record in records), default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": lane, "args": {"name": str(tier)}}
        for tier, lane in lanes.items()
    ]
    for record in records:
        receipt = record.receipt
        events.append(
            {
                "ph": "X",
                "name": f"{record.action.op} {layers[record.action.layer].name}",
                "pid": 1,
                "tid": lanes[record.action.tier],
                "ts": round((receipt.started_s - origin_s) * 1e6),
                "dur": round((receipt.ended_s - receipt.started_s) * 1e6),
                "args": {
                    "queued_us": round((receipt.started_s - record.submitted_s) * 1e6),
                    "put_bytes": receipt.put_bytes,
                },
            }
        )
    replace_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
