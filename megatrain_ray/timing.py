"""How long a step takes: the same list of actions that runs, on a machine's bandwidths (pure: no torch, no ray)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatrain_ray.layout import ITEMSIZE, LayerSpec
from megatrain_ray.machine import Speeds
from megatrain_ray.packed import STATE
from megatrain_ray.schedule import Action, Op, Schedule, Simulation, StepShape, Tier, build_step

__all__ = ["LayerCost", "StepCost", "StepTime", "Timing", "heap_bytes", "nvme_bytes"]

FASTER = 10.0
"""The bottleneck is what would shorten the step most if it were this much faster."""


HEAP_LIMIT_BYTES = 32 << 20
HEAP_FACTOR = 1.4
"""glibc takes buffers below its largest mmap threshold from a heap that keeps what is freed; measured on the worker."""


def heap_bytes(nbytes: int) -> int:
    """What a buffer of the C library's allocator costs in the long run."""
    return int(nbytes * HEAP_FACTOR) if nbytes < HEAP_LIMIT_BYTES else nbytes


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer on one micro-batch, without its weights, its input and the gradient of its output.

    Attributes:
        forward_bytes: Most memory during forward without a graph; the output is part of it.
        graph_bytes: What the graph keeps from forward to backward.
        backward_bytes: Most memory during recompute and backward, gradients of the weights included.
        forward_flops, backward_flops: Of matrix products and attention; backward includes the recompute.
        forward_moved, backward_moved: Bytes that all other operators write, one pass over memory each.
        forward_calls, backward_calls: Operators.
    """

    forward_bytes: int
    graph_bytes: int
    backward_bytes: int
    forward_flops: int
    backward_flops: int
    forward_moved: int = 0
    backward_moved: int = 0
    forward_calls: int = 0
    backward_calls: int = 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one micro-batch costs.

    Attributes:
        layers: In stream order: embed, decoder layers, head (memory of one chunk of logits, operations of all).
        hidden_bytes: One hidden state, [B, S, H].
        prologue_bytes: Masks and rotary tables, which every layer uses.
    """

    layers: tuple[LayerCost, ...]
    hidden_bytes: int
    prologue_bytes: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step.

    Attributes:
        step_s: Its seconds.
        save_step_s: Of a step that also writes a checkpoint.
        busy_s: Seconds that each tier works in it.
        nvme_read_bytes, nvme_write_bytes: That the store moves in it.
        bottleneck: ``disk``, ``checksum``, ``compute``, ``optimizer``, ``memory`` or ``link``.
        explanation: For people: what bounds the step, and what would move it.
    """

    step_s: float
    save_step_s: float
    busy_s: dict[str, float]
    nvme_read_bytes: int
    nvme_write_bytes: int
    bottleneck: str
    explanation: str

    def to_json(self) -> dict[str, Any]:
        """For plan.json."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Timing:
    """What durations depend on.

    Attributes:
        layers: The stream.
        cost: Of a micro-batch.
        micro_batches: In a step.
        compute_dtype: Of the weights on the device.
        on_cpu: The device is the host's own processor: nothing is copied to it, and the tiers share its cores.
        speeds: Of the machine.
    """

    layers: tuple[LayerSpec, ...]
    cost: StepCost
    micro_batches: int
    compute_dtype: str
    on_cpu: bool
    speeds: Speeds

    def step_s(self, shape: StepShape, *, save: bool = False) -> float:
        """Seconds of one step in the middle of a run."""
        return self._seconds(build_step(shape, pending=shape.deferred, save=save), shape)

    def predict(self, shape: StepShape) -> StepTime:
        """The step, and what bounds it."""
        schedule = build_step(shape, pending=shape.deferred)
        simulation = schedule.simulate(self.duration(shape))
        step_s = self._bounded(simulation, shape)
        faster_s = {
            name: replace(self, speeds=self.speeds.faster(name, FASTER))._seconds(schedule, shape)
            for name in self.speeds.resources
        }
        bottleneck = min(faster_s, key=faster_s.__getitem__)
        read_bytes, write_bytes = nvme_bytes(schedule, shape)
        gain = step_s / faster_s[bottleneck] if faster_s[bottleneck] else 1.0
        return StepTime(
            step_s=step_s,
            save_step_s=self.step_s(shape, save=True),
            busy_s={str(tier): simulation.busy_s(tier) for tier in Tier},
            nvme_read_bytes=read_bytes,
            nvme_write_bytes=write_bytes,
            bottleneck=bottleneck,
            explanation=self.speeds.describe(bottleneck, FASTER, self.compute_dtype)
            + f" makes the step {gain:.1f}x faster",
        )

    def _seconds(self, schedule: Schedule, shape: StepShape) -> float:
        return self._bounded(schedule.simulate(self.duration(shape)), shape)

    def _bounded(self, simulation: Simulation, shape: StepShape) -> float:
        if not self.on_cpu:
            return simulation.step_s
        # The worker's threads wait for each other in every operator, so whatever takes one of their cores, be it an
        # update, a checksum or a call's work in driver and Ray, holds all of them up: on a CPU all work adds up, and
        # only the drive's own time passes beside it.
        cores_only = replace(self.speeds.faster("disk", math.inf), call_s=self.speeds.call_cpu_s)
        return max(simulation.step_s, sum(map(replace(self, speeds=cores_only).duration(shape), simulation.schedule)))

    def duration(self, shape: StepShape) -> Callable[[Action], float]:
        """Seconds of one action on its tier."""
        speeds, itemsize = self.speeds, ITEMSIZE[self.compute_dtype]
        flops_per_s = speeds.flops_per_s(self.compute_dtype)
        kept = range(shape.head - shape.keep_graph, shape.head)

        def copy_s(nbytes: float) -> float:
            return nbytes / speeds.memcpy_bytes_per_s

        def checksum_s(nbytes: float) -> float:  # beside no transfer: a thread checks each block that it has moved
            return nbytes / speeds.checksum_bytes_per_s

        def read_s(nbytes: float) -> float:  # into a buffer, checked, then into the object store
            return nbytes / speeds.disk_read_bytes_per_s + checksum_s(nbytes) + copy_s(nbytes)

        def write_s(nbytes: float) -> float:  # through aligned blocks
            return nbytes / speeds.disk_write_bytes_per_s + checksum_s(nbytes)

        def link_s(nbytes: float) -> float:
            return 0.0 if self.on_cpu or speeds.link_bytes_per_s is None else nbytes / speeds.link_bytes_per_s

        def kernels_s(flops: int, moved: int, calls: int) -> float:
            launches_s = calls * speeds.operator_s
            if self.on_cpu:  # one after the other
                return flops / flops_per_s + copy_s(moved) + launches_s
            # A GPU's rate is that of whole layers; operators are launched while earlier ones run.
            return max(flops / flops_per_s, launches_s)

        def compute_s(action: Action) -> float:
            cost = self.cost.layers[action.layer]
            op, numel = action.op, shape.numels[action.layer]
            forward_s = kernels_s(cost.forward_flops, cost.forward_moved, cost.forward_calls)
            if op in (Op.FORWARD, Op.EVALUATE):
                # The copy of the next layer's weights runs beside the kernels.
                return max(self.micro_batches * forward_s, link_s(numel * itemsize))
            backward_s = kernels_s(cost.backward_flops, cost.backward_moved, cost.backward_calls)
            backward_s -= forward_s if action.layer in kept else 0.0
            # Summing each micro-batch's gradient in fp32, then its norm: passes over memory, on the device.
            passes = (2 * self.micro_batches + 1) * 4 * numel
            sums_s = copy_s(passes) / 2 if self.on_cpu else 0.0
            loads = 0 if action.layer in kept else numel * itemsize
            return max(self.micro_batches * backward_s + sums_s, link_s(loads + 4 * numel))

        def seconds(action: Action) -> float:
            numel = _moved_numel(action, shape)
            state = 4 * len(STATE) * numel
            update_s = numel / speeds.adamw_numel_per_s
            emit_s = copy_s(numel * itemsize) * (2 if shape.cast else 1)
            match action.op:
                case Op.READ:
                    work = read_s(state)
                case Op.READ_MASTER | Op.READ_GRADS:
                    work = read_s(4 * numel)
                case Op.WRITE:
                    work = write_s(state)
                case Op.SAVE:
                    work = write_s(state) + (0.0 if action.reads else read_s(state))
                case Op.WRITE_GRADS:
                    work = write_s(4 * numel)
                case Op.UPDATE:
                    work = update_s
                case Op.UPDATE_EMIT:
                    work = update_s + emit_s
                case Op.UPDATE_PAGED:  # a chunk is copied and updated in cache; the new state is copied out
                    work = update_s + copy_s(state)
                case Op.UPDATE_PAGED_EMIT:
                    work = update_s + copy_s(state) + emit_s
                case Op.PARAMS | Op.CAST:
                    work = emit_s
                case Op.SNAPSHOT | Op.KEEP:
                    work = copy_s(state)
                case Op.GRADS:
                    work = copy_s(4 * numel)
                case Op.FORWARD | Op.HEAD | Op.EVALUATE | Op.BACKWARD:
                    work = compute_s(action)
                case Op.IMPORT:
                    work = copy_s(4 * numel)
                case Op.BEGIN | Op.LOAD:
                    work = 0.0
            return work + speeds.call_s

        return seconds


