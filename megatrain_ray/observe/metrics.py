"""A run's figures for Prometheus, through ``ray.util.metrics``: one call after each step, from the metrics record.

Ray puts ``ray_`` before each name and, as Prometheus wants it, ``_total`` after a counter's. Every metric carries the
tag ``run``. Ray's agent forgets a gauge that was not set for 20 seconds, and a step may take minutes: a thread sets the
last values again every few seconds. Training never waits for any of this.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

__all__ = ["RunMetrics"]

STEP_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)
"""Bounds of the histogram of step times: a tiny model on a CPU to 100B parameters from a drive."""

REFRESH_S = 5.0
"""How often gauges are set again: well below two of Ray's report intervals of 10 s."""

_GAUGES = {
    "loss": ("megatrain_loss", "Mean loss of the step's target tokens, in nats."),
    "eval_loss": ("megatrain_eval_loss", "Mean loss on the held-out data, in nats."),
    "learning_rate": ("megatrain_learning_rate", "Learning rate of the step's update."),
    "grad_norm": ("megatrain_grad_norm", "Global L2 norm of the gradient before clipping."),
    "tokens_per_s": ("megatrain_tokens_per_second", "Non-padding tokens per second."),
    "step": ("megatrain_step", "Optimizer steps done."),
    "step_time_s": ("megatrain_step_time_seconds", "Time of the last step."),
    "device_idle_fraction": ("megatrain_device_idle_ratio", "Share of the step in which the device did not compute."),
}
"""Keys of a record, and the gauges that show them."""


class RunMetrics:
    """The metrics of one run.

    Args:
        run: Name of the run.
        plan: As in plan.json; its peaks are shown beside the measured ones, and the drives' endurance if it is known.
        total_steps: Of the run.
    """

    def __init__(self, run: str, plan: Mapping[str, Any], *, total_steps: int) -> None:
        self._run = {"run": run}
        self._values: dict[tuple[int, str], tuple[Gauge, float, dict[str, str]]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._gauges = {key: Gauge(name, text, ("run",)) for key, (name, text) in _GAUGES.items()}
        self._step_seconds = Histogram("megatrain_step_seconds", "Time of a step.", list(STEP_SECONDS), ("run",))

        def gauge(name: str, text: str, *tags: str) -> Gauge:
            return Gauge(f"megatrain_{name}", text, ("run", *tags))

        def counter(name: str, text: str, *tags: str) -> Counter:
            return Counter(f"megatrain_{name}", text, ("run", *tags))

        self._tier_rate = gauge("tier_bytes_per_second", "Bytes in and out of a tier per second of the step.", "tier")
        self._tier_busy = gauge("tier_busy_ratio", "Share of the step in which the tier worked.", "tier")
        self._queue = gauge("queue_depth", "Mean number of actions submitted to a tier that do not run yet.", "tier")
        self._hit_ratio = gauge("prefetch_hit_ratio", "Share of loads whose weights were there when wanted.")
        self._peak = gauge("memory_peak_bytes", "Most memory used so far.", "tier")
        self._tier_bytes = counter("tier_bytes", "Bytes in and out of a tier.", "tier", "direction")
        # Gauges that count up: a counter of Ray refuses 0 and would not exist before the first event.
        self._loads = gauge("prefetch_loads", "Loads of weights onto the device since the run was started.")
        self._hits = gauge("prefetch_hits", "Of those, whose weights were there when the worker was ready for them.")
        self._restarts = gauge("restarts", "Restarts of a tier's actor since the run was started.", "tier")
        self._replay = gauge("replay_seconds", "Time of attempts at a step that a restart ended.")
        self._written = gauge("drive_written_bytes", "Bytes written to the drive since the run was started.")
        self._deaths: dict[str, float] = dict.fromkeys(("nvme_store", "cpu_optimizer", "gpu_worker"), 0.0)
        self._replay_s = self._written_bytes = 0.0
        self._num_loads = self._num_hits = 0

        self._set(gauge("steps_planned", "Optimizer steps of the whole run."), total_steps)
        planned = gauge("memory_planned_bytes", "Most memory that the plan allows.", "tier")
        for tier, size in plan.get("peak_bytes", {}).items():
            self._set(planned, size, tier)
        years, a_day = plan.get("drive_life_years"), plan.get("write_bytes_per_day")
        endurance = gauge("drive_endurance_bytes", "Bytes that the drives may be written in their life; 0: not known.")
        self._set(endurance, float(years) * 365 * float(a_day) if years and a_day else 0.0)
        threading.Thread(target=self._refresh, name="metrics", daemon=True).start()

    def publish(self, record: Mapping[str, Any]) -> None:
        """Takes a metrics record."""
        run = self._run
        for key, gauge in self._gauges.items():
            if key in record:
                self._set(gauge, record[key])
        step_time_s = float(record["step_time_s"])
        self._step_seconds.observe(step_time_s, run)
        for tier, facts in record["tiers"].items():
            tags = {**run, "tier": tier}
            self._set(self._tier_rate, (facts["bytes_in"] + facts["bytes_out"]) / step_time_s, tier)
            self._set(self._tier_busy, min(facts["busy_s"] / step_time_s, 1.0), tier)
            self._set(self._queue, facts["queue_depth"], tier)
            for direction in ("in", "out"):
                if facts[f"bytes_{direction}"]:
                    self._tier_bytes.inc(float(facts[f"bytes_{direction}"]), {**tags, "direction": direction})
        loads, hits = record["prefetch"]["loads"], record["prefetch"]["hits"]
        if loads:
            self._set(self._hit_ratio, hits / loads)
        self._num_loads += loads
        self._num_hits += hits
        self._set(self._loads, self._num_loads)
        self._set(self._hits, self._num_hits)
        for tier, size in record["peak_bytes"].items():
            self._set(self._peak, size, tier)
        for tier in self._deaths:
            self._deaths[tier] += record["restarts"].get(tier, 0)
            self._set(self._restarts, self._deaths[tier], tier)
        self._replay_s += record["replay_s"]
        self._written_bytes += record["nvme_write_bytes"]
        self._set(self._replay, self._replay_s)
        self._set(self._written, self._written_bytes)

    def close(self) -> None:
        """Lets the values lapse."""
        with self._lock:
            self._closed.set()

    def _set(self, gauge: Gauge, value: float, tier: str | None = None) -> None:
        tags = self._run if tier is None else {**self._run, "tier": tier}
        with self._lock:
            self._values[id(gauge), tier or ""] = (gauge, float(value), tags)
            gauge.set(float(value), tags)

    def _refresh(self) -> None:
        while not self._closed.wait(REFRESH_S):
            with self._lock:
                for gauge, value, tags in self._values.values() if not self._closed.is_set() else ():
                    gauge.set(value, tags)
