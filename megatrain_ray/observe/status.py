"""What `megatrain-ray status` shows: of a live run from its driver's memory, of one that has ended from its files."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatrain_ray.control import NotLiveError, ask
from megatrain_ray.errors import RunDirectoryError
from megatrain_ray.run_directory import RunDirectory
from megatrain_ray.schedule import Action, Tier

__all__ = ["live_status", "read_status", "render_status"]

_RATE_STEPS = 20
"""Steps over whose median time the remaining time is estimated."""

_SHOWN = ("loss", "grad_norm", "learning_rate", "epoch", "tokens_per_s", "step_time_s", "device_idle_fraction")
_MOVED = ("nvme_read_bytes", "nvme_write_bytes", "object_store_put_bytes")


def live_status(
    *,
    run: str,
    state: str,
    step: int,
    max_steps: int,
    pids: Mapping[Tier, int],
    restarts: Mapping[Tier, int],
    in_flight: Sequence[tuple[Action, float]],
    layer_names: Sequence[str],
    records: deque[dict[str, Any]],
    planned_bytes: Mapping[str, int],
    stored_bytes: int,
) -> dict[str, Any]:
    """The status of this process's run.

    Args:
        run: Its directory.
        state: starting, running, pausing or paused.
        step: Steps done.
        max_steps: Of the run.
        pids: Of the actors that have been started.
        restarts: Of each actor.
        in_flight: Actions submitted and not complete, earliest first, with the time of their submission.
        layer_names: Of the stream.
        records: The last metrics records, newest last.
        planned_bytes: Peak memory by process and tier, as planned.
        stored_bytes: Of the store's files now.
    """
    last = records[-1] if records else {}
    peaks = {**last.get("peak_bytes", {}), "nvme": stored_bytes}
    now_s = time.time()
    actors: dict[str, Any] = {}
    for tier in Tier:
        mine = [(action, since_s) for action, since_s in in_flight if action.tier is tier]
        actors[tier] = {
            "pid": pids.get(tier),
            "state": "alive" if tier in pids else "starting",
            "restarts": restarts.get(tier, 0),
            "action": str(mine[0][0].op) if mine else None,
            "layer": layer_names[mine[0][0].layer] if mine else None,
            "submitted_s_ago": round(now_s - mine[0][1], 3) if mine else None,
            "queue": max(len(mine) - 1, 0),
            "peak_bytes": peaks.get(tier),
            "planned_bytes": planned_bytes.get(tier),
        }
    times = [record["step_time_s"] for record in records]
    return {
        "run": run,
        "state": state,
        "step": step,
        "max_steps": max_steps,
        "actors": actors,
        **_of_record(last),
        "peak_bytes": peaks,
        "planned_bytes": dict(planned_bytes),
        "eta_s": round(statistics.median(times) * (max_steps - step), 1) if times else None,
    }


def _of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    facts = {key: record[key] for key in (*_SHOWN, "eval_loss") if key in record}
    if record:
        moved = {key.removesuffix("_bytes"): record[key] for key in _MOVED}
        for tier, did in record.get("tiers", {}).items():
            moved |= {f"{tier}_in": did["bytes_in"], f"{tier}_out": did["bytes_out"]}
        facts["gb_per_s"] = {name: round(nbytes / record["step_time_s"] / 1e9, 3) for name, nbytes in moved.items()}
    return facts


def read_status(directory: Path) -> dict[str, Any]:
    """The status of a run, live or not.

    Raises:
        RunDirectoryError: There is no run.
    """
    run = RunDirectory(directory.absolute())
    with contextlib.suppress(NotLiveError):
        status: dict[str, Any] = ask(run.path, "status")
        return status
    state = run.read_state()
    if state is None:
        raise RunDirectoryError(f"{run.path} holds no run")
    if state["state"] in ("starting", "running", "paused"):
        state["state"] = "not answering" if run.is_locked() else "killed"
    records = run.read_metrics()
    last = records[-1] if records else {}
    try:
        plan = json.loads((run.path / "plan.json").read_text(encoding="utf-8"))["peak_bytes"]
    except (OSError, ValueError, KeyError):
        plan = {}
    peaks = last.get("peak_bytes", {})
    return {
        "run": str(run.path),
        **state,
        "step": last.get("step", 0),
        "actors": {
            tier: {
                "pid": None,
                "state": "gone",
                "restarts": state.get("restarts", {}).get(tier, 0),
                "peak_bytes": peaks.get(tier),
                "planned_bytes": plan.get(tier),
            }
            for tier in map(str, Tier)
        },
        **_of_record(last),
        "peak_bytes": peaks,
        "planned_bytes": plan,
    }


def render_status(status: Mapping[str, Any]) -> RenderableType:
    """For people."""
    head = Text()
    head.append(f"{status['run']}\n", style="bold")
    head.append(f"{status['state']}", style="green" if status["state"] in ("running", "finished") else "yellow")
    head.append(f"  step {status['step']} of {status.get('max_steps', '?')}")
    if "loss" in status:
        head.append(f"  loss {status['loss']:.4f}  lr {status['learning_rate']:.3g}")
        head.append(f"  {status['tokens_per_s']:,.0f} tokens/s  device idle {status['device_idle_fraction']:.0%}")
    if status.get("eta_s") is not None and status["state"] == "running":
        head.append(f"  {_duration(status['eta_s'])} left")
    if status.get("cause"):
        head.append(f"\n{status['cause']}", style="red")
    actors = Table("actor", "pid", "state", "restarts", "now", "queue", "MiB (plan)", box=SIMPLE_HEAD)
    for column in actors.columns:
        column.no_wrap = True
    for name, actor in status["actors"].items():
        now = f"{actor['action']} {actor['layer']}" if actor.get("action") else "-"
        actors.add_row(
            name, str(actor["pid"] or "-"), actor["state"], str(actor["restarts"]), now, str(actor.get("queue", "-")),
            _against_plan(actor["peak_bytes"], actor["planned_bytes"]),
        )  # fmt: skip
    tiers = Table("tier", "most MiB so far (plan)", "GB/s of the last step", box=SIMPLE_HEAD)
    speed = status.get("gb_per_s", {})

    def in_and_out(tier: Tier) -> str:
        return f"{speed.get(f'{tier}_in', 0):.2f} in, {speed.get(f'{tier}_out', 0):.2f} out"

    rates = {
        "object_store": f"{speed.get('object_store_put', 0):.2f} put",
        "nvme": f"{speed.get('nvme_read', 0):.2f} read, {speed.get('nvme_write', 0):.2f} written",
        **{str(tier): in_and_out(tier) for tier in (Tier.OPTIMIZER, Tier.WORKER)},
    }
    for name in ("nvme", "object_store", str(Tier.OPTIMIZER), str(Tier.WORKER), "device", "driver"):
        measured, planned = status["peak_bytes"].get(name), status["planned_bytes"].get(name)
        if measured or planned:
            tiers.add_row(name, _against_plan(measured, planned), rates.get(name, "-"))
    return Group(head, actors, tiers)


def _against_plan(measured: int | None, planned: int | None) -> str:
    def show(size: int | None) -> str:
        return "-" if size is None else f"{size / 2**20:,.0f}"

    return f"{show(measured)} ({show(planned)})"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
