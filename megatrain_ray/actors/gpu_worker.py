"""The device tier: streams layers through the model, keeps nothing of it.

Layer-first: all micro-batches of a step pass a layer before the next one, so that its weights travel twice a step
whatever is accumulated. Between forward and backward the worker holds each layer's input and no weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain_ray.actors.device import Device
from megatrain_ray.data.batches import MicroBatch, StepBatch
from megatrain_ray.data.packing_gate import packed_masks
from megatrain_ray.errors import NonFiniteError
from megatrain_ray.layout import LAYER_ALIGN_NUMEL, LayerSpec
from megatrain_ray.model import LayerGraph, MicroBatchTensors, Prologue, StreamModel, target_rows
from megatrain_ray.packed import GRADS, PackedLayer
from megatrain_ray.start import RunSource
from megatrain_ray.tensors import bind

__all__ = ["GpuWorker", "GradInfo", "model_inputs"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GradInfo:
    """What is known of a gradient when it leaves the device.

    Attributes:
        square_sum: Sum of the squares of its elements.
        loss: Of the step; with the last gradient, that of ``embed``, only.
        busy_s: Seconds that the device has worked since the last such report.
        device_peak_bytes: Most device memory allocated so far.
    """

    square_sum: float
    loss: float | None
    busy_s: float
    device_peak_bytes: int


def model_inputs(
    micro_batch: MicroBatch, model: StreamModel, to_device: Callable[[Any], Tensor], *, packed: bool
) -> MicroBatchTensors:
    """What the model is called with for a micro-batch.

    Args:
        micro_batch: Its rows.
        model: Says what masks look like.
        to_device: Makes a tensor of an array.
        packed: Packed rows come with ready-made masks: ``position_ids`` alone do not keep this model's samples apart.
    """
    mask, position_ids = micro_batch.attention_mask, micro_batch.position_ids
    masks: Any = None if mask is None else to_device(mask)
    positions = None if position_ids is None else to_device(position_ids)
    if positions is not None and packed:
        masks = packed_masks(model.config, positions, model.dtype)
    return MicroBatchTensors(to_device(micro_batch.input_ids), masks, positions)


class _GradientSum:
    """The gradient of one layer, summed in fp32 over the micro-batches; parameters that got none are zero."""

    def __init__(self, spec: LayerSpec, device: Device) -> None:
        self.flat = device.gradient(spec)
        self._views = bind(spec, self.flat)
        self._untouched = set(self._views)

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def add(self, name: str, gradient: Tensor) -> None:
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
    """One micro-batch on its way through the layers.

    Args:
        tensors: Inputs of the prologue.
        rows: Indices in [B * S] of the hidden states that predict a target.
        targets: The token ids that they predict.
    """

    def __init__(self, tensors: MicroBatchTensors, rows: Tensor, targets: Tensor) -> None:
        self.tensors = tensors
        self.rows = rows
        self.targets = targets
        self.prologue: Prologue
        self.hidden: Tensor  # forward: what left the last layer; backward: the gradient of what enters the next one
        self.inputs: dict[int, Any] = {}  # by layer: the device's ticket of what entered it
        self.graphs: dict[int, LayerGraph] = {}  # by layer: of those that keep their graph


class GpuWorker:
    """Computes one step after the other, as the schedule says.

    Args:
        model: Buffers on the device; parameters on meta.
        device: Where to compute.
        seed: Of dropout: forward and recompute of a layer draw the same numbers.
        keep_graph: The last so many decoder layers keep their graph instead of recomputing.
        loss_chunk_tokens: Target tokens whose logits exist at once.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        needs_packed_masks: Packed rows come with masks made here instead of ``position_ids`` alone.
        eager_updates: Updates follow as gradients arrive, before the norm is known.
        open_source: Opens what the run starts from; only an import calls it.
    """

    def __init__(
        self,
        model: StreamModel,
        device: Device,
        *,
        open_source: Callable[[], RunSource],
        needs_packed_masks: bool = False,
        eager_updates: bool = False,
        seed: int = 0,
        keep_graph: int = 0,
        loss_chunk_tokens: int = 1024,
        label_smoothing: float = 0.0,
    ) -> None:
        self.model = model
        self.device = device
        self.seed = seed
        self.loss_chunk_tokens = loss_chunk_tokens
        self.label_smoothing = label_smoothing
        head = len(model.layers) - 1
        self._kept = range(head - keep_graph, head)
        self.needs_packed_masks = needs_packed_masks
        self.eager_updates = eager_updates
        self._open_source = open_source
        self._source: RunSource | None = None
        self._imported: PackedLayer | None = None
        self._forget()

    def import_layer(self, layer: int, span: tuple[int, int]) -> PackedLayer:
        """Elements of a layer as the run starts with it: this process has the model, and so can convert its files."""
        if self._source is None:
            self._source = self._open_source()
            _logger.info("import begins")
        if self._imported is None or self._imported.layer != layer:
            self._imported = None  # before the next one is read
            self._imported = self._source.read_layer(self.model.layers[layer])
        whole, (start, stop) = self._imported, span
        if stop == whole.numel:
            self._imported = None
        if start == 0 and stop == whole.numel:
            return whole
        data = whole.data.reshape(len(whole.sections), -1)[:, 4 * start : 4 * stop]
        return PackedLayer(layer, whole.step, whole.dtype, whole.sections, data.reshape(-1), start)

    def finish_import(self) -> list[str]:
        """Forgets the source; returns what reading it noticed."""
        notes = [] if self._source is None else self._source.warnings
        self._source = None
        _logger.info("import is complete: %d layers", len(self.model.layers))
        return notes

    def _forget(self) -> None:
        self._step = 0
        self._train = True
        self._target_tokens = 1
        self._micro_batches: list[_MicroBatch] = []
        self._loaded: dict[int, deque[Any]] = defaultdict(deque)
        self._sums: dict[int, _GradientSum] = {}
        self._square_sums: dict[int, Tensor] = {}
        self._offloads: dict[int, Any] = {}
        self._losses: list[Tensor] = []
        self._uses = 0  # of layers, forward and backward, that are complete

    def begin(self, batch: StepBatch, train: bool) -> None:
        """Takes a step's micro-batches, and forgets whatever an interrupted step has left."""
        self.device.settle()
        self._forget()
        self._step = batch.step
        self._train = train
        self._target_tokens = batch.target_tokens
        self.model.train(train)
        to_device = self.device.tensor
        for micro_batch in batch.micro_batches:
            tensors = model_inputs(micro_batch, self.model, to_device, packed=self.needs_packed_masks)
            rows, targets = target_rows(to_device(micro_batch.labels))
            self._micro_batches.append(_MicroBatch(tensors, rows, targets))

    def load(self, layer: int, params: PackedLayer) -> None:
        """Starts to bring a layer's compute weights onto the device, for its next use, and its saved inputs."""
        self._loaded[layer].append(self.device.load(params))
        for micro_batch in self._micro_batches:
            if layer in micro_batch.inputs:
                self.device.fetch(micro_batch.inputs[layer])

    @torch.no_grad()
    def forward(self, layer: int) -> None:
        """All micro-batches through ``embed`` (0) or a decoder layer."""
        self._check_turn(layer, layer)
        keeps = self._train and layer in self._kept
        with self._weights(layer, keep=keeps) as params, self.device.busy():
            for index, micro_batch in enumerate(self._micro_batches):
                self._seed_dropout(layer, index)
                if layer == 0:
                    micro_batch.prologue = self.model.prologue(params, micro_batch.tensors)
                    micro_batch.hidden = micro_batch.prologue.hidden
                    continue
                hidden, prologue = micro_batch.hidden, micro_batch.prologue
                if keeps:
                    micro_batch.graphs[layer] = self.model.layer_graph(layer, params, hidden, prologue)
                    micro_batch.hidden = micro_batch.graphs[layer].output.detach()
                    continue
                if self._train:
                    micro_batch.inputs[layer] = self.device.stash(hidden)
                micro_batch.hidden = self.model.layer_forward(layer, params, hidden, prologue)
        self._uses += 1

    @torch.no_grad()
    def head(self, layer: int) -> None:
        """Loss of every micro-batch and its gradient, logits a chunk at a time."""
        self._check_turn(layer, layer)
        for read in self.model.head_reads:
            self._sums[read] = _GradientSum(self.model.layers[read], self.device)
        sums = list(self._sums.values())

        def sink(name: str, gradient: Tensor) -> None:
            next(each for each in sums if name in each).add(name, gradient)

        with contextlib.ExitStack() as stack:
            params = self._head_weights(stack)
            for micro_batch in self._micro_batches:
                rows = micro_batch.hidden.flatten(0, 1)
                grad_rows = torch.zeros_like(rows)
                if len(micro_batch.targets):
                    loss, grad_rows[micro_batch.rows] = self.model.head_backward(
                        params,
                        rows[micro_batch.rows],
                        micro_batch.targets,
                        normalizer=self._target_tokens,
                        label_smoothing=self.label_smoothing,
                        chunk_tokens=self.loss_chunk_tokens,
                        sink=sink,
                    )
                    self._losses.append(loss)
                micro_batch.hidden = grad_rows.view_as(micro_batch.hidden)
            if layer in self._sums:
                self._finish(layer)
        self._uses += 1

    @torch.no_grad()
    def evaluate(self, layer: int) -> float:
        """Summed loss of every micro-batch's targets, without label smoothing."""
        self._check_turn(layer, layer)
        with contextlib.ExitStack() as stack:
            params = self._head_weights(stack)
            losses = [
                self.model.head_loss(
                    params,
                    micro_batch.hidden.flatten(0, 1)[micro_batch.rows],
                    micro_batch.targets,
                    normalizer=1,
                    chunk_tokens=self.loss_chunk_tokens,
                )
                for micro_batch in self._micro_batches
                if len(micro_batch.targets)
            ]
        return sum(float(loss) for loss in losses)

    @torch.no_grad()
    def backward(self, layer: int) -> None:
        """Gradient of a layer, summed over the micro-batches, and of what entered it."""
        self._check_turn(layer, 2 * (len(self.model.layers) - 1) - layer)
        if layer not in self._sums:  # tied weights have a sum since the head
            self._sums[layer] = _GradientSum(self.model.layers[layer], self.device)
        gradient_sum = self._sums[layer]
        with self._weights(layer) as params, self.device.busy():
            for index, micro_batch in enumerate(self._micro_batches):
                self._seed_dropout(layer, index)
                prologue, grad_hidden = micro_batch.prologue, micro_batch.hidden
                if layer == 0:
                    self.model.prologue_backward(params, micro_batch.tensors, prologue, grad_hidden, gradient_sum.add)
                    continue
                graph = micro_batch.graphs.pop(layer, None) or self.model.layer_graph(
                    layer, params, self.device.unstash(micro_batch.inputs.pop(layer)), prologue
                )
                micro_batch.hidden = self.model.backward(graph, grad_hidden, gradient_sum.add)
                del graph
            self._finish(layer)
        self._uses += 1

    def grads(self, layer: int) -> tuple[PackedLayer, GradInfo]:
        """The fp32 gradient of a layer, on the host.

        Raises:
            NonFiniteError: It holds a NaN or an infinity, and an update would follow at once.
        """
        data = self.device.collect(self._offloads.pop(layer))
        square_sum = float(self._square_sums.pop(layer))
        if self.eager_updates and not math.isfinite(square_sum):
            raise NonFiniteError(f"the gradient of {self.model.layers[layer].name} has norm {math.sqrt(square_sum)}")
        info = GradInfo(
            square_sum=square_sum,
            loss=sum(float(loss) for loss in self._losses) if layer == 0 else None,
            busy_s=self.device.take_busy_s(),
            device_peak_bytes=self.device.peak_bytes(),
        )
        return PackedLayer(layer, self._step, "float32", GRADS, data), info

    # --- internals ------------------------------------------------------------------------------------------------

    def _check_turn(self, layer: int, use: int) -> None:
        """When a use has failed, as when its weights died with the store, the next ones must not compute on."""
        assert self._uses == use, f"layer {layer} is use {use} of the step: use {self._uses} is missing"

    @contextlib.contextmanager
    def _weights(self, layer: int, *, keep: bool = False) -> Iterator[dict[str, Tensor]]:
        """A layer's weights by name for one use; with ``keep`` they stay on the device for the next."""
        ticket = self._loaded[layer].popleft()
        flat = self.device.weights(ticket)
        yield bind(self.model.layers[layer], flat)
        if keep:
            self._loaded[layer].appendleft(ticket)
        else:
            self.device.release(ticket)

    def _head_weights(self, stack: contextlib.ExitStack) -> dict[str, Tensor]:
        params: dict[str, Tensor] = {}
        for read in self.model.head_reads:
            params.update(stack.enter_context(self._weights(read)))
        stack.enter_context(self.device.busy())
        return params

    def _finish(self, layer: int) -> None:
        """Norm and offload of a gradient that is complete."""
        flat = self._sums.pop(layer).finish()
        # Short fp32 rows, then fp64: exact to fp32's last digits whatever the layer's size.
        rows = torch.linalg.vector_norm(flat.view(-1, LAYER_ALIGN_NUMEL), dim=1)
        self._square_sums[layer] = rows.double().square().sum()
        self._offloads[layer] = self.device.offload(flat, self.model.layers[layer])

    def _seed_dropout(self, layer: int, micro_batch: int) -> None:
        """The same random numbers whenever this layer sees this micro-batch: recomputed, replayed, resumed."""
        if self._train:
            key = f"{self.seed}/{self._step}/{micro_batch}/{layer}".encode()
            torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big"))
