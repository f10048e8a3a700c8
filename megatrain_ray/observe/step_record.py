"""What `metrics.jsonl` says of a step, from what the actors reported of their actions."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatrain_ray.actors.gpu_worker import GradInfo
from megatrain_ray.actors.nvme_store import WriteReceipt
from megatrain_ray.data.batches import StepBatch
from megatrain_ray.observe.activity import call_seconds, measure_activity
from megatrain_ray.observe.memory import RayMemory, private_bytes
from megatrain_ray.pipeline import Pipeline, Record
from megatrain_ray.schedule import Op, Tier

__all__ = ["StepRecords"]


class StepRecords:
    """Makes the records of a run, one after the other.

    Args:
        pipeline: Of the run.
        memory: Of Ray's processes.
        arena_bytes: Masters and moments in RAM, which no process counts as its own.
        on_cpu: The device is the host's own processor.

    Attributes:
        call_s: What a call cost an actor besides its work in the last step that showed it, in seconds.
    """

    def __init__(self, pipeline: Pipeline, memory: RayMemory, *, arena_bytes: int, on_cpu: bool) -> None:
        self._pipeline = pipeline
        self._memory = memory
        self._arena_bytes = arena_bytes
        self._on_cpu = on_cpu
        self._peaks: Counter[str] = Counter()
        self._deaths: Counter[Tier] = Counter()
        self.call_s: float | None = None

    def died(self, tier: Tier) -> None:
        """An actor died; the next record says so."""
        self._deaths[tier] += 1

    def saw(self, records: Sequence[Record]) -> None:
        """Takes memory into account that a schedule needed, be it a step's or another."""
        for record in records:
            self._peak(record.action.tier, record.receipt.private_bytes)
            if isinstance(record.receipt.info, GradInfo):
                self._peak("device", record.receipt.info.device_peak_bytes)

    def make(
        self,
        batch: StepBatch,
        records: Sequence[Record],
        *,
        learning_rate: float,
        loss: float,
        grad_norm: float,
        started_s: float,
    ) -> dict[str, Any]:
        """The record of a step that has just ended.

        Args:
            batch: What it trained on.
            records: Its actions, in the order of submission.
            learning_rate: Of its update.
            loss: Token losses over their number.
            grad_norm: Global, before clipping.
            started_s: Seconds since the epoch.
        """
        ended_s = time.time()
        step_time_s = ended_s - started_s
        # Since the last record; of what evaluations and saves have replayed only the deaths are known.
        deaths, self._deaths = self._deaths, Counter()
        self.call_s = call_seconds(records) or self.call_s
        receipts = [record.receipt for record in records]
        busy_s = math.fsum(receipt.info.busy_s for receipt in receipts if isinstance(receipt.info, GradInfo))
        written = [receipt.info for receipt in receipts if isinstance(receipt.info, WriteReceipt)]
        reads = (Op.READ, Op.READ_MASTER, Op.READ_GRADS)
        return {
            "step": batch.step,
            "epoch": batch.epoch,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "target_tokens": batch.target_tokens,
            "tokens": batch.tokens,
            "samples": list(batch.samples),
            "step_time_s": step_time_s,
            "tokens_per_s": batch.tokens / step_time_s,
            "device_idle_fraction": min(max(1.0 - busy_s / step_time_s, 0.0), 1.0),
            "nvme_read_bytes": sum(record.receipt.put_bytes for record in records if record.action.op in reads)
            + sum(receipt.read_bytes for receipt in written),
            "nvme_write_bytes": sum(receipt.written_bytes for receipt in written),
            "object_store_put_bytes": sum(receipt.put_bytes for receipt in receipts),
            "peak_bytes": self._peak_bytes(),
            "ended_s": ended_s,
            "restarts": {str(tier): deaths[tier] for tier in Tier if deaths[tier]},
            "replay_s": max(min(r.submitted_s for r in records) - started_s, 0.0) if deaths and records else 0.0,
            **measure_activity(records, step_time_s, self._pipeline.bytes_of, on_cpu=self._on_cpu),
        }

    def _peak_bytes(self) -> dict[str, int]:
        self._peak("driver", private_bytes())
        self._peak("ray", self._memory.processes_bytes())
        peaks = {name: self._peaks[name] for name in ("driver", *map(str, Tier), "ray", "device")}
        # What is not seen (a Ray of somebody else's) is counted instead.
        peaks["object_store"] = self._memory.object_store_bytes() or self._pipeline.peak_bytes
        peaks["cpu_optimizer"] += self._arena_bytes
        return peaks

    def _peak(self, name: str, nbytes: int) -> None:
        self._peaks[str(name)] = max(self._peaks[str(name)], nbytes)
