"""What one micro-batch costs in each layer, in bytes and operations, without computing anything.

The model's own pieces run on fake tensors: the kernels are only named, and every storage that appears or disappears is
counted. So the figures follow the code that will run, for any architecture, from ``config.json`` alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatrain_ray.layout import ITEMSIZE
from megatrain_ray.model import MicroBatchTensors, Prologue, StreamModel
from megatrain_ray.skeleton import text_config
from megatrain_ray.tensors import bind
from megatrain_ray.timing import LayerCost, StepCost, heap_bytes

__all__ = ["measure_cost"]


def measure_cost(
    model: StreamModel,
    build: Callable[[str, int], StreamModel],
    dtype: str,
    *,
    rows: int,
    row_tokens: int,
    chunk_tokens: int,
    on_cpu: bool,
) -> StepCost:
    """Runs one micro-batch of ``rows`` x ``row_tokens`` through the layers, each kind of layer once.

    Args:
        model: On meta, in any dtype.
        build: Makes its first layers alone, in a compute dtype.
        dtype: The compute dtype.
        rows, row_tokens: Shape of a micro-batch.
        chunk_tokens: Target tokens whose logits exist at once.
        on_cpu: Buffers come from the C library's allocator.
    """
    chunk_tokens = min(chunk_tokens, rows * row_tokens)
    kinds = _kinds(model)
    # Grouped matrix products have a fake kernel in bfloat16 only: what scales with the dtype is then doubled.
    for tried, factor in {dtype: 1, "bfloat16": ITEMSIZE[dtype] // ITEMSIZE["bfloat16"]}.items():
        try:
            small = build(tried, max(map(kinds.index, kinds)) + 1)
            cost = _scaled(_Trace(small, rows, row_tokens, heap_bytes if on_cpu else int).run(chunk_tokens), factor)
            first, *decoder, last = cost.layers
            return replace(cost, layers=(first, *(decoder[kinds.index(kind)] for kind in kinds), last))
        except Exception:  # data-dependent control flow, an operator without a fake kernel
            continue
    return _estimate(model, dtype, rows * row_tokens, chunk_tokens)


def _scaled(cost: StepCost, factor: int) -> StepCost:
    """All bytes times ``factor``."""
    layers = tuple(
        replace(
            layer,
            forward_bytes=factor * layer.forward_bytes,
            graph_bytes=factor * layer.graph_bytes,
            backward_bytes=factor * layer.backward_bytes,
            forward_moved=factor * layer.forward_moved,
            backward_moved=factor * layer.backward_moved,
        )
        for layer in cost.layers
    )
    return StepCost(layers, factor * cost.hidden_bytes, factor * cost.prologue_bytes)


class _Trace:
    def __init__(self, model: StreamModel, rows: int, row_tokens: int, allocated: Callable[[int], int]) -> None:
        self.model = model
        self.shape = (rows, row_tokens)
        self.allocated = allocated  # by a buffer of so many bytes

    def run(self, chunk_tokens: int) -> StepCost:
        model = self.model
        was_training = model.module.training
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        level = logger.level
        logger.setLevel(logging.CRITICAL)  # what fails is estimated instead
        try:
            model.train()
            with FakeTensorMode(allow_non_fake_inputs=True):
                return self._run(chunk_tokens)
        finally:
            logger.setLevel(level)
            model.train(was_training)

    def _run(self, chunk_tokens: int) -> StepCost:
        model = self.model
        # On fake tensors transformers always makes the mask that padded or packed rows need.
        batch = MicroBatchTensors(torch.zeros(self.shape, dtype=torch.int64))
        embed = self._weights(0)
        with torch.no_grad(), self._measured(*embed.values()) as entering:
            prologue = model.prologue(embed, batch)
        hidden = torch.empty_like(prologue.hidden)
        costs: dict[Any, LayerCost] = {}
        for index, kind in enumerate(_kinds(model), 1):
            if kind not in costs:
                costs[kind] = self._decoder(index, hidden, prologue)
        layers = [costs[kind] for kind in _kinds(model)]
        with torch.no_grad(), self._measured(*embed.values(), *_tensors(prologue), hidden) as leaving:
            model.prologue_backward(embed, batch, prologue, torch.empty_like(hidden), lambda name, grad: None)
        first = _cost(entering, leaving, 0)
        return StepCost(
            (first, *layers, self._head(hidden, chunk_tokens)),
            hidden_bytes=hidden.nbytes,
            prologue_bytes=max(entering.now - self.allocated(hidden.nbytes), 0),
        )

    def _decoder(self, index: int, hidden: Tensor, prologue: Prologue) -> LayerCost:
        params = self._weights(index)
        known = (*params.values(), *_tensors(prologue), hidden)
        with torch.no_grad(), self._measured(*known) as forward:
            self.model.layer_forward(index, params, hidden, prologue)
        grad = torch.empty_like(hidden)
        with torch.no_grad(), self._measured(*known, grad) as backward:
            graph = self.model.layer_graph(index, params, hidden, prologue)
            graph_bytes = backward.now
            self.model.backward(graph, grad, lambda name, gradient: None)
        return _cost(forward, backward, graph_bytes)

    def _head(self, hidden: Tensor, chunk_tokens: int) -> LayerCost:
        params: dict[str, Tensor] = {}
        for index in self.model.head_reads:
            params.update(self._weights(index))
        rows = torch.empty_like(hidden.flatten(0, 1)[:chunk_tokens])
        targets = torch.zeros(chunk_tokens, dtype=torch.int64)
        with torch.no_grad(), self._measured(*params.values(), rows, targets) as forward:
            self.model.head_loss(params, rows, targets, normalizer=1, chunk_tokens=chunk_tokens)
        with torch.no_grad(), self._measured(*params.values(), rows, targets) as backward:
            self.model.head_backward(
                params, rows, targets, normalizer=1, chunk_tokens=chunk_tokens, sink=lambda name, grad: None
            )
        tokens = self.shape[0] * self.shape[1]
        # The work of all tokens, the memory of one chunk (and of the rows of all: input, gradient, their copies).
        whole = 3 * hidden.nbytes
        for chunk in (forward, backward):
            chunk.peak += whole
            chunk.flops = chunk.flops * tokens // chunk_tokens
            chunk.moved = chunk.moved * tokens // chunk_tokens
            chunk.calls = chunk.calls * tokens // chunk_tokens
        return _cost(forward, backward, 0)

    @contextmanager
    def _measured(self, *known: Tensor) -> Iterator[_Storages]:
        """Counts what happens inside, without what is ``known``."""
        counter = FlopCounterMode(display=False, custom_mapping=_FLOPS)
        with counter, _Storages(known, self.allocated) as storages:
            yield storages
        storages.flops = counter.get_total_flops()

    def _weights(self, index: int) -> dict[str, Tensor]:
        spec = self.model.layers[index]
        return bind(spec, torch.empty(spec.numel, dtype=self.model.dtype))


def _cost(forward: _Storages, backward: _Storages, graph_bytes: int) -> LayerCost:
    return LayerCost(
        forward.peak, graph_bytes, backward.peak, forward.flops, backward.flops,
        forward.moved, backward.moved, forward.calls, backward.calls,
    )  # fmt: skip


def _kinds(model: StreamModel) -> list[Any]:
    """Of each decoder layer, something that is equal for layers that cost the same."""
    types = getattr(text_config(model.config), "layer_types", None) or [None] * model.num_decoder_layers
    return [(spec.extents, kind) for spec, kind in zip(model.layers[1:-1], types, strict=True)]


def _tensors(prologue: Prologue) -> list[Tensor]:
    leaves = tree_leaves([(call.args, call.kwargs) for call in prologue.calls])
    return [prologue.hidden, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]


class _Storages(TorchDispatchMode):
    """Counts the bytes of storages that operators make, for as long as somebody holds them."""

    def __init__(self, known: tuple[Tensor, ...], allocated: Callable[[int], int]) -> None:
        TorchDispatchMode.__init__(self)
        self._allocated = allocated
        self.now = self.peak = self.flops = self.moved = self.calls = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._references: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outcome = function(*args, **(kwargs or {}))
        self.calls += 1
        product = function._overloadpacket in _PRODUCTS
        for leaf in tree_leaves(outcome):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
                self.moved += 0 if product or function.is_view else leaf.nbytes
        return outcome

    def _see(self, storage: Any) -> None:
        key, nbytes = storage._cdata, self._allocated(storage.nbytes())
        if key in self._known or key in self._references:
            return

        def gone(_: Any) -> None:
            self.now -= nbytes
            del self._references[key]

        self._references[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * int(a[-2]) * int(a[-1]) * int(b[-1])


_FLOPS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten._grouped_mm: _grouped,
}
"""What torch does not count by itself. As there, causal attention counts as full."""

_PRODUCTS = frozenset((*flop_registry, *_FLOPS))


def _estimate(model: StreamModel, dtype: str, tokens: int, chunk_tokens: int) -> StepCost:
    """From sizes alone: about 14 activations of the hidden size and 6 of the MLP's a token in a layer's graph."""
    text = text_config(model.config)
    width = model.hidden_size
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * width
    experts = getattr(text, "num_experts_per_tok", None) or 1
    itemsize = torch.finfo(getattr(torch, dtype)).bits // 8
    graph = tokens * itemsize * (14 * width + 6 * inner * experts)
    layers = []
    for spec in model.layers[1:-1]:
        flops = 2 * tokens * spec.num_parameters
        layers.append(LayerCost(graph // 2, graph, graph + spec.numel * itemsize, flops, 3 * flops))
    hidden = tokens * width * itemsize
    head_params = sum(model.layers[index].num_parameters for index in model.head_reads)
    logits = chunk_tokens * model.vocab_size * 4
    flops = 2 * tokens * head_params
    head = LayerCost(2 * logits + hidden, 0, 4 * logits + head_params * itemsize + 3 * hidden, flops, 3 * flops)
    embed = LayerCost(hidden, 0, hidden + model.layers[0].numel * itemsize, 0, 0)
    return StepCost((embed, *layers, head), hidden_bytes=hidden, prologue_bytes=tokens * tokens // 8)