def _moved_numel(action: Action, shape: StepShape) -> int:
    """Elements of the layer that an action works on: all, or a part."""
    numel = shape.numels[action.layer]
    in_parts = action.op in (Op.READ, Op.WRITE, Op.UPDATE_PAGED, Op.UPDATE_PAGED_EMIT, Op.CAST, Op.IMPORT, Op.KEEP)
    if in_parts or (action.op is Op.READ_MASTER and shape.cast):
        return min(numel - action.part * shape.part_numel, shape.part_numel)
    return numel


def nvme_bytes(schedule: Schedule, shape: StepShape) -> tuple[int, int]:
    """Bytes that the store reads and writes in a schedule, checkpoints included."""
    sections = {
        Op.READ: (len(STATE), 0),
        Op.READ_MASTER: (1, 0),
        Op.READ_GRADS: (1, 0),
        Op.WRITE: (0, len(STATE)),
        Op.SAVE: (0, len(STATE)),
        Op.WRITE_GRADS: (0, 1),
    }
    read = write = 0
    for action in schedule:
        reads, writes = sections.get(action.op, (0, 0))
        from_file = action.op is Op.SAVE and not action.reads
        size = 4 * _moved_numel(action, shape)
        read, write = read + (len(STATE) if from_file else reads) * size, write + writes * size
    return read, write
