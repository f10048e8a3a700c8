"""Runs a schedule: one action, one remote call.

Data flows between actors through references; the driver submits in list order, waits for what an action's ``after``
names, and drops each value when the action that frees it has completed. When an actor dies the whole step is replayed
from its start: updates know the steps they have seen, gradients and weights are computed again to the same bits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from megatrain_ray.cluster import CLASS_NAME, MAX_ATTEMPTS, Cluster, Receipt, ReplacedError
from megatrain_ray.errors import ActorLostError, StalledError, TrainingError
from megatrain_ray.observe.logs import Place
from megatrain_ray.schedule import UPDATES, Action, Op, Schedule, Tier, Value

__all__ = ["Pipeline", "Record"]

MAX_REPLAYS = 30
"""Of one schedule, wherever its actors die."""

_EMITS = frozenset((Op.PARAMS, Op.CAST, Op.READ_MASTER))


@dataclass(frozen=True, slots=True)
class Record:
    """One action as it ran.

    Attributes:
        action: What ran.
        submitted_s: When the driver submitted it, in seconds since the epoch.
        receipt: What the actor reported.
        index: Its position in the schedule.
    """

    action: Action
    submitted_s: float
    receipt: Receipt
    index: int = 0


class _TierDied(Exception):
    """The actor of this action's tier is gone, or was killed because it outlived the deadline."""

    def __init__(self, action: Action, *, stalled: bool = False) -> None:
        super().__init__(str(action))
        self.action = action
        self.stalled = stalled


class Pipeline:
    """Executes schedules on a cluster.

    Args:
        cluster: With its actors started.
        layer_names: For messages and task names.
        bytes_of: Of a value in the object store.
        deadline_s: Longest wait for any one action.
        on_wait: Called with the action that the driver waits for.
        on_death: Called before a replay with the action in which an actor died, and whether it was killed for stalling.

    Attributes:
        values: What is in the object store, by name; gradients stay there from one step to the next.
        peak_bytes: The most that it was at once, counted from submission.
    """

    def __init__(
        self,
        cluster: Cluster,
        layer_names: tuple[str, ...],
        bytes_of: Callable[[Value], int],
        *,
        deadline_s: float,
        on_wait: Callable[[Action], None] = lambda action: None,
        on_death: Callable[[Action, bool], None] = lambda action, stalled: None,
    ) -> None:
        self.cluster = cluster
        self.layer_names = layer_names
        self.deadline_s = deadline_s
        self.on_wait = on_wait
        self.on_death = on_death
        self.bytes_of = bytes_of
        self.values: dict[Value, Any] = {}
        self.peak_bytes = 0
        self._attempt: _Attempt | None = None

    def run(self, schedule: Schedule, arguments: Callable[[Action], tuple[Any, ...]], *, step: int) -> list[Record]:
        """Runs all actions to completion.

        Args:
            schedule: The list.
            arguments: The leading arguments of an action's call; the values it reads follow them.
            step: That it is part of, for the logs.

        Returns:
            One record an action, in list order.

        Raises:
            StalledError: An action outlived the deadline.
            ActorLostError: Actors died `MAX_ATTEMPTS` times in one action, or `MAX_REPLAYS` times in all.
            MegatrainError: What an actor raised.
        """
        saved: set[int] = set()
        deaths: Counter[Action] = Counter()
        while True:
            attempt = self._attempt = _Attempt(self, schedule, arguments, saved, step)
            try:
                return attempt.run()
            except _TierDied as death:
                if death.stalled:
                    self.cluster.kill(death.action.tier)
                attempt.settle()
                self.on_death(death.action, death.stalled)
                deaths[death.action] += 1
                if deaths[death.action] >= MAX_ATTEMPTS or deaths.total() >= MAX_REPLAYS:
                    raise self.lost(death.action.tier, self.describe(death.action), stalled=death.stalled) from None
            for tier in Tier:
                self.cluster.revive(tier, self.deadline_s)

    def lost(self, tier: Tier, what: str, *, stalled: bool) -> TrainingError:
        """The end of a run whose tier dies of the same again and again, or was killed each time for stalling in it."""
        where = f"{CLASS_NAME[tier]} ({tier}), {what}"
        if stalled:
            return StalledError(
                f"{where}: not finished within {self.deadline_s:.0f} s (tiers.deadline_s), again and again; "
                "look at the drive, the GPU and the machine's load, and resume"
            )
        return ActorLostError(
            f"{where}: its process died again and again at this place; "
            "look for it in the kernel's log (out of memory?) and resume"
        )

    def in_flight(self) -> list[tuple[Action, float]]:
        """Actions submitted and not complete, earliest first, and when they were submitted; from any thread."""
        attempt = self._attempt
        if attempt is None:
            return []
        return [(attempt.schedule[index], attempt.submitted_s[index]) for index in sorted(attempt.in_flight.values())]

    def describe(self, action: Action) -> str:
        """For people: the operation and the layer."""
        return f"{action.op} of {self.layer_names[action.layer]}"


