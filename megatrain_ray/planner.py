"""What a run needs of each tier, and whether the machine has it (pure: no torch, no ray).

RAM first: masters and moments stay in memory as far as they fit, the last layers are paged through the store. What does
not fit at all is refused before anything is written, with the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatrain_ray.config import Config
from megatrain_ray.errors import PlanError
from megatrain_ray.layout import ITEMSIZE, LayerSpec
from megatrain_ray.machine import Machine
from megatrain_ray.packed import STATE
from megatrain_ray.schedule import StepShape, Value, build_step

__all__ = ["Plan", "Workload", "make_plan", "value_bytes"]

PROCESS_BYTES = {"driver": 600 << 20, "nvme_store": 350 << 20, "cpu_optimizer": 300 << 20, "gpu_worker": 450 << 20}
"""Measured: resident bytes of each process before it holds any tensor."""

RAY_BYTES = 700 << 20
"""Measured: Ray's own processes."""

LOGITS_BYTES = 256 << 20
"""What the logits of one chunk may take, their gradient and copies included."""

SPILL_SHARE = 0.8
"""Beyond this share of its object store Ray starts to spill objects to disk, long before it is full."""

SPARE_SHARE = 0.9
"""Share of the available memory that a plan may use."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step computes on.

    Attributes:
        row_tokens: Longest row.
        rows: In one micro-batch.
        micro_batches: In one step.
        hidden_size: Of the model.
        intermediate_size: Of the model's MLP.
        vocabulary_rows: Of the embedding.
    """

    row_tokens: int
    rows: int
    micro_batches: int
    hidden_size: int
    intermediate_size: int
    vocabulary_rows: int

    @property
    def micro_batch_tokens(self) -> int:
        return self.row_tokens * self.rows


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run uses the machine.

    Attributes:
        shape: For the schedule.
        resident: Layers whose masters and moments are in RAM.
        loss_chunk_tokens: Target tokens whose logits exist at once.
        worker_threads, optimizer_threads: Of each process.
        object_store_bytes: Size of Ray's object store.
        peak_bytes: Predicted, by tier; ``total_ram`` adds up what is in host memory.
        store_bytes: Files of the store.
        checkpoint_bytes: One checkpoint.
    """

    shape: StepShape
    resident: tuple[int, ...]
    loss_chunk_tokens: int
    worker_threads: int
    optimizer_threads: int
    object_store_bytes: int
    peak_bytes: dict[str, int]
    store_bytes: int
    checkpoint_bytes: int

    def to_json(self) -> dict[str, Any]:
        """For plan.json."""
        return {
            "placement": ["nvme" if layer in self.shape.paged else "ram" for layer in range(len(self.shape.numels))],
            "prefetch_depth": self.shape.prefetch_depth,
            "retain_params": self.shape.retain_params,
            "keep_graph": self.shape.keep_graph,
            "loss_chunk_tokens": self.loss_chunk_tokens,
            "threads": {"gpu_worker": self.worker_threads, "cpu_optimizer": self.optimizer_threads},
            "object_store_bytes": self.object_store_bytes,
            "peak_bytes": self.peak_bytes,
            "store_bytes": self.store_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
        }


def value_bytes(layers: tuple[LayerSpec, ...], compute_dtype: str) -> Callable[[Value], int]:
    """Bytes of each value in the object store."""

    def bytes_of(value: Value) -> int:
        numel = layers[value.layer].numel
        if value.kind in ("state", "new_state", "snapshot"):
            return len(STATE) * 4 * numel
        return numel * (ITEMSIZE[compute_dtype] if value.kind == "params" else 4)

    return bytes_of


def make_plan(
    config: Config,
    layers: tuple[LayerSpec, ...],
    head_reads: tuple[int, ...],
    *,
    compute_dtype: str,
    workload: Workload,
    machine: Machine,
) -> Plan:
    """Places everything.

    Raises:
        PlanError: It does not fit; the message says what is needed, what there is, and the smallest change that helps.
    """
    tiers = config.tiers
    limit = tiers.host_memory if tiers.host_memory != "auto" else int(machine.host_memory_bytes * SPARE_SHARE)
    source = "tiers.host_memory" if tiers.host_memory != "auto" else machine.host_memory_source
    trainable = [spec.index for spec in layers if spec.numel]
    state_bytes = {index: len(STATE) * layers[index].section_bytes("float32") for index in trainable}
    plans = []
    for paged_count in {"ram": [0], "nvme": [len(trainable)]}.get(tiers.placement, range(len(trainable) + 1)):
        paged = frozenset(trainable[len(trainable) - paged_count :])
        # Paging starts once keeping weights from forward to backward no longer fits.
        for retain in (True, False) if not paged_count or paged_count == len(trainable) else (False,):
            if not retain and not config.training.max_grad_norm:
                continue
            plan = _place(config, layers, head_reads, compute_dtype, workload, machine, paged, retain, state_bytes)
            plans.append(plan)
            if plan.peak_bytes["total_ram"] <= limit:
                _check(plan, config, machine)
                return plan
    best = min(plans, key=lambda plan: plan.peak_bytes["total_ram"])
    raise PlanError(
        f"the run needs {_gib(best.peak_bytes['total_ram'])} of memory and may use {_gib(limit)} ({source}): "
        + ", ".join(f"{name} {_gib(size)}" for name, size in best.peak_bytes.items() if name != "total_ram")
        + "; set tiers.placement: nvme, or lower per_device_train_batch_size or data.max_length"
    )


def _place(
    config: Config,
    layers: tuple[LayerSpec, ...],
    head_reads: tuple[int, ...],
    compute_dtype: str,
    workload: Workload,
    machine: Machine,
    paged: frozenset[int],
    retain: bool,
    state_bytes: dict[int, int],
) -> Plan:
    tiers, training = config.tiers, config.training
    deferred = bool(training.max_grad_norm)
    keep_graph = max(len(layers) - 2 - tiers.recompute, 0) if isinstance(tiers.recompute, int) else 0
    shape = StepShape(
        numels=tuple(spec.numel for spec in layers),
        head_reads=head_reads,
        paged=paged,
        spilled_grads=paged if deferred and not retain else frozenset(),
        prefetch_depth=tiers.prefetch_depth if tiers.prefetch_depth != "auto" else 1,
        deferred=deferred,
        retain_params=retain,
        keep_graph=keep_graph,
        cast=compute_dtype != "float32",
    )
    resident = tuple(index for index in state_bytes if index not in paged)
    schedule = build_step(shape, pending=deferred, save=True)
    carried = [Value("grads", index) for index in state_bytes if deferred and index not in shape.spilled_grads]
    object_store = schedule.peak_bytes(value_bytes(layers, compute_dtype), carried)
    fitting = min(max(LOGITS_BYTES // (16 * workload.vocabulary_rows), 64), 8192)
    chunk = fitting if tiers.loss_chunk_tokens == "auto" else tiers.loss_chunk_tokens
    worker = _worker_bytes(layers, head_reads, compute_dtype, workload, chunk, keep_graph)
    on_cpu = machine.device_memory_bytes is None
    peak = {
        "driver": PROCESS_BYTES["driver"],
        "nvme_store": PROCESS_BYTES["nvme_store"] + _store_buffers(layers),
        "cpu_optimizer": PROCESS_BYTES["cpu_optimizer"] + sum(state_bytes[index] for index in resident),
        "gpu_worker": PROCESS_BYTES["gpu_worker"] + (worker if on_cpu else 0),
        "object_store": object_store,
        "ray": RAY_BYTES,
    }
    peak["total_ram"] = sum(peak.values())
    if not on_cpu:
        peak["device"] = worker
    store_bytes = sum(state_bytes[index] * 2 for index in paged) + sum(state_bytes[index] // 3 for index in resident)
    wanted = tiers.object_store_memory
    return Plan(
        shape=shape,
        resident=resident,
        loss_chunk_tokens=chunk,
        worker_threads=machine.cores if on_cpu else max(machine.cores // 4, 1),
        optimizer_threads=max(machine.cores // 2, 1),
        object_store_bytes=wanted if wanted != "auto" else int(object_store / SPILL_SHARE) + (96 << 20),
        peak_bytes=peak,
        store_bytes=store_bytes,
        checkpoint_bytes=sum(state_bytes.values()),
    )


def _worker_bytes(
    layers: tuple[LayerSpec, ...],
    head_reads: tuple[int, ...],
    compute_dtype: str,
    workload: Workload,
    chunk: int,
    keep_graph: int,
) -> int:
    itemsize = ITEMSIZE[compute_dtype]
    decoder = [spec.numel for spec in layers[1:-1]]
    tokens = workload.micro_batch_tokens
    saved_inputs = tokens * workload.micro_batches * workload.hidden_size * itemsize * len(decoder)
    # One layer's graph: about 14 activations of the hidden size and 6 of the MLP's a token.
    graph = tokens * itemsize * (14 * workload.hidden_size + 6 * workload.intermediate_size)
    outer = sum(layers[index].numel for index in {0, *head_reads})
    gradients = 4 * (3 * max(decoder) + outer)
    logits = 4 * min(chunk, tokens) * workload.vocabulary_rows * 4
    return saved_inputs + graph * (1 + keep_graph * workload.micro_batches) + gradients + logits


def _store_buffers(layers: tuple[LayerSpec, ...]) -> int:
    return 2 * len(STATE) * max(spec.section_bytes("float32") for spec in layers)


def _check(plan: Plan, config: Config, machine: Machine) -> None:
    """Limits other than host memory."""
    object_store = plan.object_store_bytes
    if object_store < plan.peak_bytes["object_store"]:
        raise PlanError(
            f"tiers.object_store_memory is {_gib(object_store)}; the run needs {_gib(plan.peak_bytes['object_store'])}"
        )
    if object_store > machine.shared_memory_bytes:
        raise PlanError(
            f"the object store needs {_gib(object_store)} of /dev/shm, which has {_gib(machine.shared_memory_bytes)}: "
            "enlarge it (docker run --shm-size), or set tiers.placement: nvme"
        )
    copies = config.training.save_total_limit or 1
    disk = plan.store_bytes + (copies + 1) * plan.checkpoint_bytes
    if disk > machine.disk_free_bytes:
        raise PlanError(
            f"no space on disk: the store needs {_gib(plan.store_bytes)} and {copies + 1} checkpoints of "
            f"{_gib(plan.checkpoint_bytes)}, {_gib(machine.disk_free_bytes)} are free; set tiers.nvme_dir or "
            "training.output_dir to a larger disk, or lower save_total_limit"
        )
    device = machine.device_memory_bytes if config.tiers.device_memory == "auto" else config.tiers.device_memory
    needed = plan.peak_bytes.get("device", 0)
    if device is not None and needed > device:
        raise PlanError(
            f"the device needs {_gib(needed)} and has {_gib(device)}: lower per_device_train_batch_size or "
            "data.max_length"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 28 else f"{size / 2**20:.1f} MiB"
