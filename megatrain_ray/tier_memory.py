"""Bytes that each tier needs for a step of a given shape (pure: no torch, no ray).

Private memory of a process is what it has before it holds a tensor, measured, and what it holds at most. The object
store's part is read off the schedule itself; the worker's off operators that were run without memory (`footprint`).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from megatrain_ray.config import Config
from megatrain_ray.layout import ITEMSIZE, LayerSpec, align_up
from megatrain_ray.packed import STATE
from megatrain_ray.schedule import StepShape, Value, build_flush, build_import, build_step
from megatrain_ray.timing import StepCost, heap_bytes

__all__ = ["MIB", "TierMemory", "Workload", "value_bytes"]

MIB = 1 << 20

STORE_BYTES, OPTIMIZER_BYTES, WORKER_BYTES = 64 * MIB, 183 * MIB, 292 * MIB
"""Measured: private memory of each actor's process before it holds any tensor (Python 3.11, torch 2.13, Ray 2.60)."""

RAY_CLIENT_BYTES = 28 * MIB
"""Measured: what starting Ray adds to the driver."""

RAY_BYTES, DASHBOARD_BYTES = 358 * MIB, 680 * MIB
"""Measured: Ray's own processes (raylet, control store, agents, log monitor, an idle worker), and the dashboard's."""

CUDA_BYTES = 600 * MIB
"""Device memory for context, kernels and workspaces, which is not in torch's own count; as much again on the host."""

STAGING_BLOCKS, STAGING_BLOCK_BYTES = 4, 8 * MIB
"""The store's aligned blocks: one for each transfer under way, none larger than what is transferred."""

PINNED_BYTES = 128 * MIB
"""The worker's pinned blocks, through which weights travel to a GPU."""

FREED_BYTES = 8 * MIB
"""Values that are freed, but not gone from the object store yet."""

JOURNAL_BYTES = len(STATE) * 4 * (1 << 18)
"""The optimizer's undo journal: one chunk."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step computes on.

    Attributes:
        tokens: Of one micro-batch, padding included.
        micro_batches: In one step.
        cost: Of one micro-batch, in each layer.
        driver_bytes: Private memory of the driver before Ray starts: libraries, tokens, tokenizer.
        evaluation: Of a batch of held-out data, of which only forward counts; None where there is none.
    """

    tokens: int
    micro_batches: int
    cost: StepCost
    driver_bytes: int
    evaluation: StepCost | None = None


def value_bytes(layers: tuple[LayerSpec, ...], compute_dtype: str, part_numel: int) -> Callable[[Value], int]:
    """Bytes of each value in the object store."""

    def bytes_of(value: Value) -> int:
        numel = layers[value.layer].numel
        if value.kind in ("state", "new_state", "master"):
            numel = min(numel - value.part * part_numel, part_numel)
        sections = len(STATE) if value.kind in ("state", "new_state", "snapshot") else 1
        return sections * numel * (ITEMSIZE[compute_dtype] if value.kind == "params" else 4)

    return bytes_of


