"""Each tier beside its raw limit: disk, object store, link, memory, arithmetic."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from megatrain_ray.actors.cpu_optimizer import AdamWConfig, CpuOptimizer, Hyper, arena_bytes
from megatrain_ray.actors.device import CudaDevice
from megatrain_ray.actors.nvme_store import NvmeStore
from megatrain_ray.direct_io import BLOCK_BYTES, TRANSFERS, BlockFile, DirectPolicy, aligned_empty
from megatrain_ray.layout import pack_layer
from megatrain_ray.packed import GRADS, MASTER, PARAMS, STATE, PackedLayer

__all__ = ["Comparison", "bench_link", "bench_object_store", "bench_tiers", "matmul_flops_per_s"]

UPDATE_BYTES = 28
"""Least traffic of AdamW a parameter: gradient, master and moments are read, the last three written, all fp32."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two medians of one run.

    Attributes:
        what: Of what.
        ours: Median.
        peer: Median of what it is compared with; None where there is nothing to compare with.
        unit: Of both.
        against: What the peer is, or why there is none.
    """

    what: str
    ours: float
    peer: float | None
    unit: str
    against: str

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.ours / self.peer

    def to_json(self) -> dict[str, Any]:
        """With the ratio."""
        return {**asdict(self), "ratio": self.ratio}


def bench_tiers(directory: Path, *, tell: Callable[[str], None]) -> list[Comparison]:
    """The store beside raw direct I/O; AdamW beside torch's and beside a copy in memory."""
    return [*_bench_store(directory, tell), *_bench_optimizer(tell)]


def _bench_store(directory: Path, tell: Callable[[str], None], rounds: int = 5) -> list[Comparison]:
    spec = pack_layer(0, "embed", [("weight", (4096, 4096))])
    nbytes = len(STATE) * spec.section_bytes("float32")
    plain = aligned_empty(nbytes)
    data = aligned_empty(nbytes + 64)[64:]  # as aligned as what lies in the object store
    plain[:] = data[:] = 7
    store = NvmeStore(directory, (spec,), output_dir=directory, generations=1, pool_bytes=nbytes)
    policy = DirectPolicy(True)
    blocks = [(plain[start : start + BLOCK_BYTES].data, start) for start in range(0, nbytes, BLOCK_BYTES)]
    speeds: dict[str, list[float]] = {"write": [], "read": [], "raw write": [], "raw read": []}

    def raw(write: bool) -> None:
        with (
            BlockFile(directory / "raw", write=write, policy=policy) as file,
            ThreadPoolExecutor(TRANSFERS) as pool,
        ):
            list(pool.map(file.write_from if write else file.read_into, *zip(*blocks, strict=True)))

    async def measure() -> None:
        for step in range(rounds + 2):  # the first two make the files: a run writes into them again and again
            actions: dict[str, Any] = {
                "write": lambda step=step: store.write(0, PackedLayer(0, step, "float32", STATE, data)),
                "raw write": lambda: asyncio.to_thread(raw, True),
                "read": lambda: store.read(0),
                "raw read": lambda: asyncio.to_thread(raw, False),
            }
            for name, action in actions.items():
                started_s = time.perf_counter()
                await action()
                if step > 1:
                    speeds[name].append(nbytes / (time.perf_counter() - started_s) / 1e9)
            tell(f"store: round {step}")

    asyncio.run(measure())
    median = {name: statistics.median(values) for name, values in speeds.items()}
    return [
        Comparison(
            f"store {kind}",
            median[kind],
            median[f"raw {kind}"],
            "GB/s",
            f"plain direct I/O, {TRANSFERS} blocks of 8 MiB under way",
        )
        for kind in ("write", "read")
    ]


