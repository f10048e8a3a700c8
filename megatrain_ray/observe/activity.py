"""What each tier did in a step, measured from the receipts of its actions: busy time, bytes, queue, prefetch (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from megatrain_ray.actors.nvme_store import WriteReceipt
from megatrain_ray.pipeline import Record
from megatrain_ray.schedule import Op, Tier, Value

__all__ = ["call_seconds", "measure_activity", "time_covered"]


def time_covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals: overlapping work counts once."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return covered


def call_seconds(records: Sequence[Record]) -> float | None:
    """What a call costs an actor besides its work: the median pause of the worker while the next action waits for it.

    Args:
        records: In the order of submission.
    """
    worker = [record for record in records if record.action.tier is Tier.WORKER]
    pauses = [
        after.receipt.started_s - before.receipt.ended_s
        for before, after in pairwise(worker)
        if not after.action.reads and after.submitted_s < before.receipt.ended_s
    ]
    return statistics.median(pauses) if pauses else None


def measure_activity(
    records: Sequence[Record], step_time_s: float, bytes_of: Callable[[Value], int], *, on_cpu: bool = True
) -> dict[str, Any]:
    """Three keys of a metrics record.

    Args:
        records: Of one step, in the order of submission.
        step_time_s: Of that step.
        bytes_of: A value in the object store.
        on_cpu: Weights are used where the object store has them; else pinned blocks bring them to the device.

    Returns:
        ``tiers``: for each tier ``busy_s`` (at least one action runs), ``queue_depth`` (mean number of actions that are
        submitted and do not run yet; Little's law), ``bytes_in`` and ``bytes_out`` (values that it took and gave: for
        the worker host to device and device to host, for the store written to and read from files).
        ``prefetch``: ``loads`` of weights and ``hits``, those whose weights were there when the worker was ready for
        them. ``copied_bytes``: between tiers within host memory, into the object store and into blocks for transfers.
    """
    tiers = {}
    for tier in Tier:
        mine = [record for record in records if record.action.tier is tier]
        waited_s = sum(max(record.receipt.started_s - record.submitted_s, 0.0) for record in mine)
        tiers[str(tier)] = {
            "busy_s": round(time_covered((r.receipt.started_s, r.receipt.ended_s) for r in mine), 6),
            "queue_depth": round(waited_s / step_time_s, 4),
            "bytes_in": sum(bytes_of(value) for record in mine for value in record.action.reads),
            "bytes_out": sum(bytes_of(value) for record in mine for value in record.action.writes),
        }
    return {"tiers": tiers, "prefetch": _prefetch(records), "copied_bytes": _copied_bytes(records, bytes_of, on_cpu)}


def _copied_bytes(records: Sequence[Record], bytes_of: Callable[[Value], int], on_cpu: bool) -> int:
    copied = 0
    for action, receipt in ((record.action, record.receipt) for record in records):
        copied += receipt.put_bytes
        if isinstance(receipt.info, WriteReceipt):
            copied += receipt.info.copied_bytes
        if action.op is Op.LOAD and not on_cpu:
            copied += sum(map(bytes_of, action.reads))
    return copied


def _prefetch(records: Sequence[Record]) -> dict[str, int]:
    made_s: dict[Value, float] = {}
    worker_free_s = float("-inf")
    loads = hits = 0
    for record in records:
        action, receipt = record.action, record.receipt
        if action.op is Op.LOAD:
            loads += 1
            hits += all(made_s.get(value, float("-inf")) <= worker_free_s for value in action.reads)
        if action.tier is Tier.WORKER:
            worker_free_s = receipt.ended_s
        for value in action.writes:
            made_s[value] = receipt.ended_s
    return {"loads": loads, "hits": hits}