class _Attempt:
    """One pass over a schedule."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        arguments: Callable[[Action], tuple[Any, ...]],
        saved: set[int],
        step: int,
    ) -> None:
        self.pipeline = pipeline
        self.schedule = schedule
        self.arguments = arguments
        self.step = step
        self.pids = dict(pipeline.cluster.pids)  # of processes that have seen all of this attempt
        self.saved = saved  # layers whose checkpoint is written, from this and earlier attempts
        self.in_flight: dict[Any, int] = {}
        self.receipts: dict[int, Any] = {}
        self.written: dict[int, dict[Value, Any]] = {}
        self.submitted_s: dict[int, float] = {}
        self.records: dict[int, Record] = {}
        self.freed_by: dict[Value, int] = {}
        self.failures: dict[int, Exception] = {}

    def run(self) -> list[Record]:
        for index, action in enumerate(self.schedule):
            self._wait_for(action.after)
            if not self._is_done(action):
                self._submit(index, action)
        self._wait_for(self.receipts)
        self._free(self.schedule[-1])
        return [self.records[index] for index in sorted(self.records)]

    def settle(self) -> None:
        """Lets what is in flight end, well or badly, so that a replay meets idle actors; forgets its values."""
        if self.in_flight:
            ray.wait(list(self.in_flight), num_returns=len(self.in_flight), timeout=self.pipeline.deadline_s)
        for references in self.written.values():  # of what has not completed
            for value, reference in references.items():
                if self.pipeline.values.get(value) is reference:
                    del self.pipeline.values[value]

    def _is_done(self, action: Action) -> bool:
        """On a replay: weights that are still in the object store, and layers that are in the checkpoint."""
        if action.op in _EMITS:
            params = Value("params", action.layer)  # one that this attempt has used up is on its way out
            return params in self.pipeline.values and params not in self.freed_by
        return action.op in (Op.SNAPSHOT, Op.SAVE) and action.layer in self.saved

    def _submit(self, index: int, action: Action) -> None:
        pipeline = self.pipeline
        # A name is written again only once its old value is no longer needed, be it for a replay.
        self._wait_for(self.freed_by[value] for value in action.writes if value in self.freed_by)
        # Only an update may miss what it reads: the gradient of a step that it has seen before a replay.
        reads = [
            pipeline.values.get(value) if action.op in UPDATES else pipeline.values[value] for value in action.reads
        ]
        call = pipeline.cluster.call(
            action.tier,
            action.op.value,
            *self.arguments(action),
            *reads,
            num_values=len(action.writes),
            pid=self.pids[action.tier],
            name=f"{action.op} {pipeline.layer_names[action.layer]}",
            place=Place(self.step, pipeline.layer_names[action.layer]),
        )
        self.written[index] = dict(zip(action.writes, call.values, strict=True))
        pipeline.values.update(self.written[index])
        self.freed_by.update(dict.fromkeys(action.frees, index))
        pipeline.peak_bytes = max(pipeline.peak_bytes, sum(map(pipeline.bytes_of, pipeline.values)))
        self.submitted_s[index] = time.time()
        self.in_flight[call.receipt] = index
        self.receipts[index] = call.receipt

    def _wait_for(self, indices: Iterable[int]) -> None:
        """Waits until these actions are complete; notices others that are."""
        wanted = [self.receipts[index] for index in indices if index in self.receipts and index not in self.records]
        give_up_s, late = time.monotonic() + self.pipeline.deadline_s, False
        while self.in_flight:
            self._take_ready(timeout_s=0.0)
            if self.failures:
                # What failed may have failed because of another: an action meets what earlier ones have left.
                self._take_ready(timeout_s=self.pipeline.deadline_s)
                raise self.failures[min(self.failures)]
            wanted = [reference for reference in wanted if reference in self.in_flight]
            if not wanted:
                return
            # The earliest action in flight has all it needs: the others may wait for it.
            first = self.schedule[min(self.in_flight.values())]
            if late:
                raise _TierDied(first, stalled=True)
            self.pipeline.on_wait(first)
            late = not ray.wait(wanted, num_returns=1, timeout=max(give_up_s - time.monotonic(), 0.0))[0]
            if not late:
                give_up_s = time.monotonic() + self.pipeline.deadline_s

    def _take_ready(self, *, timeout_s: float) -> None:
        """Notes which actions have ended, well or badly; waits for all of them as long as ``timeout_s``."""
        if not self.in_flight:
            return
        ready, _ = ray.wait(list(self.in_flight), num_returns=len(self.in_flight), timeout=timeout_s)
        for reference in ready:
            index = self.in_flight.pop(reference)
            try:
                self._complete(index, ray.get(reference))
            except RayActorError:
                self.failures[index] = _TierDied(self.schedule[index])
            except RayTaskError as error:
                cause = error.cause if isinstance(error.cause, Exception) else error
                self.failures[index] = _TierDied(self.schedule[index]) if isinstance(cause, ReplacedError) else cause

    def _complete(self, index: int, receipt: Receipt) -> None:
        action = self.schedule[index]
        self.pipeline.cluster.note(action.tier, receipt)
        self.records[index] = Record(action, self.submitted_s[index], receipt, index)
        del self.written[index]  # a reference held here would keep every value of the step until its end
        if action.op is Op.SAVE:
            self.saved.add(action.layer)
        # What the last one frees is what a replay would start from: it stays until the others have completed too.
        if index < len(self.schedule) - 1:
            self._free(action)

    def _free(self, action: Action) -> None:
        for value in action.frees:
            self.pipeline.values.pop(value, None)