def _bench_optimizer(tell: Callable[[str], None], numel: int = 1 << 24, rounds: int = 5) -> list[Comparison]:
    spec = pack_layer(0, "embed", [("weight", (numel // 4096, 4096))])
    descriptor = os.memfd_create("bench")
    os.ftruncate(descriptor, arena_bytes((spec,), (0,)))
    threads = max(torch.get_num_threads() // 2, 1)  # as in a run on the CPU, whose worker needs the others
    optimizer = CpuOptimizer(
        (spec,),
        AdamWConfig((0.9, 0.999), 1e-8, 0.01),
        compute_dtype="float32",
        resident=(0,),
        arena_path=f"/proc/self/fd/{descriptor}",
        num_threads=threads,
    )
    values = torch.randn(numel)
    data = values.view(torch.uint8).numpy()
    optimizer.keep(0, PackedLayer(0, 0, "float32", MASTER, data))
    torch.set_num_threads(threads)
    param = values.clone().requires_grad_()
    param.grad = values.clone()
    peer = torch.optim.AdamW([param], fused=True)
    copy = torch.empty_like(values)
    ours, theirs, copied = [], [], []
    for step in range(1, rounds + 2):
        started_s = time.perf_counter()
        optimizer.update(0, Hyper(step, 1e-4, 0.5), PackedLayer(0, step, "float32", GRADS, data))
        middle_s = time.perf_counter()
        peer.step()
        after_s = time.perf_counter()
        copy.copy_(values)
        if step > 1:
            ours.append(numel / (middle_s - started_s) / 1e9)
            theirs.append(numel / (after_s - middle_s) / 1e9)
            copied.append(2 * values.nbytes / (time.perf_counter() - after_s) / 1e9)
    os.close(descriptor)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tell("optimizer: measured")
    speed = statistics.median(ours)
    threads_note = f"{threads} thread{'s' if threads > 1 else ''}"
    return [
        Comparison(
            "AdamW with undo journal", speed, statistics.median(theirs), "G params/s",
            f"torch.optim.AdamW(fused=True), {threads_note}",
        ),
        Comparison(
            "AdamW, least memory traffic", UPDATE_BYTES * speed, statistics.median(copied), "GB/s",
            f"a copy in memory, read and written, {threads_note}",
        ),
    ]  # fmt: skip


def bench_object_store(rounds: int, nbytes: int = 32 << 20) -> Comparison:
    """Values into the object store, whose pages have been used before, as in every step but the first."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    ours, theirs = [], []
    for index in range(2 * rounds + 3):
        started_s = time.perf_counter()
        reference = ray.put(source)
        middle_s = time.perf_counter()
        np.copyto(target, source)
        ended_s = time.perf_counter()
        del reference
        time.sleep(0.1)  # until its memory is free
        if index > 2:
            ours.append(nbytes / (middle_s - started_s) / 1e9)
            theirs.append(nbytes / (ended_s - middle_s) / 1e9)
    return Comparison("into the object store", statistics.median(ours), statistics.median(theirs), "GB/s", "memcpy")


def bench_link(device: str, rounds: int, nbytes: int = 256 << 20) -> list[Comparison]:
    """Weights onto the device and a gradient off it, beside plain copies from and to pinned memory."""
    spec = pack_layer(1, "layer-0000", [("weight", (nbytes // 4096 // 4, 4096))])
    packed = PackedLayer(1, 0, "float32", PARAMS, np.ones(nbytes, np.uint8))
    tier = CudaDevice(device, num_slots=2)
    p_host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    p_device = p_host.to(device)

    def load() -> None:
        ticket = tier.load(packed)
        tier.weights(ticket)
        tier.release(ticket)

    actions: dict[str, Callable[[], object]] = {
        "host to device": load,
        "plain host to device": lambda: p_device.copy_(p_host, non_blocking=True),
        "device to host": lambda: tier.collect(tier.offload(tier.gradient(spec), spec)),
        "plain device to host": lambda: p_host.copy_(p_device, non_blocking=True),
    }
    speeds: dict[str, list[float]] = {name: [] for name in actions}
    for index in range(rounds + 1):
        for name, action in actions.items():
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            action()
            torch.cuda.synchronize()
            if index:
                speeds[name].append(nbytes / (time.perf_counter() - started_s) / 1e9)
    median = {name: statistics.median(values) for name, values in speeds.items()}
    return [
        Comparison(kind, median[kind], median[f"plain {kind}"], "GB/s", "a copy of pinned memory")
        for kind in ("host to device", "device to host")
    ]


def matmul_flops_per_s(rows: int, inner: int, columns: int, *, dtype: torch.dtype, device: str) -> float:
    """Of a product of [rows, inner] and [inner, columns], by itself, for at least a quarter of a second."""
    a = torch.ones(rows, inner, dtype=dtype, device=device)
    b = torch.ones(inner, columns, dtype=dtype, device=device)
    out = a @ b
    count, seconds = 1, 0.0
    while seconds < 0.25:
        count *= 2
        started_s = time.perf_counter()
        for _ in range(count):
            torch.mm(a, b, out=out)
        if device != "cpu":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started_s
    return count * 2 * rows * inner * columns / seconds
