"""What a run needs of each tier, where everything goes, and whether the machine has it (pure: no torch, no ray).

RAM first: masters and moments stay in memory as far as they fit, the others are paged through the store. What does not
fit at all is refused before anything is written, with the numbers and the smallest change that would.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any

from megatrain_ray.config import Config
from megatrain_ray.errors import PlanError
from megatrain_ray.layout import LayerSpec
from megatrain_ray.machine import Machine
from megatrain_ray.packed import STATE
from megatrain_ray.schedule import StepShape, build_step
from megatrain_ray.tier_memory import MIB, TierMemory, Workload
from megatrain_ray.timing import StepTime, Timing, nvme_bytes

__all__ = ["NEW_RUN", "SPARE_SHARE", "Plan", "Progress", "loss_chunk_tokens", "make_plan"]

LOGITS_BYTES = 256 * MIB
"""What the logits of one chunk may take, their gradient and copies included."""

SPARE_SHARE = 0.9
"""Share of the available memory that a plan may use."""

MINIMUM_STORE_BYTES = 80 * MIB
"""Ray accepts no smaller object store."""

WORTH = 0.98
"""More memory is used only where it makes the step at least 2% shorter."""

_FREE = ("placement", "prefetch_depth", "recompute", "object_store_memory")
"""Settings of ``tiers`` that are the plan's to choose when they are ``auto``."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: That it continues from.
        total_steps: Of the run; None: ``training.max_steps``.
        checkpoints: Complete ones that it has.
    """

    step: int = 0
    total_steps: int | None = None
    checkpoints: int = 0


NEW_RUN = Progress()


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run uses the machine.

    Attributes:
        shape: For the schedule.
        loss_chunk_tokens: Target tokens whose logits exist at once.
        worker_threads, optimizer_threads: Of each process.
        offload_inputs: Layer inputs that backward needs wait in host memory instead of on the device.
        slots: Device buffers for the weights of decoder layers.
        read_buffer_bytes: Of the store, used again and again.
        object_store_bytes: Size of Ray's object store.
        phases: Predicted peak bytes by phase and tier; ``export`` is `save_pretrained` of a live run.
        peak_bytes: Predicted, by tier, over import, step and save. ``total_ram`` adds up what is in host memory;
            ``device`` is absent on the CPU, ``nvme`` is the store.
        limits: What each of ``total_ram``, ``object_store``, ``device`` and ``disk`` may be at most, and
            ``output_disk`` where checkpoints go to another disk than the store.
        store_bytes: Files of the store.
        checkpoint_bytes: One checkpoint.
        checkpoints: That take new space: those that are kept and are not there yet, and the one being written.
        disk_bytes: Store and these checkpoints.
        tokens: Of a step, padding included.
        time: Predicted step.
        speeds: Where the figures behind ``time`` come from.
        write_bytes_per_day: To the drive, checkpoints included.
        drive_life_years: Until the drives' endurance is used up; None: unknown, or nothing is written.
    """

    shape: StepShape
    loss_chunk_tokens: int
    worker_threads: int
    optimizer_threads: int
    offload_inputs: bool
    slots: int
    read_buffer_bytes: int
    object_store_bytes: int
    phases: dict[str, dict[str, int]]
    peak_bytes: dict[str, int]
    limits: dict[str, int]
    store_bytes: int
    checkpoint_bytes: int
    checkpoints: int
    disk_bytes: int
    tokens: int
    time: StepTime | None = None
    speeds: str = ""
    write_bytes_per_day: int = 0
    drive_life_years: float | None = None

    def to_json(self) -> dict[str, Any]:
        """For plan.json."""
        shape = self.shape
        layers = range(len(shape.numels))
        return {
            "placement": ["nvme" if layer in shape.paged else "ram" for layer in layers],
            "gradients": ["nvme" if layer in shape.spilled_grads else "object_store" for layer in layers],
            "prefetch_depth": shape.prefetch_depth,
            "slots": self.slots,
            "retain_params": shape.retain_params,
            "keep_graph": shape.keep_graph,
            "offload_inputs": self.offload_inputs,
            "loss_chunk_tokens": self.loss_chunk_tokens,
            "threads": {"gpu_worker": self.worker_threads, "cpu_optimizer": self.optimizer_threads},
            "object_store_bytes": self.object_store_bytes,
            "peak_bytes": self.peak_bytes,
            "phases": self.phases,
            "limits": self.limits,
            "store_bytes": self.store_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "disk_bytes": self.disk_bytes,
            "tokens_per_step": self.tokens,
            "step": None if self.time is None else asdict(self.time),
            "speeds": self.speeds,
            "write_bytes_per_day": self.write_bytes_per_day,
            "drive_life_years": self.drive_life_years,
        }


