"""The plan against bytes and seconds computed by hand, on data alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatrain_ray import planner, tier_memory
from megatrain_ray.config import Config
from megatrain_ray.errors import ConfigError, MegatrainError, PlanError
from megatrain_ray.layout import LayerSpec, pack_layer
from megatrain_ray.machine import Machine, Speeds, probe
from megatrain_ray.machine_file import load_machine
from megatrain_ray.observe.plan_table import print_plan
from megatrain_ray.planner import NEW_RUN, Plan, Progress, make_plan
from megatrain_ray.schedule import Op, StepShape, build_step
from megatrain_ray.speeds import measure_speeds
from megatrain_ray.tier_memory import MIB, TierMemory, Workload
from megatrain_ray.timing import HEAP_LIMIT_BYTES, LayerCost, StepCost, Timing, heap_bytes, nvme_bytes

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30

EMBED, LAYER, HEAD, DEPTH = 4 * MIB, 3 * MIB, 5 * MIB, 6  # elements
HIDDEN, GRAPH, WORKING, HEAD_WORKING = 40 * MIB, 300 * MIB, 400 * MIB, 500 * MIB  # bytes, above the heap's limit


def stream(depth: int = DEPTH) -> tuple[LayerSpec, ...]:
    """Embed, decoder layers, head; sizes that need no padding."""
    names = ["embed", *(f"layer-{index:04d}" for index in range(depth)), "head"]
    numels = [EMBED, *[LAYER] * depth, HEAD]
    return tuple(
        pack_layer(index, name, [(f"{name}.weight", (numel // 1024, 1024))])
        for index, (name, numel) in enumerate(zip(names, numels, strict=True))
    )


COST = StepCost(
    layers=(
        LayerCost(HIDDEN, 0, 50 * MIB, 0, 0),
        *[LayerCost(80 * MIB, GRAPH, WORKING, 10**9, 3 * 10**9)] * DEPTH,
        LayerCost(100 * MIB, 0, HEAD_WORKING, 2 * 10**9, 6 * 10**9),
    ),
    hidden_bytes=HIDDEN,
    prologue_bytes=2 * MIB,
)
MACHINE = Machine(
    host_memory_bytes=100 * GIB,
    host_memory_source="the test",
    shared_memory_bytes=50 * GIB,
    disk_free_bytes=100 * GIB,
    cores=4,
    device_memory_bytes=None,
    speeds=Speeds(),
)


def workload_of(cost: StepCost, evaluation: StepCost | None = None) -> Callable[[Config], Workload]:
    """``cost`` is that of 8 rows of 1,024 tokens; fewer or shorter ones, held-out ones too, cost less in proportion."""

    def scaled(cost: StepCost, share: float) -> StepCost:
        layers = tuple(
            dataclasses.replace(
                layer, forward_bytes=int(layer.forward_bytes * share), graph_bytes=int(layer.graph_bytes * share),
                backward_bytes=int(layer.backward_bytes * share),
            )
            for layer in cost.layers
        )  # fmt: skip
        return StepCost(layers, int(cost.hidden_bytes * share), int(cost.prologue_bytes * share))

    def workload(config: Config) -> Workload:
        rows, tokens = config.training.per_device_train_batch_size, min(config.data.max_length, 1024)
        share = rows * tokens / (8 * 1024)
        return Workload(
            rows * tokens, config.training.gradient_accumulation_steps, scaled(cost, share), 300 * MIB,
            None if evaluation is None else scaled(evaluation, share),
        )  # fmt: skip

    return workload


def configuration(micro_batches: int = 2, **changes: Any) -> Config:
    """Keyword arguments are ``section__key``."""
    values: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": "m", "init": "random"},
        "data": {"path": "d"},
        "training": {"output_dir": "o", "gradient_accumulation_steps": micro_batches, "per_device_train_batch_size": 8},
        "tiers": {"recompute": "all", "prefetch_depth": 1},
        "ray": {"dashboard": False},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values[section][name] = value
    return Config.from_mapping(values)


def plan(
    machine: Machine = MACHINE,
    *,
    dtype: str = "float32",
    micro_batches: int = 2,
    depth: int = DEPTH,
    progress: Progress = NEW_RUN,
    evaluation: StepCost | None = None,
    **changes: Any,
) -> Plan:
    """A plan of the stream; keyword arguments as those of `configuration`."""
    first, decoder, *_, last = COST.layers
    cost = dataclasses.replace(COST, layers=(first, *[decoder] * depth, last))
    return make_plan(
        configuration(micro_batches, **changes),
        stream(depth),
        (depth + 1,),
        compute_dtype=dtype,
        chunk_tokens=64,
        workload=workload_of(cost, evaluation),
        machine=machine,
        progress=progress,
    )


def with_ram(nbytes: int) -> Machine:
    return dataclasses.replace(MACHINE, host_memory_bytes=int(nbytes / planner.SPARE_SHARE) + 1)


TOTAL = EMBED + DEPTH * LAYER + HEAD


def test_in_ram_every_tier_is_the_sum_of_what_it_holds() -> None:
    peak = plan().peak_bytes
    header = 4096  # version words and journal header: one page
    assert peak["cpu_optimizer"] == tier_memory.OPTIMIZER_BYTES + header + 3 * MIB + 12 * TOTAL
    assert peak["nvme"] == 4 * TOTAL  # masters as imported
    inputs = DEPTH * 2 * HIDDEN
    gradients = heap_bytes(4 * LAYER) * 2 + heap_bytes(4 * EMBED) + heap_bytes(4 * HEAD)
    leaving = 2 * 2 * HIDDEN
    assert peak["gpu_worker"] == tier_memory.WORKER_BYTES + inputs + gradients + HEAD_WORKING + leaving + 2 * 2 * MIB
    assert peak["nvme_store"] == tier_memory.STORE_BYTES + 4 * 8 * MIB
    assert peak["driver"] == 300 * MIB + tier_memory.RAY_CLIENT_BYTES
    # At the end of forward: all weights, no gradient any more; or the reverse. One layer's snapshot goes with it.
    assert 4 * TOTAL <= peak["object_store"] <= 4 * TOTAL + 2 * 12 * HEAD + 2 * 4 * HEAD + tier_memory.FREED_BYTES
    tiers = ("driver", "nvme_store", "cpu_optimizer", "gpu_worker", "object_store", "ray")
    assert peak["total_ram"] == sum(peak[tier] for tier in tiers)


def test_small_buffers_come_from_a_heap_that_keeps_holes() -> None:
    assert heap_bytes(10 * MIB) == 14 * MIB
    assert heap_bytes(HEAP_LIMIT_BYTES) == HEAP_LIMIT_BYTES


def test_paged_layers_have_one_file_and_a_few_spare_ones_or_two_without_clipping() -> None:
    clipped = plan(tiers__placement="nvme")
    assert clipped.shape.resident == ()
    spilled = 4 * sum(stream()[index].numel for index in clipped.shape.spilled_grads)
    assert clipped.store_bytes == 12 * TOTAL + 12 * (HEAD + LAYER) + spilled
    assert plan(tiers__placement="nvme", training__max_grad_norm=0).store_bytes == 2 * 12 * TOTAL + 12 * HEAD
    assert clipped.peak_bytes["nvme_store"] <= tier_memory.STORE_BYTES + 4 * 8 * MIB + 2 * 12 * HEAD
    assert clipped.peak_bytes["cpu_optimizer"] == tier_memory.OPTIMIZER_BYTES + 4096 + 3 * MIB + 12 * HEAD


def test_as_few_layers_are_paged_as_must_be_and_small_ones_first() -> None:
    depth = 40
    needed = plan(depth=depth).peak_bytes["total_ram"]
    counts = []
    for less in (0, 200 * MIB, 400 * MIB, 800 * MIB):
        made = plan(with_ram(needed - less), depth=depth)
        counts.append(len(made.shape.paged))
        assert made.peak_bytes["total_ram"] <= made.limits["total_ram"]
        assert made.shape.paged == set(range(depth, depth - len(made.shape.paged), -1))
    assert counts[0] == 0 < counts[1] < counts[2] < counts[3] < depth, counts


def smallest(**changes: Any) -> Machine:
    """With as much memory as a refusal asks for."""
    with pytest.raises(PlanError) as refused:
        plan(with_ram(512 * MIB), **changes)
    asked = re.search(r"give it (\d+)MiB of memory", str(refused.value))
    assert asked
    return dataclasses.replace(MACHINE, host_memory_bytes=int(asked[1]) * MIB)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"needs .* GiB of memory \(.*\) and may use 0\.50 GiB \(the test\)"):
        plan(with_ram(512 * MIB))
    full = plan()
    room = full.disk_bytes - full.checkpoint_bytes
    with pytest.raises(PlanError, match="save_total_limit: 1"):
        plan(dataclasses.replace(MACHINE, disk_free_bytes=room))
    with pytest.raises(PlanError, match=r"free .* there"):
        plan(dataclasses.replace(MACHINE, disk_free_bytes=GIB // 4))
    with pytest.raises(PlanError, match=r"needs .* of /dev/shm, which has 64\.0 MiB.*enlarge /dev/shm to \d+MiB"):
        plan(dataclasses.replace(MACHINE, shared_memory_bytes=64 * MIB))


DEVICE = dataclasses.replace(MACHINE, device_memory_bytes=3 * GIB, speeds=Speeds(link_bytes_per_s=20e9))
ONES = r"training\.gradient_accumulation_steps: 1, training\.per_device_train_batch_size: 1"
REFUSED: dict[str, tuple[Machine, dict[str, Any], str]] = {
    "micro-batches": (with_ram(4000 * MIB), {"micro_batches": 8}, r"training\.gradient_accumulation_steps: [2-7]\b"),
    "rows": (with_ram(2300 * MIB), {}, r"training\.per_device_train_batch_size: [2-7]\b"),
    "length": (with_ram(1850 * MIB), {}, rf"{ONES}, data\.max_length: \d+"),
    "placement": (with_ram(2960 * MIB), {"tiers__placement": "ram"}, r"tiers\.placement: auto"),
    "prefetch depth": (
        with_ram(3000 * MIB),
        {"tiers__placement": "nvme", "tiers__prefetch_depth": 6},
        r"tiers\.prefetch_depth: auto",
    ),
    "recompute": (with_ram(4000 * MIB), {"tiers__recompute": 0}, r"tiers\.recompute: auto"),
    "object store": (MACHINE, {"tiers__object_store_memory": "40MiB"}, r"tiers\.object_store_memory: auto"),
    "two settings": (
        with_ram(3000 * MIB),
        {"tiers__placement": "ram", "tiers__recompute": 0},
        r"tiers\.placement: auto, tiers\.recompute: auto",
    ),
    "settings and micro-batches": (
        with_ram(3000 * MIB),
        {"tiers__placement": "ram", "tiers__recompute": 0, "micro_batches": 8},
        r"tiers\.placement: auto, tiers\.prefetch_depth: auto, tiers\.recompute: auto, "
        r"training\.gradient_accumulation_steps: 2",
    ),
    "graphs on a device": (DEVICE, {"tiers__recompute": 0, "dtype": "bfloat16"}, r"tiers\.recompute: auto"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_refusal_advises_has_a_plan(name: str) -> None:
    machine, changes, advice = REFUSED[name]
    with pytest.raises(PlanError, match=f"set ({advice})(,|$)") as refused:
        plan(machine, **changes)
    told = str(refused.value)
    changed = dict(changes)
    for key, value in re.findall(r"(?:tiers|training|data)\.(\w+): (\w+)", told):
        name = {"gradient_accumulation_steps": "micro_batches", "max_length": "data__max_length"}.get(key)
        section = "training" if key.startswith("per_device") else "tiers"
        changed[name or f"{section}__{key}"] = int(value) if value.isdigit() else value
    plan(machine, **changed)
    for size in re.findall(r"give it (\d+)MiB of memory", told):
        plan(dataclasses.replace(machine, host_memory_bytes=int(size) * MIB), **changes)


def test_fewer_micro_batches_are_as_many_as_fit() -> None:
    machine = smallest(micro_batches=5)
    plan(machine, micro_batches=5)
    with pytest.raises(PlanError, match=r"set training\.gradient_accumulation_steps: 5,"):
        plan(machine, micro_batches=8)


def test_a_small_dev_shm_moves_weights_and_gradients_to_the_store() -> None:
    wide = plan(depth=40)
    assert not wide.shape.paged
    small = dataclasses.replace(MACHINE, shared_memory_bytes=wide.object_store_bytes // 2)
    made = plan(small, depth=40)
    assert made.shape.paged
    assert made.object_store_bytes <= small.shared_memory_bytes
    with pytest.raises(PlanError, match=r"/dev/shm.*set tiers\.placement: auto, or enlarge /dev/shm"):
        plan(small, depth=40, tiers__placement="ram")


def test_nothing_is_fetched_ahead_where_only_that_fits() -> None:
    machine = smallest(depth=40, tiers__prefetch_depth="auto")
    assert plan(machine, depth=40, tiers__prefetch_depth="auto").shape.prefetch_depth == 0
    with pytest.raises(PlanError, match=r"set tiers\.prefetch_depth: auto,"):
        plan(machine, depth=40, tiers__prefetch_depth=1)


@pytest.mark.parametrize("key", ["host_memory", "device_memory"])
def test_a_limit_above_what_the_machine_has_is_the_machine_s(key: str) -> None:
    machine = gpu(80 * GIB)
    name = {"host_memory": "total_ram", "device_memory": "device"}[key]
    limits = [
        plan(machine, dtype="bfloat16", **{f"tiers__{key}": asked}).limits[name]
        for asked in ("auto", "500GiB", "50GiB")
    ]
    assert limits[0] == limits[1] > limits[2] == 50 * GIB
    with pytest.raises(PlanError, match=r"may use 0\.90 GiB \(the test\)"):
        plan(dataclasses.replace(MACHINE, host_memory_bytes=GIB), tiers__host_memory="500GiB")
    with pytest.raises(PlanError, match=r"\(tiers\.host_memory\): .*raise tiers\.host_memory to \d+MiB"):
        plan(tiers__host_memory="512MiB")


def disks(free: int, output_free: int | None = None) -> Machine:
    return dataclasses.replace(MACHINE, disk_free_bytes=free, output_free_bytes=output_free)


@pytest.mark.parametrize(
    ("progress", "new"),
    [
        (Progress(), 3),
        (Progress(50, 1000, 1), 2),
        (Progress(500, 1000, 2), 1),
        (Progress(500, 1000, 5), 1),  # fewer are kept now: the others go after the next one
        (Progress(30, 100, 1), 2),
        (Progress(50, 100, 1), 1),
        (Progress(0, 40), 1),
        (Progress(100, 100, 2), 0),
    ],
)
def test_checkpoints_that_are_there_take_no_space_again(progress: Progress, new: int) -> None:
    checkpoint = 12 * TOTAL
    made = plan(progress=progress, training__save_steps=50, training__save_total_limit=2)
    needed = made.store_bytes + new * checkpoint
    assert made.disk_bytes == needed
    plan(disks(needed), progress=progress, training__save_steps=50)
    if new:
        with pytest.raises(PlanError, match="no space on disk"):
            plan(disks(needed - 1), progress=progress, training__save_steps=50)
    else:
        plan(disks(0), progress=progress, training__save_steps=50)


def test_store_and_checkpoints_on_disks_of_their_own() -> None:
    made = plan()
    checkpoints = made.disk_bytes - made.store_bytes
    both = plan(disks(made.store_bytes, checkpoints))
    assert (both.limits["disk"], both.limits["output_disk"]) == (made.store_bytes, checkpoints)
    keys = {"tiers__nvme_dir": "/small/store", "training__output_dir": "/large/run", "training__save_total_limit": 1}
    with pytest.raises(PlanError, match=r"the store in /small/store needs .*set tiers\.nvme_dir to a larger disk"):
        plan(disks(made.store_bytes - 1, 100 * GIB), **keys)
    with pytest.raises(PlanError, match=r"checkpoints in /large/run need .*\(2 of .*set training\.output_dir to a"):
        plan(disks(100 * GIB, 2 * made.checkpoint_bytes - 1), **keys)
    with pytest.raises(PlanError, match=r"set training\.save_total_limit: 1, with which it takes 0\.63 GiB"):
        plan(disks(100 * GIB, checkpoints - 1))


def gpu(nbytes: int) -> Machine:
    return dataclasses.replace(MACHINE, device_memory_bytes=nbytes, speeds=Speeds(link_bytes_per_s=20e9))


def test_device_memory_and_where_layer_inputs_wait() -> None:
    roomy = plan(gpu(80 * GIB), dtype="bfloat16")
    slots = 2 * (2 * LAYER + EMBED + HEAD)
    gradients = 4 * (2 * LAYER + max(EMBED, HEAD))
    work = gradients + HEAD_WORKING + 2 * 2 * HIDDEN + 2 * 2 * MIB
    assert roomy.peak_bytes["device"] == tier_memory.CUDA_BYTES + slots + work + DEPTH * 2 * HIDDEN
    assert not roomy.offload_inputs
    tight = plan(gpu(roomy.peak_bytes["device"] - MIB), dtype="bfloat16")
    assert tight.offload_inputs
    assert tight.peak_bytes["device"] == roomy.peak_bytes["device"] - (DEPTH - 2) * 2 * HIDDEN  # two are on their way
    assert tight.peak_bytes["gpu_worker"] == roomy.peak_bytes["gpu_worker"] + DEPTH * 2 * HIDDEN
    with pytest.raises(PlanError, match=r"the device needs .* and may use .*: set training"):
        plan(gpu(tight.peak_bytes["device"] - MIB), dtype="bfloat16")


LONG = dataclasses.replace(
    COST,
    layers=(*COST.layers[:-1], LayerCost(9 * GIB, 0, 99 * GIB, 10**9, 10**9)),
    hidden_bytes=GIB,
)
"""Of long held-out rows; gradients that nobody takes would be larger still."""


def test_held_out_rows_may_be_longer_than_those_of_a_step() -> None:
    without, like_a_step, long = plan(), plan(evaluation=COST), plan(evaluation=LONG)
    assert "evaluation" not in without.phases
    assert like_a_step.peak_bytes == without.peak_bytes
    evaluating = 9 * GIB + 2 * GIB + 2 * MIB
    assert long.peak_bytes["gpu_worker"] == tier_memory.WORKER_BYTES + evaluating
    assert long.phases["evaluation"]["gpu_worker"] == long.peak_bytes["gpu_worker"]
    assert {name: long.phases[name] for name in without.phases} == without.phases
    assert long.peak_bytes["total_ram"] > without.peak_bytes["total_ram"] + 9 * GIB
    bytes_of = tier_memory.value_bytes(stream(), "float32", long.shape.part_numel)
    forward_only = build_step(long.shape, pending=False, train=False).peak_bytes(bytes_of)
    assert forward_only <= long.phases["evaluation"]["object_store"] <= long.peak_bytes["object_store"]
    with pytest.raises(PlanError, match=r"set training\.per_device_train_batch_size: 6,"):
        plan(with_ram(10 * GIB), evaluation=LONG)
    slots = 2 * (2 * LAYER + EMBED + HEAD)
    on_device = plan(gpu(80 * GIB), dtype="bfloat16", evaluation=LONG).peak_bytes["device"]
    assert on_device == tier_memory.CUDA_BYTES + slots + evaluating


def test_the_last_layers_keep_their_graph_when_memory_allows_and_it_helps() -> None:
    assert plan().shape.keep_graph == 0
    assert plan(tiers__recompute="auto").shape.keep_graph == DEPTH
    assert plan(tiers__recompute=4).shape.keep_graph == DEPTH - 4
    base = plan()
    # Room for two graphs of each of two micro-batches; each layer that keeps its graph needs no saved input.
    room = base.peak_bytes["total_ram"] + 2 * 2 * (GRAPH - HIDDEN)
    assert plan(with_ram(room), tiers__recompute="auto").shape.keep_graph in (1, 2)
    idle = dataclasses.replace(MACHINE, speeds=Speeds(float32_flops_per_s=1e18, disk_write_bytes_per_s=1e7))
    assert plan(idle, tiers__recompute="auto", tiers__placement="nvme").shape.keep_graph == 0


def test_gradients_go_to_the_store_only_when_memory_does_not_hold_them() -> None:
    assert not plan(depth=40, tiers__placement="nvme").shape.spilled_grads
    roomy = plan(depth=40, tiers__placement="nvme").peak_bytes["total_ram"]
    tight = plan(with_ram(roomy - 250 * MIB), depth=40, tiers__placement="nvme")
    assert tight.shape.spilled_grads or not tight.shape.retain_params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deferred", [True, False])
def test_no_schedule_needs_less_of_the_object_store_than_is_certain(deferred: bool, dtype: str) -> None:
    workload = Workload(8 * 1024, 2, COST, 300 * MIB)
    memory = TierMemory(configuration(), stream(), (DEPTH + 1,), dtype, workload, on_cpu=True)
    numels = tuple(spec.numel for spec in stream())
    for num_paged, retain, spill, keep_graph in itertools.product((0, 3, len(numels)), (True, False), (0, 1), (0, 2)):
        if not deferred and (spill or not retain):
            continue
        paged = frozenset(range(num_paged))
        shape = StepShape(
            numels, (DEPTH + 1,), paged=paged, spilled_grads=paged if spill else frozenset(), deferred=deferred,
            retain_params=retain, keep_graph=keep_graph, cast=dtype != "float32",
        )  # fmt: skip
        assert memory.certain(shape) <= memory.object_store(shape)["step"]
        weights = (4 if dtype == "float32" else 2) * TOTAL if retain else 0
        gradients = 4 * (TOTAL - sum(numels[index] for index in shape.spilled_grads)) if deferred else 0
        assert memory.certain(shape) == max(weights, gradients)


def timing(speeds: Speeds, **changes: Any) -> Timing:
    values = {
        "layers": stream(), "cost": COST, "micro_batches": 2, "compute_dtype": "float32", "on_cpu": True,
        "speeds": speeds, **changes,
    }  # fmt: skip
    return Timing(**values)


ENDLESS = Speeds(
    disk_read_bytes_per_s=1e18, disk_write_bytes_per_s=1e18, checksum_bytes_per_s=1e18, memcpy_bytes_per_s=1e18,
    adamw_numel_per_s=1e18, float32_flops_per_s=1e18, bfloat16_flops_per_s=1e18, call_s=0.0, call_cpu_s=0.0,
)  # fmt: skip
NUMELS = tuple(spec.numel for spec in stream())


def test_with_endless_tiers_a_step_is_its_arithmetic() -> None:
    speeds = dataclasses.replace(ENDLESS, float32_flops_per_s=1e9)
    shape = StepShape(NUMELS, (DEPTH + 1,))
    step = timing(speeds).predict(shape)
    assert step.step_s == pytest.approx(2 * (DEPTH * (1 + 3) + 6), rel=1e-3)
    assert step.bottleneck == "compute"
    kept = dataclasses.replace(shape, keep_graph=DEPTH)
    assert timing(speeds).step_s(kept) == pytest.approx(2 * (DEPTH * (1 + 2) + 6), rel=1e-3)


def test_on_a_cpu_the_work_of_all_tiers_adds_up() -> None:
    """Worker and optimizer share the cores, and so do driver and Ray with each call; a GPU is waited for by none."""
    speeds = dataclasses.replace(ENDLESS, float32_flops_per_s=1e9, adamw_numel_per_s=1e6, call_cpu_s=0.25)
    shape = StepShape(NUMELS, (DEPTH + 1,))
    compute_s, update_s = 2 * (DEPTH * (1 + 3) + 6), TOTAL / 1e6
    calls = len(build_step(shape, pending=True))
    assert timing(speeds).step_s(shape) == pytest.approx(compute_s + update_s + 0.25 * calls, rel=1e-3)
    assert timing(speeds, on_cpu=False).step_s(shape) < compute_s + update_s


def test_a_step_from_disk_takes_what_the_disk_takes() -> None:
    shape = StepShape(NUMELS, (DEPTH + 1,), paged=frozenset(range(DEPTH + 2)))
    schedule = build_step(shape, pending=True)
    assert nvme_bytes(schedule, shape) == (12 * TOTAL, 12 * TOTAL)
    spilled = dataclasses.replace(shape, spilled_grads=shape.paged, retain_params=False)
    again = sum(4 * stream()[action.layer].numel for action in build_step(spilled, pending=True)
                if action.op is Op.READ_MASTER)  # fmt: skip
    assert nvme_bytes(build_step(spilled, pending=True), spilled) == (16 * TOTAL + again, 16 * TOTAL)
    speeds = dataclasses.replace(
        ENDLESS, disk_read_bytes_per_s=1e8, disk_write_bytes_per_s=2e8, checksum_bytes_per_s=1e10
    )
    step = timing(speeds).predict(shape)
    # Reads and writes take turns on one drive.
    checks_s = 2 * 12 * TOTAL / 10e9
    assert step.step_s == pytest.approx(12 * TOTAL / 1e8 + 12 * TOTAL / 2e8 + checks_s, rel=0.01)
    assert step.bottleneck == "disk"
    assert step.explanation.startswith("NVMe bounds the step: 1 instead of 0.1 GB/s makes the step 8.9x")


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_step_from_disk_is_checked_at_the_speed_of_the_checksums(on_cpu: bool) -> None:
    """Each transfer thread moves a block, then checks it: neither hides the other."""
    shape = StepShape(NUMELS, (DEPTH + 1,), paged=frozenset(range(DEPTH + 2)))
    speeds = dataclasses.replace(
        ENDLESS, disk_read_bytes_per_s=1e9, disk_write_bytes_per_s=1e9, checksum_bytes_per_s=1e8
    )
    step = timing(speeds, on_cpu=on_cpu).predict(shape)
    assert step.step_s == pytest.approx(2 * 12 * TOTAL / 1e8 + 2 * 12 * TOTAL / 1e9, rel=0.01)
    assert step.bottleneck == "checksum"
    assert step.explanation.startswith("checksums bound the step: 1 instead of 0.1 GB/s makes the step 5.5x")


def test_wear_of_the_drive() -> None:
    machine = dataclasses.replace(MACHINE, drive_endurance_bytes=10**15)
    made = plan(machine, tiers__placement="nvme", training__save_steps=None)
    assert made.time is not None and made.drive_life_years is not None
    assert made.write_bytes_per_day == pytest.approx(made.time.nvme_write_bytes * 86400 / made.time.step_s)
    assert made.drive_life_years == pytest.approx(10**15 / made.write_bytes_per_day / 365)
    saving = plan(machine, training__save_steps=10)  # in RAM, checkpoints are all that is written
    assert saving.time is not None
    a_step = saving.time.step_s + (saving.time.save_step_s - saving.time.step_s) / 10
    assert saving.write_bytes_per_day == pytest.approx(12 * TOTAL / 10 * 86400 / a_step)


def test_the_plan_is_json() -> None:
    facts = json.loads(json.dumps(plan(tiers__placement="nvme").to_json()))
    assert facts["placement"] == ["nvme"] * (DEPTH + 2)
    assert set(facts["phases"]) == {"import", "step", "save", "export"}
    assert facts["phases"]["export"]["driver"] == facts["phases"]["step"]["driver"] + 4 * HEAD
    assert facts["step"]["bottleneck"] in ("compute", "disk", "checksum", "optimizer", "memory")


def test_an_export_of_the_live_run_that_memory_does_not_hold_is_told() -> None:
    def shown(made: Plan) -> str:
        console = Console(record=True, width=200)
        print_plan(made, stream(), console)
        return console.export_text()

    made = plan()
    exporting = made.phases["export"]["total_ram"]
    assert exporting > made.peak_bytes["total_ram"]
    for room, told in ((exporting + 2, False), (exporting - 2, True)):
        limits = {**made.limits, "total_ram": int(room * planner.SPARE_SHARE)}
        assert ("save_pretrained of the live run" in shown(dataclasses.replace(made, limits=limits))) is told


# --- machines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "ray_configs" / "machines").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_machines_load(path: Path) -> None:
    machine = load_machine(path)
    assert machine.device_memory_bytes and machine.speeds.link_bytes_per_s and machine.drive_endurance_bytes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("colour: red", r"bad.yaml:14: unknown key colour"),
        ("cores: many", r"bad.yaml:14: cores: expected a number; got 'many'"),
        ("host_memory: 0", r"bad.yaml:14: host_memory: expected a size above 0, such as 8GiB; got 0"),
        ("adamw: -1", r"bad.yaml:14: adamw: .*greater than 0; got -1"),
    ],
)
def test_a_bad_machine_file_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    good = (ROOT / "ray_configs" / "machines" / "h100-512gb.yaml").read_text().splitlines()[1:]
    key = line.partition(":")[0]
    lines = [each for each in good if not each.startswith(f"{key}:")]
    path = tmp_path / "bad.yaml"
    path.write_text("\n".join([*lines[:13], *["#"] * (13 - len(lines)), line, *lines[13:]]))
    with pytest.raises(ConfigError, match=message):
        load_machine(path)
    path.write_text("name: x\n")
    with pytest.raises(ConfigError, match="cores is missing"):
        load_machine(path)


def test_a_control_group_limits_the_run(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/container\n")
    (group / "memory.max").write_text(str(768 * MIB))
    (group / "memory.current").write_text(str(600 * MIB))
    (group / "memory.stat").write_text(f"inactive_file {400 * MIB}\n")
    machine = probe(tmp_path, tmp_path, "cpu", root=tmp_path)
    assert machine.host_memory_bytes == 568 * MIB
    with pytest.raises(PlanError, match=rf"may use {0.9 * 568 / 1024:.2f} GiB \(cgroup limit of 0\.8 GiB\)"):
        plan(machine)
    (group / "memory.max").write_text("max")
    assert probe(tmp_path, tmp_path, "cpu", root=tmp_path).host_memory_source == "available memory of the host"


def test_measuring_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_ray.speeds.DEADLINE_S", 0.05)
    store_dir = tmp_path / "run" / "store"
    with pytest.raises(MegatrainError, match=rf"disk of {tmp_path} did not end in 0.05 s"):
        measure_speeds(store_dir, "cpu")
    assert not store_dir.exists()
