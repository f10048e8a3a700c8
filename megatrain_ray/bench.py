"""Measures a step beside in-memory PyTorch, and each tier beside its raw limit, as ratios from one run.

Machines are shared and noisy: both sides of each ratio are measured in turn, and medians are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain_ray.config import Config
from megatrain_ray.data.batches import StepBatch
from megatrain_ray.direct_io import BLOCK_BYTES, BlockFile, DirectPolicy, aligned_empty
from megatrain_ray.layout import takes_weight_decay
from megatrain_ray.packed import STATE
from megatrain_ray.prepare import prepare_data
from megatrain_ray.trainer import Trainer

__all__ = ["Comparison", "bench_data", "bench_saving", "bench_step", "bench_tiers", "default_config"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two medians of one run.

    Attributes:
        what: Of what.
        ours: Median.
        peer: Median of what it is compared with.
        unit: Of both.
        against: What the peer is.
    """

    what: str
    ours: float
    peer: float
    unit: str
    against: str

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    def to_json(self) -> dict[str, Any]:
        """With the ratio."""
        return {**asdict(self), "ratio": self.ratio}


def default_config(directory: Path, *, placement: str = "auto", tokens: int = 512) -> Config:
    """A run of the 97M-parameter Llama (12 layers, hidden 768, 16,000 tokens, tied) on random tokens.

    Args:
        directory: Where model, data and output go.
        placement: Of masters and moments.
        tokens: In a step, as one row.
    """
    model = LlamaConfig(
        num_hidden_layers=12,
        hidden_size=768,
        intermediate_size=2048,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=16000,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    model.save_pretrained(directory / "model")
    generator = np.random.default_rng(0)
    with (directory / "data.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(8):
            file.write(json.dumps({"input_ids": generator.integers(3, 16000, tokens).tolist()}) + "\n")
    return Config.from_mapping(
        {
            "model": {"name_or_path": str(directory / "model"), "init": "random", "dtype": "float32"},
            "data": {"path": str(directory / "data.jsonl"), "max_length": tokens},
            "training": {
                "output_dir": str(directory / f"run-{placement}"),
                "max_steps": 10_000,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 1,
                "save_steps": None,
            },
            "tiers": {"placement": placement},
            "ray": {"dashboard": False},
        }
    )


class _Plain:
    """The same training in memory: transformers and torch.optim.AdamW, with gradient checkpointing or without."""

    def __init__(self, config: Config, device: str) -> None:
        self.device = device
        self.model: Any = AutoModelForCausalLM.from_config(
            LlamaConfig.from_pretrained(config.model.name_or_path), dtype=torch.float32
        ).to(device)
        self.model.train()
        training = config.training
        named = list(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for name, p in named if takes_weight_decay(name, tuple(p.shape)) is decays],
                 "weight_decay": training.weight_decay * decays}
                for decays in (True, False)
            ],
            lr=training.learning_rate,
            fused=True,
        )  # fmt: skip
        self.max_grad_norm = training.max_grad_norm or float("inf")

    def step(self, batch: StepBatch, *, checkpointing: bool) -> float:
        """Takes a step; returns its seconds."""
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        else:
            self.model.gradient_checkpointing_disable()
        started_s = time.perf_counter()
        for micro_batch in batch.micro_batches:
            ids = torch.from_numpy(micro_batch.input_ids).to(self.device)
            logits = self.model(input_ids=ids, use_cache=False).logits
            loss = nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
            )
            (loss / batch.target_tokens).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - started_s


