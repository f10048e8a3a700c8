"""The plain PyTorch loop that everything is compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, get_scheduler

from megatrain_ray.config import Config
from megatrain_ray.data.sampler import TrainingData


def plain_training(
    config: Config,
    data: TrainingData,
    steps: int,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Losses and norms of each step, and the final weights, of transformers and torch.optim.AdamW in memory."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        config.model.name_or_path, dtype=dtype, attn_implementation=attention
    ).train()
    training = config.training
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [p for name, p in named.items() if (p.ndim > 1 and not name.endswith("bias")) is decays],
            "weight_decay": training.weight_decay * decays,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=(training.adam_beta1, training.adam_beta2), eps=training.adam_epsilon
    )
    scheduler: Any = get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=training.warmup(data.total_steps),
        num_training_steps=data.total_steps,
    )
    records = []
    for step in range(1, steps + 1):
        batch = data.step_batch(step)
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for micro_batch in batch.micro_batches:
            mask = micro_batch.attention_mask
            logits = model(
                input_ids=torch.from_numpy(micro_batch.input_ids),
                attention_mask=None if mask is None else torch.from_numpy(mask),
                use_cache=False,
            ).logits
            loss = nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1),
                torch.from_numpy(micro_batch.labels)[:, 1:].flatten(),
                reduction="sum",
                label_smoothing=training.label_smoothing_factor,
            )
            (loss / batch.target_tokens).backward()
            total += loss.item()
        for param in named.values():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        limit = training.max_grad_norm or float("inf")
        grad_norm = float(nn.utils.clip_grad_norm_(list(named.values()), limit))
        learning_rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        records.append({"loss": total / batch.target_tokens, "grad_norm": grad_norm, "learning_rate": learning_rate})
    return records, {name: param.detach() for name, param in named.items()}


Row = tuple[list[int], list[int]]
"""Ids and unshifted labels."""


def token_rows(path: Path, max_length: int | None = None) -> list[Row]:
    """Rows of a tokens file, cut to ``max_length``."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(row["input_ids"][:max_length], row.get("labels", row["input_ids"])[:max_length]) for row in rows]


def plain_loss(directory: Path, rows: Sequence[Row]) -> float:
    """Token-weighted loss of a saved model, one row at a time: no padding."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    total, count = 0.0, 0
    for ids, labels in rows:
        targets = torch.tensor(labels)[1:]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        total += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += int((targets != -100).sum())
    return total / count


def saved_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint as transformers loads them."""
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    return {name: param.detach() for name, param in model.named_parameters()}
