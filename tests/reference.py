"""The plain PyTorch loop that everything is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, get_scheduler

from megatrain_ray.config import Config
from megatrain_ray.data.sampler import TrainingData
from megatrain_ray.layout import takes_weight_decay


def plain_training(
    config: Config,
    data: TrainingData,
    steps: int,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    label_smoothing: float = 0.0,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Losses and norms of each step, and the final weights, of transformers and torch.optim.AdamW in memory."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        config.model.name_or_path, dtype=dtype, attn_implementation=attention
    ).train()
    training = config.training
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [p for name, p in named.items() if takes_weight_decay(name, tuple(p.shape)) is decays],
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
                label_smoothing=label_smoothing,
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


def saved_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint as transformers loads them."""
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    return {name: param.detach() for name, param in model.named_parameters()}