@dataclass
class TierMemory:
    """What a step needs of each tier.

    Attributes:
        config: Of the run.
        layers: The stream.
        head_reads: Layers whose weights the head uses.
        compute_dtype: Of the weights on the device.
        workload: Of a step.
        on_cpu: The device is the host's own processor.
    """

    config: Config
    layers: tuple[LayerSpec, ...]
    head_reads: tuple[int, ...]
    compute_dtype: str
    workload: Workload
    on_cpu: bool

    def host(self, shape: StepShape, stores: Mapping[str, int], *, offload_inputs: bool) -> dict[str, dict[str, int]]:
        """Host memory by phase and tier; ``total_ram`` adds it up.

        Args:
            shape: Of the step.
            stores: What the object store needs in each phase, see `object_store`.
            offload_inputs: Layer inputs wait for backward in host memory.
        """
        computing, evaluating = (
            self.worker(shape, offload_inputs=offload_inputs, evaluating=each)[0] for each in (False, True)
        )
        workers = {"import": WORKER_BYTES + self._import_bytes(), "evaluation": evaluating}
        phases, object_store = {}, 0
        for name, needed in stores.items():
            importing = name == "import"
            object_store = max(object_store, needed)  # pages that it has touched stay with it
            tiers = {
                "driver": self.workload.driver_bytes + RAY_CLIENT_BYTES,
                "nvme_store": STORE_BYTES + self._staging if importing else self._store(shape),
                "cpu_optimizer": self._optimizer(shape, updates=not importing),
                "gpu_worker": workers.get(name, computing),
                "object_store": object_store,
                "ray": RAY_BYTES + (DASHBOARD_BYTES if self.config.ray.dashboard else 0),
            }
            phases[name] = {**tiers, "total_ram": sum(tiers.values())}
        return phases

    def object_store(self, shape: StepShape) -> dict[str, int]:
        """Most bytes of values at once, by phase."""
        bytes_of = value_bytes(self.layers, self.compute_dtype, shape.part_numel)
        carried = (
            [Value("grads", index) for index in shape.trainable if index not in shape.spilled_grads]
            if shape.deferred
            else []
        )
        step = build_step(shape, pending=shape.deferred, save=self._saves_in_steps).peak_bytes(bytes_of, carried)
        flush = build_flush(shape, pending=shape.deferred, save=True).peak_bytes(bytes_of, carried)
        peaks = {"import": self._import_peak, "step": step}
        if self.workload.evaluation is not None:
            peaks["evaluation"] = build_step(shape, pending=False, train=False).peak_bytes(bytes_of)
        peaks["save"] = flush
        return {phase: peak + FREED_BYTES for phase, peak in peaks.items()}

    def certain(self, shape: StepShape) -> int:
        """The object store never needs less in a step: known without building its schedule."""
        waiting = [index for index in shape.trainable if shape.deferred and index not in shape.spilled_grads]
        retained = shape.trainable if shape.retain_params else ()
        return max(
            4 * sum(shape.numels[index] for index in waiting),
            ITEMSIZE[self.compute_dtype] * sum(shape.numels[index] for index in retained),
        )

    @property
    def _saves_in_steps(self) -> bool:
        """Whether a checkpoint is written beside a step; the last one is not."""
        training = self.config.training
        every, steps = training.save_steps, training.max_steps
        return every is not None and (steps is None or every < steps)

    @cached_property
    def _import_peak(self) -> int:
        """The same wherever layers go."""
        shape = StepShape(tuple(spec.numel for spec in self.layers), self.head_reads)
        return build_import(shape).peak_bytes(value_bytes(self.layers, self.compute_dtype, shape.part_numel))

    def _store(self, shape: StepShape) -> int:
        return STORE_BYTES + self._staging + self.read_buffers(shape)

    def read_buffers(self, shape: StepShape) -> int:
        """Those of one layer more than are fetched ahead, of state in at most two parts; others are used again."""
        part = 4 * shape.part_numel
        parts = max((min(len(shape.parts(layer)), 2) for layer in shape.paged), default=0)
        state = parts * len(STATE) * min(self._largest(shape.paged), part)
        masters = parts * min(self._largest(shape.paged), part) if shape.cast else self._largest(shape.paged)
        again = 0 if shape.retain_params else masters
        return (max(shape.prefetch_depth, 1) + 1) * max(state + self._largest(shape.spilled_grads), again)

    @property
    def _staging(self) -> int:
        return STAGING_BLOCKS * min(self._largest(range(len(self.layers))), STAGING_BLOCK_BYTES)

    def _optimizer(self, shape: StepShape, *, updates: bool) -> int:
        """The arena (header, journal, state), and buffers for a paged layer's new state and for cast weights."""
        header = align_up((2 + len(self.layers)) * 8, mmap.PAGESIZE)
        resident = sum(self.layers[index].section_bytes("float32") for index in shape.resident)
        arena = header + JOURNAL_BYTES + len(STATE) * resident
        buffers = len(STATE) * min(self._largest(shape.paged), 4 * shape.part_numel)
        if shape.cast:
            buffers += self._largest(shape.trainable) // 4 * ITEMSIZE[self.compute_dtype]
        else:
            buffers += self._largest(layer for layer in shape.paged if len(shape.parts(layer)) > 1)
        return OPTIMIZER_BYTES + arena + (buffers if updates else 0)

    def worker(self, shape: StepShape, *, offload_inputs: bool, evaluating: bool = False) -> tuple[int, int | None]:
        """(host bytes, device bytes or None where the device is the host), in a step or in an evaluation."""
        kept = range(0) if evaluating else self._kept(shape)
        work, inputs, arriving = (self._evaluation_bytes, 0, 0) if evaluating else self._step_bytes(shape)
        if self.on_cpu:
            return WORKER_BYTES + inputs + work, None
        itemsize = ITEMSIZE[self.compute_dtype]
        ends = sum(self.layers[index].numel for index in (shape.embed, shape.head))
        decoder = self._largest(range(1, shape.head)) // 4
        slots = itemsize * (decoder * (max(shape.prefetch_depth, 1) + 1 + len(kept)) + ends)
        # One gradient leaves while the one before is taken.
        leaving = sorted(self.layers[index].section_bytes("float32") for index in range(len(self.layers)))[-2:]
        staging = PINNED_BYTES + sum(leaving)
        on_device = arriving if offload_inputs else inputs
        host = WORKER_BYTES + CUDA_BYTES + staging + (inputs if offload_inputs else 0)
        return host, CUDA_BYTES + slots + work + on_device

    def _step_bytes(self, shape: StepShape) -> tuple[int, int, int]:
        """What the worker computes with, layer inputs that wait for backward, and those of them on their way back."""
        cost, micro_batches = self.workload.cost, self.workload.micro_batches
        allocated = self._allocated
        hidden = allocated(cost.hidden_bytes) * micro_batches
        kept = self._kept(shape)
        inputs = cost.hidden_bytes * micro_batches * (len(self.layers) - 2 - len(kept))  # memory of their own
        # Of equal layers one gradient is summed while the one before leaves; buffers are used again.
        sums = allocated(self._largest(range(1, shape.head))) * min(2, shape.head - 1)
        outer = [allocated(self.layers[index].section_bytes("float32")) for index in (shape.embed, shape.head)]
        # A GPU's allocator gives the head's buffer to the embedding, unless they are one.
        sums += sum(outer) if self.on_cpu or shape.embed in self.head_reads else max(outer)
        graphs = micro_batches * sum(cost.layers[index].graph_bytes for index in kept)
        working = max(max(layer.forward_bytes, layer.backward_bytes) for layer in cost.layers)
        # What left the last layer, and the gradient that goes back.
        work = sums + graphs + working + 2 * hidden + cost.prologue_bytes * micro_batches
        return work, inputs, 2 * hidden

    @cached_property
    def _evaluation_bytes(self) -> int:
        """Forward of one batch: nothing waits for a backward but what entered the first layer."""
        cost = self.workload.evaluation
        if cost is None:
            return 0
        # The C library's heap keeps what attention has freed when the MLP's buffers come: nearly what a graph keeps.
        kept = max(layer.graph_bytes for layer in cost.layers) if self.on_cpu else 0
        working = max(kept, *(layer.forward_bytes for layer in cost.layers))
        return working + 2 * self._allocated(cost.hidden_bytes) + cost.prologue_bytes

    @property
    def _allocated(self) -> Callable[[int], int]:
        """What a buffer of so many bytes takes."""
        return heap_bytes if self.on_cpu else int

    def _import_bytes(self) -> int:
        """One layer as it is read, in fp32; a resumed run reads moments too."""
        largest = self._largest(range(len(self.layers)))
        return largest if self.config.model.init == "random" else 2 * largest

    def store_files(self, shape: StepShape) -> int:
        """Layers in RAM: masters as imported. Paged ones: with clipping one file a layer and a few spare ones."""
        size = {index: self.layers[index].section_bytes("float32") for index in shape.trainable}
        paged = [len(STATE) * size[index] for index in sorted(shape.paged)]
        if shape.deferred:
            # A write goes to a spare file before the one that it replaces is spare, and as many layers as are fetched
            # ahead are written beside it.
            count = shape.prefetch_depth + 1
            spare = max((sum(paged[start : start + count]) for start in range(len(paged))), default=0)
        else:
            spare = sum(paged) + max(paged, default=0)
        return (
            sum(size[index] for index in shape.resident)
            + sum(paged)
            + spare
            + sum(size[index] for index in shape.spilled_grads)
        )

    def _largest(self, indices: Iterable[int]) -> int:
        """Bytes of the largest fp32 section."""
        return max((self.layers[index].section_bytes("float32") for index in indices), default=0)

    def _kept(self, shape: StepShape) -> range:
        return range(shape.head - shape.keep_graph, shape.head)