def bench_step(config: Config, *, rounds: int, tell: Callable[[str], None]) -> list[Comparison]:
    """Steps through the actors and in memory, in turn; the worker's arithmetic, and copies between tiers.

    Args:
        config: Of the run; its model must be small enough for memory.
        rounds: Steps of each kind that count; one more warms up.
        tell: Called with progress.
    """
    with Trainer(config, overwrite=True) as trainer:
        device = trainer.device
        plain = _Plain(config, device)
        seconds: dict[str, list[float]] = {"ours": [], "checkpointing": [], "plain": []}
        rates: dict[str, list[float]] = {"worker": [], "matmul": []}
        steps = trainer.steps()
        for index in range(rounds + 1):
            record = next(steps)
            batch = trainer.step_batch(record["step"])
            measured = {
                "ours": record["step_time_s"],
                "checkpointing": plain.step(batch, checkpointing=True),
                "plain": plain.step(batch, checkpointing=False),
            }
            if index == 0:
                with FlopCounterMode(display=False) as counter:
                    plain.step(batch, checkpointing=False)
            else:
                for kind, value in measured.items():
                    seconds[kind].append(value)
                busy_s = record["step_time_s"] * (1 - record["device_idle_fraction"])
                rates["worker"].append(counter.get_total_flops() / busy_s / 1e9)
                rates["matmul"].append(_matmul_flops_per_s(config, batch, device) / 1e9)
            tell("  ".join(f"{kind} {value:.2f} s" for kind, value in measured.items()))
        rows = [_bench_object_store(rounds), *([] if device == "cpu" else _bench_link(device, rounds))]
        numel = sum(parameter.numel() for parameter in plain.model.parameters())
        copied, least = record["copied_bytes"] / numel, trainer.minimum_bytes["copied"] / numel
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    name = f"step, {config.tiers.placement}"
    return [
        Comparison(name, median["ours"], median["checkpointing"], "s", "in-memory PyTorch with gradient checkpointing"),
        Comparison(name, median["ours"], median["plain"], "s", "in-memory PyTorch"),
        *rows,
        Comparison(f"copied a parameter and step, {config.tiers.placement}", copied, least, "B", "the least"),
        Comparison(
            "arithmetic of a step in the worker",
            statistics.median(rates["worker"]),
            statistics.median(rates["matmul"]),
            "GFLOP/s",
            "a matrix product of the MLP's size, alone",
        ),
    ]


def _matmul_flops_per_s(config: Config, batch: StepBatch, device: str) -> float:
    """Of tokens x hidden x inner in float32, by itself."""
    model = LlamaConfig.from_pretrained(config.model.name_or_path)
    a = torch.ones(batch.micro_batches[0].input_ids.size, model.hidden_size, device=device)
    b = torch.ones(model.hidden_size, model.intermediate_size, device=device)
    out = a @ b
    started_s = time.perf_counter()
    for _ in range(20):
        torch.mm(a, b, out=out)
    if device != "cpu":
        torch.cuda.synchronize()
    return 20 * 2 * a.numel() * b.shape[1] / (time.perf_counter() - started_s)


def _bench_object_store(rounds: int, nbytes: int = 32 << 20) -> Comparison:
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


def _bench_link(device: str, rounds: int, nbytes: int = 256 << 20) -> list[Comparison]:
    """Weights onto the device and a gradient off it, beside plain copies from and to pinned memory."""
    from megatrain_ray.actors.device import CudaDevice
    from megatrain_ray.layout import pack_layer
    from megatrain_ray.packed import PARAMS, PackedLayer

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


def bench_saving(config: Config, *, rounds: int, tell: Callable[[str], None]) -> list[Comparison]:
    """What a checkpoint adds to the steps that it is written beside, and to memory.

    The steps in which one is written stand between as many without, so that a machine that gets slower counts for both.

    Args:
        config: Of the run.
        rounds: Twice as many steps see one checkpoint.
        tell: Called with progress.
    """
    steps = 2 * rounds
    saving = {"save_steps": 2 * steps, "save_total_limit": 1, "max_steps": 4 * steps + 1}
    training = config.training.model_copy(update=saving)
    seconds: list[float] = []
    with Trainer(config.model_copy(update={"training": training}), overwrite=True) as trainer:
        records = trainer.steps()
        for part in ("warming up", "without", "with a checkpoint", "without"):
            started_s = time.perf_counter()
            last = [next(records) for _ in range(steps)][-1]
            seconds.append(time.perf_counter() - started_s)
            tell(f"{steps} steps, {part}: {seconds[-1]:.2f} s")
            if part == "without" and len(seconds) == 2:
                before = sum(last["peak_bytes"].values())
        grown = sum(last["peak_bytes"].values()) - before
        largest = max(spec.section_bytes("float32") for spec in trainer.layers)
    what = f"{steps} steps with a checkpoint"
    return [
        Comparison(what, seconds[2], (seconds[1] + seconds[3]) / 2, "s", "as many without, before and after"),
        Comparison(f"{what}: memory", grown / 1e6, 2 * len(STATE) * largest / 1e6, "MB more", "state of two layers"),
    ]


