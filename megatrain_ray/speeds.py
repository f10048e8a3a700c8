"""Measures how fast this machine's tiers are, in a few seconds, and remembers it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
import xxhash
from transformers import LlamaConfig

from megatrain_ray import __version__
from megatrain_ray.actors.cpu_optimizer import AdamWConfig, CpuOptimizer, Hyper, arena_bytes
from megatrain_ray.direct_io import BLOCK_BYTES, TRANSFERS, BlockFile, DirectPolicy, aligned_empty
from megatrain_ray.errors import MegatrainError
from megatrain_ray.footprint import measure_cost
from megatrain_ray.layout import pack_layer
from megatrain_ray.machine import Speeds, existing_parent, openmp_environment
from megatrain_ray.model import MicroBatchTensors, StreamModel
from megatrain_ray.packed import GRADS, MASTER, PackedLayer
from megatrain_ray.tensors import bind
from megatrain_ray.timing import LayerCost

__all__ = ["known_speeds", "measure_speeds", "remember_call"]

DISK_BYTES = 256 << 20
"""Of the file, and of what is checked: far more than a processor's caches hold, as in a step."""
ROUNDS, LEAST_S = 5, 1.0
"""Work is repeated so often and so long: a step meets the machine's quiet moments and the others."""
DEADLINE_S = 600.0
"""For all measurements together, which take 20 s where nothing is stuck."""


def known_speeds(store_dir: Path, device: str) -> Speeds | None:
    """What an earlier `measure_speeds` has found on this machine, disk and device; None if nothing."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Speeds(**json.loads(_cache_path(store_dir, device).read_text(encoding="utf-8")))
    return None


def measure_speeds(store_dir: Path, device: str) -> Speeds:
    """Measures in a process that is like an actor's, and remembers for `known_speeds` unless something is missing.

    Args:
        store_dir: Where the store will be; a file of 256 MiB is written there, or in the nearest parent that exists.
        device: ``cpu`` or ``cuda:N``.

    Returns:
        What was found; assumptions, which ``source`` names, where the disk cannot be measured.

    Raises:
        MegatrainError: The process ended without a result, with the last line that it wrote; or not in time.
    """
    directory = existing_parent(store_dir)
    what = f"measuring the speeds of {device} and of the disk of {directory}"
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__, str(directory), device],
            env={**os.environ, **openmp_environment(len(os.sched_getaffinity(0)))},
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise MegatrainError(f"{what} did not end in {DEADLINE_S:g} s: is the disk or the device stuck?") from error
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise MegatrainError(f"{what} failed: {reason}")
    measured = json.loads(process.stdout.splitlines()[-1])
    known = known_speeds(store_dir, device) or Speeds()
    speeds = Speeds(**measured, call_s=known.call_s)  # what runs have measured stays
    if "disk_read_bytes_per_s" in measured:  # else the next plan tries again
        _remember(store_dir, device, speeds)
    return speeds


def _measure(directory: Path, device: str) -> dict[str, float | str | None]:
    """The fields of `Speeds` that can be measured without a run; without the disk's where that fails."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(cores // 2, 1))
    adamw, memcpy = _adamw(max(cores // 2, 1)), _memcpy()
    if device == "cpu":
        torch.set_num_threads(cores)
    float32, operator_s = _layer_speeds("float32", device, memcpy)
    bfloat16, _ = _layer_speeds("bfloat16", device, memcpy)
    source = f"measured on {date.today().isoformat()}"
    disk = {}
    try:
        disk["disk_read_bytes_per_s"], disk["disk_write_bytes_per_s"] = _disk(directory)
    except OSError as error:  # no room, or not ours to write: the run itself will say so
        assumed = Speeds().disk_read_bytes_per_s / 1e9
        source += f", but for the disk: {error.strerror}; {assumed:g} GB/s assumed"
    return {
        **disk,
        "checksum_bytes_per_s": _checksum(),
        "memcpy_bytes_per_s": memcpy,
        "adamw_numel_per_s": adamw,
        "float32_flops_per_s": float32,
        "bfloat16_flops_per_s": bfloat16,
        "link_bytes_per_s": None if device == "cpu" else _link(device),
        "operator_s": operator_s,
        "source": source,
    }


def remember_call(store_dir: Path, device: str, call_s: float) -> None:
    """Adds what only a run can measure, where this machine has been measured."""
    known = known_speeds(store_dir, device)
    if known is not None:
        _remember(store_dir, device, replace(known, call_s=call_s))


def _remember(store_dir: Path, device: str, speeds: Speeds) -> None:
    path = _cache_path(store_dir, device)
    with contextlib.suppress(OSError):  # a home that cannot be written: the next plan measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(speeds), indent=2), encoding="utf-8")


def _cache_path(store_dir: Path, device: str) -> Path:
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    drive = existing_parent(store_dir).stat().st_dev
    # A version that measures more, or in another way, does not take what an older one has left.
    measures = (__version__, *(field.name for field in fields(Speeds)))
    facts = (platform.node(), len(os.sched_getaffinity(0)), name, drive, torch.__version__, *measures)
    key = hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "megatrain_ray" / f"machine-{key}.json"


def _typical(work: Callable[[], object]) -> float:
    """Seconds of the middle round."""
    seconds: list[float] = []
    while len(seconds) < ROUNDS or sum(seconds) < LEAST_S:
        started_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def _disk(directory: Path) -> tuple[float, float]:
    """Bytes a second of reading and writing, as the store does it: direct, several blocks at a time."""
    block = aligned_empty(BLOCK_BYTES)
    block[:] = np.arange(BLOCK_BYTES, dtype=np.uint8)
    offsets = range(0, DISK_BYTES, BLOCK_BYTES)
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix=".speed-") as folder,
        ThreadPoolExecutor(TRANSFERS) as pool,
    ):
        path, policy = Path(folder) / "file", DirectPolicy(True)

        def write() -> None:
            with BlockFile(path, write=True, policy=policy) as file:
                list(pool.map(lambda offset: file.write_from(block.data, offset), offsets))

        def read() -> None:
            with BlockFile(path, write=False, policy=policy) as file:
                list(pool.map(lambda offset: file.read_into(aligned_empty(BLOCK_BYTES).data, offset), offsets))

        write()
        return DISK_BYTES / _typical(read), DISK_BYTES / _typical(write)


