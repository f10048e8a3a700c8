"""The same training in memory, by transformers and `torch.optim.AdamW`: what steps through tiers are measured by."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from megatrain_ray.actors.gpu_worker import model_inputs
from megatrain_ray.cgroup import memory_room
from megatrain_ray.config import Config
from megatrain_ray.data.batches import StepBatch
from megatrain_ray.gate import LabelledBatch, plain_gradients
from megatrain_ray.layout import ITEMSIZE, takes_weight_decay
from megatrain_ray.prepare import Prepared
from megatrain_ray.timing import StepCost

__all__ = ["PlainStep", "PlainTraining", "plain_bytes", "plain_room"]


@dataclass(frozen=True, slots=True)
class PlainStep:
    """One step.

    Attributes:
        seconds: That it took.
        loss: Sum of token losses over the step's target tokens.
    """

    seconds: float
    loss: float


def plain_bytes(prepared: Prepared, cost: StepCost) -> int:
    """Memory of a step without gradient checkpointing: weights, gradients, both moments, one micro-batch's graph.

    Args:
        prepared: The run.
        cost: Of its largest micro-batch, with all of its logits at once.
    """
    parameters = sum(spec.num_parameters for spec in prepared.layers)
    graph = sum(layer.graph_bytes for layer in cost.layers) + cost.layers[-1].backward_bytes
    return 4 * parameters * ITEMSIZE[prepared.compute_dtype] + graph


def plain_room(device: str) -> int:
    """Bytes that are free for it: of the GPU, or of the host within the limit of this process's control group."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    room = memory_room()
    available = psutil.virtual_memory().available
    return available if room is None else min(available, room.free_bytes)


class PlainTraining:
    """The run's own model, data and hyperparameters, all in the memory of its device.

    Weights and moments are of the compute dtype: in bfloat16 that is less exact, and faster, than fp32 masters.

    Args:
        config: Of the run.
        prepared: The run.
    """

    def __init__(self, config: Config, prepared: Prepared) -> None:
        self._config, self._prepared = config, prepared
        streamed, start = prepared.model, prepared.start
        options = {
            "dtype": getattr(torch, prepared.compute_dtype),
            "attn_implementation": streamed.config._attn_implementation,
            "trust_remote_code": config.model.trust_remote_code,
        }
        if start.directory is None:
            model: Any = AutoModelForCausalLM.from_config(streamed.config, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(start.directory, **options)
        self.model = model.to(prepared.device).train()
        training = config.training
        named = list(self.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for name, p in named if takes_weight_decay(name, tuple(p.shape)) is decays],
                 "weight_decay": training.weight_decay * decays}
                for decays in (True, False)
            ],
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_epsilon,
            fused=True,
        )  # fmt: skip

    @property
    def can_checkpoint(self) -> bool:
        """Whether transformers can recompute this model's layers."""
        return bool(self.model.supports_gradient_checkpointing)

    def step(self, batch: StepBatch, *, learning_rate: float, checkpointing: bool) -> PlainStep:
        """Takes a step, with or without gradient checkpointing."""
        self._recompute(checkpointing)
        training, device = self._config.training, self._prepared.device
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        started_s = time.perf_counter()
        to_device = partial(torch.as_tensor, device=device)
        labelled = [
            LabelledBatch(
                model_inputs(each, self._prepared.model, to_device, packed=self._prepared.packed_masks),
                to_device(each.labels),
            )
            for each in batch.micro_batches
        ]
        loss, _ = plain_gradients(self.model, labelled, label_smoothing=training.label_smoothing_factor)
        nn.utils.clip_grad_norm_(self.model.parameters(), training.max_grad_norm or float("inf"))
        self._optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize(device)
        return PlainStep(time.perf_counter() - started_s, loss)

    def _recompute(self, wanted: bool) -> None:
        if not self.can_checkpoint:
            assert not wanted
            return
        verb = "enable" if wanted else "disable"
        # transformers 5 has renamed these.
        method = getattr(self.model, f"activation_checkpointing_{verb}", None)
        (method or getattr(self.model, f"gradient_checkpointing_{verb}"))()