def bench_data(
    config: Config, directory: Path, *, step_s: float, tell: Callable[[str], None], rounds: int = 3
) -> list[Comparison]:
    """Data read and tokenized anew, and batches made from the token cache, beside what training consumes.

    Args:
        config: Of the run.
        directory: Where tokens may go.
        step_s: Seconds of a step.
        tell: Called with progress.
        rounds: That count; one more warms up.
    """
    tokenized, batched = [], []
    for index in range(rounds + 1):
        started_s = time.perf_counter()
        data, _ = prepare_data(config, str(directory / f"{index}"))
        made_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        tokens = [data.step_batch(step).tokens for step in range(1, data.steps_per_epoch + 1)]
        batches_s = time.perf_counter() - started_s
        if index:
            tokenized.append(int(data.corpus.table.lengths.sum()) / made_s)
            batched.append(sum(tokens) / batches_s)
    consumed = statistics.mean(tokens) / step_s
    tell(f"data: measured on {sum(tokens):,} tokens")
    return [
        Comparison(f"data, {what}", statistics.median(speeds), consumed, "tokens/s", "the step above")
        for what, speeds in (("read and tokenized", tokenized), ("batches from the token cache", batched))
    ]


def bench_tiers(directory: Path, *, tell: Callable[[str], None]) -> list[Comparison]:
    """The store beside a raw loop of direct I/O, and AdamW beside a copy of the same memory."""
    return [*_bench_store(directory, tell), _bench_optimizer(tell)]


def _bench_store(directory: Path, tell: Callable[[str], None], rounds: int = 5) -> list[Comparison]:
    import asyncio

    from megatrain_ray.actors.nvme_store import NvmeStore
    from megatrain_ray.layout import pack_layer
    from megatrain_ray.packed import PackedLayer

    spec = pack_layer(0, "embed", [("weight", (4096, 4096))])
    data = aligned_empty(len(STATE) * spec.section_bytes("float32"))
    data[:] = 7
    store = NvmeStore(directory, (spec,), output_dir=directory, generations=1, pool_bytes=data.nbytes)
    policy = DirectPolicy(True)
    speeds: dict[str, list[float]] = {"write": [], "read": [], "raw write": [], "raw read": []}

    def raw(write: bool) -> None:
        with BlockFile(directory / "raw", write=write, policy=policy) as file:
            move = file.write_from if write else file.read_into
            for start in range(0, data.nbytes, BLOCK_BYTES):
                move(data[start : start + BLOCK_BYTES].data, start)

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
                    speeds[name].append(data.nbytes / (time.perf_counter() - started_s) / 1e9)
            tell(f"store: round {step}")

    asyncio.run(measure())
    median = {name: statistics.median(values) for name, values in speeds.items()}
    return [
        Comparison(
            f"store {kind}", median[kind], median[f"raw {kind}"], "GB/s", "a plain loop of direct I/O, 8 MiB blocks"
        )
        for kind in ("write", "read")
    ]


def _bench_optimizer(tell: Callable[[str], None], numel: int = 1 << 24, rounds: int = 5) -> Comparison:
    from megatrain_ray.actors.cpu_optimizer import AdamWConfig, CpuOptimizer, Hyper, arena_bytes
    from megatrain_ray.layout import pack_layer
    from megatrain_ray.packed import GRADS, MASTER, PackedLayer

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
    ours, theirs = [], []
    for step in range(1, rounds + 2):
        started_s = time.perf_counter()
        optimizer.update(0, Hyper(step, 1e-4, 0.5), PackedLayer(0, step, "float32", GRADS, data))
        middle_s = time.perf_counter()
        peer.step()
        if step > 1:
            ours.append(numel / (middle_s - started_s) / 1e9)
            theirs.append(numel / (time.perf_counter() - middle_s) / 1e9)
    os.close(descriptor)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tell("optimizer: measured")
    return Comparison(
        "AdamW with undo journal", statistics.median(ours), statistics.median(theirs), "G params/s",
        "torch.optim.AdamW(fused=True)",
    )  # fmt: skip


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """On the disk of the working directory: /tmp may be memory."""
    return tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-")