def _checksum() -> float:
    """Bytes a second of checking blocks, by as many threads as the store's."""
    data = np.ones(DISK_BYTES, np.uint8).data
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, DISK_BYTES, BLOCK_BYTES)]
    with ThreadPoolExecutor(TRANSFERS) as pool:
        return DISK_BYTES / _typical(lambda: list(pool.map(xxhash.xxh3_64_digest, blocks)))


def _memcpy() -> float:
    """Bytes a second into memory that was touched before, with a few threads, as Ray copies into its object store."""
    source, target = torch.ones(128 << 20, dtype=torch.uint8), torch.ones(128 << 20, dtype=torch.uint8)
    return source.nbytes / _typical(lambda: target.copy_(source))


def _adamw(threads: int, numel: int = 1 << 23) -> float:
    """Parameters a second, by the optimizer itself."""
    spec = pack_layer(0, "embed", [("weight", (numel // 4096, 4096))])
    descriptor = os.memfd_create("speed")
    try:
        os.ftruncate(descriptor, arena_bytes((spec,), (0,)))
        optimizer = CpuOptimizer(
            (spec,), AdamWConfig((0.9, 0.999), 1e-8, 0.01), compute_dtype="float32", resident=(0,),
            arena_path=f"/proc/self/fd/{descriptor}", num_threads=threads,
        )  # fmt: skip
        data = np.ones(numel, np.float32).view(np.uint8)
        optimizer.keep(0, PackedLayer(0, 0, "float32", MASTER, data))
        steps = itertools.count(1)

        def update() -> None:
            step = next(steps)
            optimizer.update(0, Hyper(step, 1e-4, 0.5), PackedLayer(0, step, "float32", GRADS, data))

        update()
        return numel / _typical(update)
    finally:
        os.close(descriptor)


def _layer_speeds(dtype: str, device: str, memcpy_bytes_per_s: float) -> tuple[float, float]:
    """Operations a second of the matrix products in a decoder layer, and what calling an operator costs.

    Two layers of the same operators tell the two apart: what the larger one takes longer is its arithmetic.
    """
    if device != "cpu":  # operators are launched while others run: a large layer hides them, a tiny one is nothing else
        cost, seconds = _layer(dtype, device, 4096, 4096)
        tiny, tiny_s = _layer(dtype, device, 64, 4)
        return cost.backward_flops / seconds, tiny_s / tiny.backward_calls
    # Processors without a bfloat16 unit are very slow at it.
    sizes = ((768, 512), (256, 256)) if dtype == "float32" else ((256, 256), (128, 64))
    large, small = (_layer(dtype, device, width, tokens) for width, tokens in sizes)
    large_s, small_s = (seconds - cost.backward_moved / memcpy_bytes_per_s for cost, seconds in (large, small))
    flops = large[0].backward_flops - small[0].backward_flops
    flops_per_s = flops / max(large_s - small_s, 0.5 * large_s)
    calls_s = small_s - small[0].backward_flops / flops_per_s
    return flops_per_s, max(calls_s, 0.0) / small[0].backward_calls


def _layer(dtype: str, device: str, width: int, tokens: int) -> tuple[LayerCost, float]:
    """What a decoder layer costs on a row of ``tokens``, and the seconds that its recompute and backward take."""
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=width, intermediate_size=width * 8 // 3, vocab_size=64,
        num_attention_heads=max(width // 128, 1), num_key_value_heads=max(width // 128, 1),
    )  # fmt: skip
    model = StreamModel.from_config(config, dtype=dtype, device=device)
    cost = measure_cost(
        model,
        lambda wanted, _: StreamModel.from_config(config, dtype=wanted),
        dtype, rows=1, row_tokens=tokens, chunk_tokens=tokens, on_cpu=True,
    )  # fmt: skip
    empty = [torch.zeros(spec.numel, dtype=model.dtype, device=device) for spec in model.layers]
    params = [bind(spec, flat) for spec, flat in zip(model.layers, empty, strict=True)]
    ids = torch.zeros((1, tokens), dtype=torch.int64, device=device)
    prologue = model.prologue(params[0], MicroBatchTensors(ids))
    # Zero weights cost as much as others; a gradient that is not denormal keeps the processor at full speed.
    grad = torch.ones_like(prologue.hidden)

    def compute() -> None:
        with torch.no_grad():
            model.layer_backward(1, params[1], prologue.hidden, prologue, grad, lambda name, gradient: None)
        if device != "cpu":
            torch.cuda.synchronize(device)

    compute()
    return cost.layers[1], _typical(compute)


def _link(device: str) -> float:
    p_host = torch.ones(256 << 20, dtype=torch.uint8, pin_memory=True)
    p_device = p_host.to(device)

    def copy() -> None:
        p_device.copy_(p_host, non_blocking=True)
        torch.cuda.synchronize(device)

    copy()
    return p_host.nbytes / _typical(copy)


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), sys.argv[2])))
