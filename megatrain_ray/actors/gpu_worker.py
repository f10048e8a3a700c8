"""The device tier: streams layers through the model, keeps nothing of it.

Layer-first: all micro-batches of a step pass a layer before the next one, so that its weights travel twice a step whatever
is accumulated. Between forward and backward the worker holds each layer's input, no weights; backward recomputes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain_ray.actors.device import Device
from megatrain_ray.data.batches import StepBatch
from megatrain_ray.layout import LAYER_ALIGN_NUMEL, LayerSpec
from megatrain_ray.model import MicroBatchTensors, Prologue, StreamModel
from megatrain_ray.packed import GRADS, PackedLayer
from megatrain_ray.tensors import named_views

__all__ = ["GpuWorker", "GradInfo"]


@dataclass(frozen=True, slots=True)
class GradInfo:
    """What is known of a gradient when it leaves the device.

    Attributes:
        square_sum: Sum of the squares of its elements.
        busy_s: Seconds that the device has worked since the last such report.
        device_peak_bytes: Most device memory allocated so far.
    """

    square_sum: float
    busy_s: float
    device_peak_bytes: int


class _GradientSum:
    """The gradient of one layer, summed in fp32 over the micro-batches; parameters that got none are zero."""

    def __init__(self, spec: LayerSpec, device: Device) -> None:
        self.flat = device.gradient(spec.numel)
        self._views = named_views(self.flat, spec)
        self._untouched = set(self._views)

    def add(self, gradients: Mapping[str, Tensor | None]) -> None:
        for name, gradient in gradients.items():
            if gradient is None or name not in self._views:
                continue
            if name in self._untouched:
                self._views[name].copy_(gradient)
                self._untouched.remove(name)
            else:
                self._views[name].add_(gradient)

    def finish(self) -> Tensor:
        for name in self._untouched:
            self._views[name].zero_()
        return self.flat


class _MicroBatch:
    """One micro-batch on its way through the layers."""

    def __init__(self, tensors: MicroBatchTensors, positions: Tensor, targets: Tensor) -> None:
        self.tensors = tensors
        self.positions = positions  # of the hidden rows that predict a target, in [B * S]
        self.targets = targets
        self.prologue: Prologue | None = None
        self.hidden: Tensor | None = None  # forward: what enters the next layer
        self.inputs: dict[int, Tensor] = {}  # by layer: what entered it
        self.outputs: dict[int, Tensor] = {}  # by layer: its output with its graph, for layers that keep it
        self.grad_hidden: Tensor | None = None  # backward: gradient of what the last layer gave


class GpuWorker:
    """Computes one step after the other, as the schedule says.

    Args:
        model: On the device; parameters on meta.
        device: Where to compute.
        seed: Of dropout: forward and recompute of a layer draw the same numbers.
        keep_graph: The last so many decoder layers keep their graph instead of recomputing.
        loss_chunk_tokens: Target tokens whose logits exist at once.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
    """

    def __init__(
        self,
        model: StreamModel,
        device: Device,
        *,
        seed: int,
        keep_graph: int,
        loss_chunk_tokens: int,
        label_smoothing: float,
    ) -> None:
        self.model = model
        self.device = device
        self.seed = seed
        self.loss_chunk_tokens = loss_chunk_tokens
        self.label_smoothing = label_smoothing
        self._head = len(model.layers) - 1
        self._kept = range(self._head - keep_graph, self._head)
        self._reset()

    def _reset(self) -> None:
        self._step = 0
        self._train = True
        self._target_tokens = 1
        self._micro_batches: list[_MicroBatch] = []
        self._loaded: dict[int, deque[Any]] = defaultdict(deque)
        self._sums: dict[int, _GradientSum] = {}
        self._square_sums: dict[int, Tensor] = {}
        self._offloads: dict[int, Any] = {}
        self._loss = torch.zeros((), dtype=torch.float64)

    def begin(self, batch: StepBatch, train: bool) -> None:
        """Takes a step's micro-batches and forgets whatever an earlier, interrupted step has left."""
        self._reset()
        self._step = batch.step
        self._train = train
        self._target_tokens = batch.target_tokens
        self.model.train(train)
        for micro_batch in batch.micro_batches:
            # A label is predicted by the position before it; one at position 0 by nothing.
            rows, columns = np.nonzero(micro_batch.labels[:, 1:] != -100)
            positions = rows * micro_batch.labels.shape[1] + columns
            self._micro_batches.append(
                _MicroBatch(
                    MicroBatchTensors.of(micro_batch, self.device.tensor),
                    self.device.tensor(positions),
                    self.device.tensor(micro_batch.labels[rows, columns + 1]),
                )
            )

    def load(self, layer: int, params: PackedLayer) -> None:
        """Starts to bring a layer's compute weights onto the device, for its next use."""
        self._loaded[layer].append(self.device.load(params))

    @torch.no_grad()
    def forward(self, layer: int) -> None:
        """All micro-batches through ``embed`` (0) or a decoder layer."""
        ticket, params = self._take(layer)
        with self.device.busy():
            for index, micro_batch in enumerate(self._micro_batches):
                self._draw_from(layer, index)
                if layer == 0:
                    micro_batch.prologue = self.model.prologue(params, micro_batch.tensors)
                    micro_batch.hidden = micro_batch.prologue.hidden
                    continue
                hidden = _present(micro_batch.hidden)
                if layer in self._kept and self._train:
                    micro_batch.inputs[layer] = hidden.detach().requires_grad_()
                    micro_batch.outputs[layer] = self._layer_with_graph(layer, params, micro_batch)
                    micro_batch.hidden = micro_batch.outputs[layer].detach()
                    continue
                if self._train:
                    micro_batch.inputs[layer] = hidden
                micro_batch.hidden = self.model.layer_forward(layer, params, hidden, _present(micro_batch.prologue))
        if layer in self._kept and self._train:
            self._loaded[layer].append(ticket)  # the graph holds the weights until backward
        else:
            self.device.release(ticket)

    def head(self, layer: int) -> None:
        """Loss of every micro-batch, and its gradient with respect to the head's weights and the last hidden state."""
        tickets, params = self._take_head()
        with self.device.busy():
            for index in self.model.head_reads:
                if self.model.layers[index].numel:
                    self._sums[index] = _GradientSum(self.model.layers[index], self.device)
            for micro_batch in self._micro_batches:
                hidden = _present(micro_batch.hidden)
                rows = hidden.reshape(-1, hidden.shape[-1])
                grad_rows = torch.zeros_like(rows)
                for chunk in self._chunks(micro_batch):
                    positions = micro_batch.positions[chunk]
                    loss, grad, gradients = self.model.head_backward(
                        params,
                        rows[positions],
                        micro_batch.targets[chunk],
                        target_tokens=self._target_tokens,
                        label_smoothing=self.label_smoothing,
                    )
                    self._loss += loss.double().cpu() if self.device.name.type == "cpu" else loss.double()
                    grad_rows[positions] = grad
                    for gradient_sum in self._sums.values():
                        gradient_sum.add(gradients)
                micro_batch.grad_hidden = grad_rows.view_as(hidden)
                micro_batch.hidden = None
            if layer in self._sums:
                self._finish_gradient(layer)
        for ticket in tickets:
            self.device.release(ticket)
