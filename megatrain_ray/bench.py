"""Measures steps, saving and data beside in-memory PyTorch and what training consumes, as ratios from one run.

Machines are shared and noisy: both sides of each ratio are measured in turn, and medians are compared.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig

from megatrain_ray.config import Config
from megatrain_ray.data.batches import MicroBatch, StepBatch
from megatrain_ray.footprint import measure_cost
from megatrain_ray.limits import Comparison, bench_link, bench_object_store, bench_tiers, matmul_flops_per_s
from megatrain_ray.packed import STATE
from megatrain_ray.plain import PlainTraining, plain_bytes, plain_room
from megatrain_ray.prepare import Prepared, prepare_data
from megatrain_ray.skeleton import text_config
from megatrain_ray.timing import StepCost
from megatrain_ray.trainer import Trainer

__all__ = ["StepWork", "bench_data", "bench_saving", "bench_step", "bench_tiers", "default_config"]


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


class StepWork:
    """Operations of a step, counted on the model's own pieces; see `footprint`.

    Args:
        prepared: The run.
    """

    def __init__(self, prepared: Prepared) -> None:
        recipe = prepared.start.recipe
        self._kept = prepared.plan.shape.keep_graph

        @cache
        def measured(rows: int, row_tokens: int) -> StepCost:
            return measure_cost(
                prepared.model, recipe.build_first, prepared.compute_dtype, rows=rows, row_tokens=row_tokens,
                chunk_tokens=rows * row_tokens, on_cpu=prepared.device == "cpu",
            )  # fmt: skip

        self._measured = measured

    def cost(self, micro_batch: MicroBatch) -> StepCost:
        """Of rows of that shape, all of whose logits exist at once."""
        rows, row_tokens = micro_batch.input_ids.shape
        return self._measured(rows, row_tokens)

    def model_flops(self, batch: StepBatch) -> float:
        """What the model itself takes: forward and twice that for backward, of tokens that are no padding.

        Only active parameters count, and the head where there is a target; attention counts as full, like PaLM's
        (Chowdhery et al. 2022, appendix B).
        """
        total = 0.0
        for each in batch.micro_batches:
            *layers, head = self.cost(each).layers
            work = sum(layer.forward_flops for layer in layers) * each.tokens + head.forward_flops * each.target_tokens
            total += 3 * work / each.input_ids.size
        return total

    def executed_flops(self, batch: StepBatch) -> float:
        """What the worker does: padding included, and forward once more in layers that recompute."""
        total = 0.0
        for each in batch.micro_batches:
            embed, *decoder, head = self.cost(each).layers
            spared = sum(layer.forward_flops for layer in decoder[len(decoder) - self._kept :])
            total += sum(layer.forward_flops + layer.backward_flops for layer in (embed, *decoder)) - spared
            # The head computes its loss and gradient at once.
            total += head.backward_flops * each.target_tokens / each.input_ids.size
        return total


def bench_step(config: Config, *, rounds: int, tell: Callable[[str], None]) -> tuple[float, list[Comparison]]:
    """Steps through the actors and in memory, in turn; the device's arithmetic, and bytes between tiers.

    Args:
        config: Of the run; where memory is too small for the peer, there are no ratios with it.
        rounds: Steps of each kind that count; one more warms up.
        tell: Called with progress.

    Returns:
        Seconds of a step through the actors, and the rows.
    """
    values: dict[str, list[float]] = defaultdict(list)
    with Trainer(config, overwrite=True) as trainer:
        device, prepared = trainer.device, trainer.prepared
        work = StepWork(prepared)
        steps = trainer.steps()
        next(steps)  # the actors' memory is taken before the peer looks for its own
        plain, kinds, why = _peer(config, prepared, work, trainer.step_batch(2))
        tell(why)
        for index in range(rounds + 1):
            record = next(steps)
            batch, step_s = trainer.step_batch(record["step"]), record["step_time_s"]
            measured = {"ours": step_s}
            for kind, checkpointing in kinds.items():
                assert plain is not None
                taken = plain.step(batch, learning_rate=record["learning_rate"], checkpointing=checkpointing)
                measured[kind] = taken.seconds
            tell("  ".join(f"{kind} {seconds:.2f} s" for kind, seconds in measured.items()))
            if index == 0:
                continue
            busy_s = step_s * (1 - record["device_idle_fraction"])
            measured["worker"] = work.executed_flops(batch) / busy_s / 1e9
            measured["model"] = work.model_flops(batch) / step_s / 1e9
            measured["alone"], measured["peak"] = _matmul_speeds(prepared, batch)
            measured["tokens"] = batch.tokens / step_s
            measured["idle"] = 100 * record["device_idle_fraction"]
            if plain is not None:
                measured["peer tokens"] = batch.tokens / measured[PLAIN]
            for kind, value in measured.items():
                values[kind].append(value)
        rows = [bench_object_store(rounds), *([] if device == "cpu" else bench_link(device, rounds))]
        numel, least = sum(spec.numel for spec in prepared.layers), trainer.minimum_bytes
    median = {kind: statistics.median(several) for kind, several in values.items()}
    tier = config.tiers.placement
    moved = {
        f"copied a parameter and step, {tier}": (record["copied_bytes"], least["copied"]),
        f"NVMe, read a parameter and step, {tier}": (record["nvme_read_bytes"], least["nvme_read"]),
        f"NVMe, written a parameter and step, {tier}": (record["nvme_write_bytes"], least["nvme_write"]),
    }
    return median["ours"], [
        *(Comparison(f"step, {tier}", median["ours"], median[kind], "s", kind) for kind in kinds),
        *([] if kinds else [Comparison(f"step, {tier}", median["ours"], None, "s", why)]),
        Comparison(f"tokens a second, {tier}", median["tokens"], median.get("peer tokens"), "tokens/s", PLAIN),
        Comparison(f"device idle, {tier}", median["idle"], None, "% of a step", ""),
        *rows,
        *(Comparison(what, ours / numel, peer / numel, "B", "least") for what, (ours, peer) in moved.items() if peer),
        Comparison(
            "model FLOPs of a step (utilisation)", median["model"], median["peak"], "GFLOP/s",
            "a large matrix product, alone",
        ),
        Comparison(
            "arithmetic in the worker, while it works", median["worker"], median["alone"], "GFLOP/s",
            "a matrix product of the MLP's size, alone",
        ),
    ]  # fmt: skip


PLAIN, CHECKPOINTING = "in-memory PyTorch", "in-memory PyTorch with gradient checkpointing"


def _peer(
    config: Config, prepared: Prepared, work: StepWork, batch: StepBatch
) -> tuple[PlainTraining | None, dict[str, bool], str]:
    """The peer, how it can train (whether with gradient checkpointing, by name), and a sentence for the person."""
    largest = max(batch.micro_batches, key=lambda each: each.input_ids.size)
    needed, free = plain_bytes(prepared, work.cost(largest)), plain_room(prepared.device)
    if needed > free:
        return None, {}, f"{PLAIN} would need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free"
    plain = PlainTraining(config, prepared)
    kinds = {CHECKPOINTING: True, PLAIN: False} if plain.can_checkpoint else {PLAIN: False}
    return plain, kinds, f"compared with {' and '.join(kinds)}, {prepared.compute_dtype} throughout"


def _matmul_speeds(prepared: Prepared, batch: StepBatch) -> tuple[float, float]:
    """GFLOP/s of a matrix product of the MLP's size on a micro-batch, and of a large one."""
    text = text_config(prepared.model.config)
    hidden = prepared.model.hidden_size
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * hidden
    edge = 2048 if prepared.device == "cpu" else 8192
    sizes = ((batch.micro_batches[0].input_ids.size, hidden, inner), (edge, edge, edge))
    dtype = getattr(torch, prepared.compute_dtype)
    alone, large = (matmul_flops_per_s(*size, dtype=dtype, device=prepared.device) / 1e9 for size in sizes)
    return alone, large


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


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """On the disk of the working directory: /tmp may be memory."""
    return tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-")