def loss_chunk_tokens(config: Config, vocabulary_rows: int) -> int:
    """Target tokens whose logits exist at once: about four fp32 copies of them."""
    if config.tiers.loss_chunk_tokens != "auto":
        return config.tiers.loss_chunk_tokens
    return min(max(LOGITS_BYTES // (16 * vocabulary_rows), 64), 8192)


def make_plan(
    config: Config,
    layers: tuple[LayerSpec, ...],
    head_reads: tuple[int, ...],
    *,
    compute_dtype: str,
    chunk_tokens: int,
    workload: Callable[[Config], Workload],
    machine: Machine,
    progress: Progress = NEW_RUN,
) -> Plan:
    """Places everything.

    Args:
        config: Of the run.
        layers: The stream.
        head_reads: Layers whose weights the head uses.
        compute_dtype: Of the weights on the device.
        chunk_tokens: See `loss_chunk_tokens`.
        workload: Of a step; called again with configurations that might fit where this one does not.
        machine: That it runs on.
        progress: Of the run.

    Raises:
        PlanError: It does not fit; the message says what is needed, what there is, and the smallest change with which
            this function has a plan.
    """
    return _Planner(config, layers, head_reads, compute_dtype, chunk_tokens, workload, machine, progress).run()


@dataclass(frozen=True, slots=True)
class _Choice:
    """What there is to decide."""

    num_paged: int = 0
    retain_params: bool = True
    spill_grads: bool = False
    prefetch_depth: int = 1
    keep_graph: int = 0
    offload_inputs: bool = False


@dataclass
class _Planner:
    config: Config
    layers: tuple[LayerSpec, ...]
    head_reads: tuple[int, ...]
    compute_dtype: str
    chunk_tokens: int
    workload_of: Callable[[Config], Workload]
    machine: Machine
    progress: Progress
    seen: dict[_Choice, Plan] = field(default_factory=dict)
    stores: dict[StepShape, dict[str, int]] = field(default_factory=dict)

    # --- deciding -------------------------------------------------------------------------------------------------

    def run(self) -> Plan:
        choice = min(self._possible(), key=self._seconds, default=None)
        if choice is None:
            raise PlanError(self._refusal())
        for depth in (2, 3) if self.config.tiers.prefetch_depth == "auto" else ():
            choice = self._better(choice, replace(choice, prefetch_depth=depth))
        if self.config.tiers.recompute == "auto":
            choice = self._better(choice, replace(choice, keep_graph=self._most_kept(choice)))
        return self._timed(self._plan(choice))

    @cached_property
    def workload(self) -> Workload:
        return self.workload_of(self.config)

    def _possible(self) -> Iterator[_Choice]:
        """What fits with the first prefetch depth with which anything does."""
        for start in self._starts():
            fitting = (choice for choice in self._placements(start) if self._fits(choice))
            first = next(fitting, None)
            if first is not None:
                yield first
                yield from fitting
                return

    def _starts(self) -> Iterator[_Choice]:
        wanted = self.config.tiers.prefetch_depth
        for depth in (1, 0) if wanted == "auto" else (wanted,):
            start = _Choice(prefetch_depth=depth, keep_graph=self._asked_keep_graph)
            yield start if self._fits_device(start) else replace(start, offload_inputs=True)

    def _placements(self, start: _Choice) -> Iterator[_Choice]:
        """For each treatment of weights and gradients: as few layers in the store as fit."""
        for retain, spill in self._treatments:
            base = replace(start, retain_params=retain, spill_grads=spill)
            wanted = self.config.tiers.placement
            if wanted == "ram":
                yield base
            elif wanted == "nvme":
                yield replace(base, num_paged=len(self._paging_order))
            else:
                yield self._fewest_paged(base)

    @property
    def _treatments(self) -> tuple[tuple[bool, bool], ...]:
        if not self._deferred:  # a replay starts from the step's weights: they stay
            return ((True, False),)
        return ((True, False), (False, False), (True, True), (False, True))

    def _fewest_paged(self, base: _Choice) -> _Choice:
        """More in the store needs less memory, nearly in proportion: the next try is where a line meets the limit."""

        def paged(num_paged: int) -> _Choice:
            return replace(base, num_paged=num_paged)

        def over(num_paged: int) -> int:
            return max(self._over(paged(num_paged)).values())

        high = len(self._paging_order)
        low = bisect.bisect_left(range(high), True, key=lambda num_paged: self._may_fit_ram(paged(num_paged)))
        if low < high and over(low) <= 0:
            return paged(low)
        if low == high or over(high) > 0:
            return paged(high)
        over_low, over_high = over(low), over(high)
        while high - low > 1:
            guess = low + -(-over_low * (high - low) // (over_low - over_high))
            middle = min(max(guess, low + 1), high - 1)
            over_middle = over(middle)
            if over_middle <= 0:
                high, over_high = middle, over_middle
            else:
                low, over_low = middle, over_middle
        return paged(high)

    def _most_kept(self, choice: _Choice) -> int:
        low, high = choice.keep_graph, len(self.layers) - 2
        while low < high:
            middle = (low + high + 1) // 2
            more = replace(choice, keep_graph=middle)
            if self._fits(more):
                low = middle
            else:
                high = middle - 1
        return low

    def _better(self, present: _Choice, other: _Choice) -> _Choice:
        """The other if it fits and is worth its memory."""
        return other if self._fits(other) and self._seconds(other) < WORTH * self._seconds(present) else present

    @property
    def _deferred(self) -> bool:
        return bool(self.config.training.max_grad_norm)

    @property
    def _asked_keep_graph(self) -> int:
        recompute = self.config.tiers.recompute
        return max(len(self.layers) - 2 - recompute, 0) if isinstance(recompute, int) else 0

    @cached_property
    def _paging_order(self) -> tuple[int, ...]:
        """Small layers first, since what travels whole is as large as the largest; of equal ones the last first."""
        trainable = [spec.index for spec in self.layers if spec.numel]
        return tuple(sorted(trainable, key=lambda index: (self.layers[index].numel, -index)))

    # --- predicting -----------------------------------------------------------------------------------------------

    def _shape(self, choice: _Choice) -> StepShape:
        paged = frozenset(self._paging_order[: choice.num_paged])
        return StepShape(
            numels=tuple(spec.numel for spec in self.layers),
            head_reads=self.head_reads,
            paged=paged,
            spilled_grads=paged if choice.spill_grads else frozenset(),
            prefetch_depth=choice.prefetch_depth,
            deferred=self._deferred,
            retain_params=choice.retain_params,
            keep_graph=choice.keep_graph,
            cast=self.compute_dtype != "float32",
        )

    @cached_property
    def _memory(self) -> TierMemory:
        return TierMemory(self.config, self.layers, self.head_reads, self.compute_dtype, self.workload, self._on_cpu)

    def _plan(self, choice: _Choice) -> Plan:
        if choice not in self.seen:
            self.seen[choice] = self._predict(choice)
        return self.seen[choice]

    def _predict(self, choice: _Choice) -> Plan:
        shape = self._shape(choice)
        if shape not in self.stores:
            self.stores[shape] = self._memory.object_store(shape)
        stores = self.stores[shape]
        phases = self._memory.host(shape, stores, offload_inputs=choice.offload_inputs)
        running = list(phases.values())
        largest = max(spec.section_bytes("float32") for spec in self.layers)
        saving = phases["save"]
        phases["export"] = {
            **saving, "driver": saving["driver"] + largest, "total_ram": saving["total_ram"] + largest
        }  # fmt: skip
        peak = {tier: max(phase[tier] for phase in running) for tier in running[0]}
        device = self._device_bytes(choice)
        if device is not None:
            peak["device"] = device
        store_bytes = self._memory.store_files(shape)
        peak["nvme"] = store_bytes
        checkpoint_bytes = len(STATE) * 4 * sum(spec.num_parameters for spec in self.layers)
        checkpoints = self._new_checkpoints(self.config.training.save_total_limit or 1)
        wanted = self.config.tiers.object_store_memory
        needed = peak["object_store"]
        cores = self.machine.cores
        return Plan(
            shape=shape,
            loss_chunk_tokens=self.chunk_tokens,
            worker_threads=cores if self._on_cpu else max(cores // 4, 1),
            optimizer_threads=max(cores // 2, 1),
            offload_inputs=choice.offload_inputs,
            slots=max(choice.prefetch_depth, 1) + 1,
            read_buffer_bytes=self._memory.read_buffers(shape),
            # Objects end at any byte: a little is lost between them.
            object_store_bytes=wanted
            if wanted != "auto"
            else max(needed + needed // 16, MINIMUM_STORE_BYTES) + 32 * MIB,
            phases=phases,
            peak_bytes=peak,
            limits=self._limits,
            store_bytes=store_bytes,
            checkpoint_bytes=checkpoint_bytes,
            checkpoints=checkpoints,
            disk_bytes=store_bytes + checkpoints * checkpoint_bytes,
            tokens=self.workload.tokens * self.workload.micro_batches,
        )

    def _new_checkpoints(self, keep: int) -> int:
        """Most at once beyond those there already, the one being written included, when ``keep`` are kept."""
        step, every, total = self.progress.step, self.config.training.save_steps, self._total_steps
        if self._is_complete:
            return 0
        if not every:  # one after the last step
            return 1
        most = max(keep + 1 - self.progress.checkpoints, 1)
        return most if total is None else min(most, -(-total // every) - step // every)

    @property
    def _total_steps(self) -> int | None:
        return self.progress.total_steps or self.config.training.max_steps

    @property
    def _is_complete(self) -> bool:
        return self._total_steps is not None and self.progress.step >= self._total_steps

    @property
    def _on_cpu(self) -> bool:
        return self.machine.device_memory_bytes is None

    # --- time -----------------------------------------------------------------------------------------------------

    @cached_property
    def _timing(self) -> Timing:
        return Timing(
            self.layers,
            self.workload.cost,
            self.workload.micro_batches,
            self.compute_dtype,
            self._on_cpu,
            self.machine.speeds,
        )

    def _seconds(self, choice: _Choice) -> float:
        return self._timing.step_s(self._shape(choice))

    def _timed(self, plan: Plan) -> Plan:
        time = self._timing.predict(plan.shape)
        every = self.config.training.save_steps
        written, step_s = float(time.nvme_write_bytes), time.step_s
        if every:
            saving = build_step(plan.shape, pending=self._deferred, save=True)
            written += (nvme_bytes(saving, plan.shape)[1] - time.nvme_write_bytes) / every
            step_s += (time.save_step_s - time.step_s) / every
        a_day = int(written * 86400 / step_s)
        endurance = self.machine.drive_endurance_bytes
        return replace(
            plan,
            time=time,
            speeds=self.machine.speeds.source,
            write_bytes_per_day=a_day,
            drive_life_years=endurance / a_day / 365 if endurance and a_day else None,
        )

    # --- limits ---------------------------------------------------------------------------------------------------

    @cached_property
    def _limits(self) -> dict[str, int]:
        machine = self.machine
        ram = self._asked_limit("host_memory") or int(machine.host_memory_bytes * SPARE_SHARE)
        limits = {"total_ram": ram, "object_store": machine.shared_memory_bytes, "disk": machine.disk_free_bytes}
        if machine.device_memory_bytes is not None:
            limits["device"] = self._asked_limit("device_memory") or machine.device_memory_bytes
        if machine.output_free_bytes is not None:
            limits["output_disk"] = machine.output_free_bytes
        return limits

    def _asked_limit(self, key: str) -> int | None:
        """The configuration's, where it is below what the machine has."""
        asked, there = getattr(self.config.tiers, key), getattr(self.machine, f"{key}_bytes")
        return asked if asked != "auto" and there is not None and asked <= there else None

    def _fits(self, choice: _Choice) -> bool:
        return (
            self._fits_device(choice)
            and self._may_fit_ram(choice)
            and max(self._over(choice).values()) <= 0
            and self._disk_problem(self._plan(choice)) is None
        )

    def _over(self, choice: _Choice) -> dict[str, int]:
        """Bytes beyond the limits of host memory and of the object store: at most 0 where it fits."""
        plan, limits = self._plan(choice), self._limits
        size, peak = plan.object_store_bytes, plan.peak_bytes
        return {
            "total_ram": peak["total_ram"] - limits["total_ram"],
            "object_store": max(size - limits["object_store"], peak["object_store"] - size),
        }

    def _may_fit_ram(self, choice: _Choice) -> bool:
        """False where what is in the object store for certain is too much: quick, since no schedule is built."""
        shape = self._shape(choice)
        step = self._memory.host(
            shape, {"step": self._memory.certain(shape)}, offload_inputs=choice.offload_inputs
        )["step"]  # fmt: skip
        return step["total_ram"] <= self._limits["total_ram"]

    def _device_bytes(self, choice: _Choice) -> int | None:
        if self._on_cpu:
            return None
        shape = self._shape(choice)
        return max(
            self._memory.worker(shape, offload_inputs=choice.offload_inputs, evaluating=evaluating)[1] or 0
            for evaluating in (False, True)
        )

    def _fits_device(self, choice: _Choice) -> bool:
        device = self._device_bytes(choice)
        return device is None or device <= self._limits["device"]

    # --- refusing -------------------------------------------------------------------------------------------------

    def _refusal(self) -> str:
        """What is needed and what there is; the smallest change of the run that helps, and what more of it would."""
        start = next(self._starts())
        if not self._fits_device(start):
            needed = self._device_bytes(start) or 0
            lacks = [f"the device needs {_size(needed)} and may use {_size(self._limits['device'])}"]
            helps = []
            if self._asked_limit("device_memory") and needed <= (self.machine.device_memory_bytes or 0):
                helps = [f"raise tiers.device_memory to {_room(needed)}"]
        else:
            choices = [choice for start in self._starts() for choice in self._placements(start)]
            closest = min(choices, key=lambda choice: sum(max(over, 0) for over in self._over(choice).values()))
            lacks, helps = self._missing_memory(closest)
            if not lacks:
                problem = self._disk_problem(self._plan(closest))
                assert problem is not None, "it fits"
                return problem
        changes = self._smallest_change()
        advice = [
            *(["set " + ", ".join(f"{key}: {value}" for key, value in changes.items())] if changes else []),
            *([" and ".join(helps)] if helps else []),
        ]
        return f"{', and '.join(lacks)}: " + (
            ", or ".join(advice) or "no smaller batch helps: its layers are too large"
        )

    def _missing_memory(self, choice: _Choice) -> tuple[list[str], list[str]]:
        """(What is short, what to do about it)."""
        plan, over, limits = self._plan(choice), self._over(choice), self._limits
        lacks, helps = [], []
        if over["total_ram"] > 0:
            needed, limited = plan.peak_bytes["total_ram"], self._asked_limit("host_memory")
            source = "tiers.host_memory" if limited else self.machine.host_memory_source
            tiers = ("driver", "nvme_store", "cpu_optimizer", "gpu_worker", "object_store", "ray")
            parts = ", ".join(f"{name} {_size(plan.peak_bytes[name])}" for name in tiers)
            lacks.append(
                f"the run needs {_size(needed)} of memory ({parts}) and may use {_size(limits['total_ram'])} ({source})"
            )
            helps.append(
                f"raise tiers.host_memory to {_room(needed)}"
                if limited and needed <= self.machine.host_memory_bytes
                else f"give it {_room(needed / SPARE_SHARE)} of memory"
            )
        size, needed, there = plan.object_store_bytes, plan.peak_bytes["object_store"], limits["object_store"]
        if size < needed:
            lacks.append(f"tiers.object_store_memory is {_size(size)}, and the run needs {_size(needed)}")
        if size > there:
            lacks.append(f"the object store needs {_size(size)} of /dev/shm, which has {_size(there)}")
            helps.append(f"enlarge /dev/shm to {_room(size)} (docker run --shm-size, mount -o remount,size=)")
        return lacks, helps

    def _smallest_change(self) -> dict[str, Any] | None:
        """Of settings that ask for more than they must; else fewer micro-batches, fewer rows, or shorter ones."""
        training, max_length = self.config.training, self.config.data.max_length
        micro_batches, rows = "training.gradient_accumulation_steps", "training.per_device_train_batch_size"
        asked = [f"tiers.{key}" for key in _FREE if getattr(self.config.tiers, key) != "auto"]
        settings = chain.from_iterable(combinations(asked, count + 1) for count in range(len(asked)))
        batches: list[list[dict[str, Any]]] = [
            [{micro_batches: count} for count in range(1, training.gradient_accumulation_steps)],
            [{rows: count} for count in range(1, training.per_device_train_batch_size)],
            [
                {micro_batches: 1, rows: 1, "data.max_length": length}
                for length in (*range(64, max_length, 64), max_length)
            ],
        ]
        tried: list[list[dict[str, Any]]] = [[dict.fromkeys(keys, "auto")] for keys in settings]
        for rising in batches:
            tried.append(rising)
            if asked:
                tried.append([{**dict.fromkeys(asked, "auto"), **changes} for changes in rising])
        for rising in tried:
            count = bisect.bisect_left(rising, True, key=lambda changes: not any(self._changed(changes)._possible()))
            if count:
                before = self._settings(rising[count - 1])
                return {key: value for key, value in rising[count - 1].items() if value != before[key]}
        return None

    def _settings(self, keys: Iterable[str]) -> dict[str, Any]:
        """Present values of ``section.key``."""
        return {
            key: getattr(getattr(self.config, section), name)
            for key in keys
            for section, _, name in [key.partition(".")]
        }

    def _changed(self, changes: dict[str, Any]) -> _Planner:
        """The planner of a configuration with ``section.key`` changed; what a schedule needs stays known."""
        config = self.config
        for key, value in changes.items():
            section, _, name = key.partition(".")
            changed = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: changed})
        return replace(self, config=config, seen={})

    def _disk_problem(self, plan: Plan) -> str | None:
        """Store and checkpoints add up where they share a disk; a run that is complete writes nothing."""
        if self._is_complete:
            return None
        output_dir, limits = self.config.training.output_dir, self._limits
        store_dir = self.config.tiers.nvme_dir or f"{output_dir}/store"
        checkpoints = plan.disk_bytes - plan.store_bytes
        fewer = self._new_checkpoints(keep=1) * plan.checkpoint_bytes
        store = f"the store in {store_dir} needs {_size(plan.store_bytes)}"
        writes = (
            f"new checkpoints in {output_dir} need {_size(checkpoints)} ({plan.checkpoints} of "
            f"{_size(plan.checkpoint_bytes)}, the one being written included)"
        )
        if "output_disk" in limits:
            return _no_room(store, plan.store_bytes, plan.store_bytes, limits["disk"], "tiers.nvme_dir") or _no_room(
                writes, checkpoints, fewer, limits["output_disk"], "training.output_dir"
            )
        keys = "tiers.nvme_dir or training.output_dir"
        return _no_room(f"{store}, {writes}", plan.disk_bytes, plan.store_bytes + fewer, limits["disk"], keys)


def _no_room(what: str, needed: int, least: int, free: int, keys: str) -> str | None:
    """The problem, if there is one; ``least`` is needed when one checkpoint is kept."""
    if needed <= free:
        return None
    helps = (
        f"set training.save_total_limit: 1, with which it takes {_size(least)}"
        if least <= free
        else f"free {_size(needed - free)} there, or set {keys} to a larger disk"
    )
    return f"no space on disk: {what}; {_size(free)} are free: {helps}"


def _room(nbytes: float) -> str:
    """Rounded up, as a configuration and other commands take it."""
    return f"{math.ceil(nbytes / MIB)}MiB"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 28 else f"{nbytes / MIB:.1f} MiB"
