"""A transformers causal language model as a stream of layers whose weights come and go.

`StreamModel` says which parameters each layer of the stream holds and runs forward and backward one layer at a time. It
holds no weights: each method takes those that it needs, and hands gradients to the caller as they appear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedConfig

from megatrain_ray.errors import ModelError
from megatrain_ray.forward import LayerCall, MicroBatchTensors, PiecewiseForward
from megatrain_ray.layout import decoder_layer_name, pack_layer
from megatrain_ray.skeleton import DTYPES, Skeleton, build_skeleton, read_model_config, text_config

__all__ = ["GradSink", "LayerGraph", "MicroBatchTensors", "Prologue", "StreamModel", "target_rows"]

GradSink = Callable[[str, Tensor], None]
"""Takes a full parameter name and a gradient in compute dtype as soon as it is ready. Add it up in fp32: the head calls
once a chunk. A parameter that got no gradient (an unused expert) is never reported: start from zeros."""


@dataclass(frozen=True, slots=True)
class Prologue:
    """What the decoder layers get for one micro-batch.

    Attributes:
        hidden: [B, S, H] entering the first decoder layer, without a graph.
        calls: The arguments of each decoder layer; equal tensors are one tensor (one mask, one rotary table).
        differentiable: Leaves among those arguments that depend on the prologue's parameters (normally none). Backward
            through the layers adds up their ``grad``, so such a prologue must live until ``prologue_backward``.
    """

    hidden: Tensor
    calls: tuple[LayerCall, ...]
    differentiable: tuple[Tensor, ...]


@dataclass(slots=True)
class LayerGraph:
    """One decoder layer on one micro-batch, ready for backward.

    Attributes:
        output: [B, S, H] with its graph; hand ``output.detach()`` to the next layer.
        hidden: [B, S, H], the leaf at which the graph starts.
        leaves: The parameters as leaves, by full name.
        differentiable: The prologue's leaves.
    """

    output: Tensor
    hidden: Tensor
    leaves: dict[str, Tensor]
    differentiable: tuple[Tensor, ...]


class StreamModel:
    """A model cut into the layers of the stream: ``embed`` (0), decoder layers (from 1), ``head`` (last).

    Built in the driver (layout, equality gate) and in the worker (compute) from the same configuration. All methods
    take ``params``: full parameter names to tensors in compute dtype on ``device``; they are never changed.

    Attributes:
        config: The transformers configuration.
        module: The transformers model, parameters on meta.
        device: Where buffers live and inputs must be.
        layers: Specs in stream order; an empty head (all weights tied) has ``numel`` 0.
        head_reads: Indices of the layers whose parameters the epilogue needs.
        aliases: The other names of each tied parameter, by the name it has in ``layers``.
        constants: Small buffers that belong to the checkpoint (DeepSeek's expert biases), by full name; usually none.
        constants_loaded: Whether `load_constants` has been called, or need not be.
        warnings: What the user should know, one sentence each.
    """

    def __init__(self, skeleton: Skeleton, *, dtype: str, device: str) -> None:
        self.config = skeleton.config
        self.module = skeleton.module
        self.device = torch.device(device)
        self.warnings = skeleton.warnings
        self.constants = {name: self.module.get_buffer(name) for name in skeleton.constants}
        self.constants_loaded = not self.constants
        self._dtype = DTYPES[dtype]
        self._forward = PiecewiseForward(skeleton, self._dtype)
        self.aliases = self._forward.aliases
        shapes = {name: tuple(parameter.shape) for name, parameter in self.module.named_parameters()}
        members = self._split_parameters(shapes)
        self.layers = tuple(
            pack_layer(index, name, [(parameter, shapes[parameter]) for parameter in parameters])
            for index, (name, parameters) in enumerate(members.items())
        )
        embed, head = self.layers[0], self.layers[-1]
        tied = any(tensor.name in self.aliases for tensor in embed.tensors)
        self.head_reads = tuple(spec.index for spec, read in ((embed, tied), (head, head.numel > 0)) if read)
        self._placeholders = {} if tied else {tensor.name: self._zeros(tensor.shape) for tensor in embed.tensors}

    @classmethod
    def from_config_dir(
        cls,
        model_dir: str,
        *,
        dtype: str = "float32",
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        device: str = "cpu",
    ) -> StreamModel:
        """Builds the model from a directory's ``config.json``; see `from_config`."""
        config = read_model_config(model_dir, trust_remote_code=trust_remote_code)
        try:
            return cls.from_config(
                config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                device=device,
            )
        except ModelError as error:
            raise ModelError(f"{Path(model_dir) / 'config.json'}: {error}") from error

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        *,
        dtype: str = "float32",
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        device: str = "cpu",
    ) -> StreamModel:
        """Builds the model without allocating its weights (a 100B model takes a second and little memory).

        Args:
            config: Copied, not changed.
            dtype: Compute dtype: ``float32`` or ``bfloat16``.
            attn_implementation: As in transformers; ``eager``, with a warning, where the model refuses it.
            trust_remote_code: Whether code from the model directory may run.
            device: For buffers and computation.

        Raises:
            ModelError: transformers cannot build it, or it cannot be streamed.
        """
        skeleton = build_skeleton(
            config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            device=device,
        )
        return cls(skeleton, dtype=dtype, device=device)

    @property
    def num_decoder_layers(self) -> int:
        """Layers between ``embed`` and ``head``."""
        return len(self.layers) - 2

    @property
    def hidden_size(self) -> int:
        """Last dimension of the hidden state."""
        return cast(int, text_config(self.config).hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: token ids must be below it."""
        return cast(int, cast(Any, self.module).get_input_embeddings().weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self._dtype

    def train(self, mode: bool = True) -> None:
        """Switches dropout on or off; the model starts with it off."""
        self.module.train(mode)

    def load_constants(self, values: Mapping[str, Tensor]) -> None:
        """Sets the constants; a model that has some computes nothing before.

        Args:
            values: For every name in ``constants``; copied.
        """
        assert values.keys() == self.constants.keys(), f"expected values for {list(self.constants)}"
        for name, value in values.items():
            self.constants[name].copy_(value)
        self.constants_loaded = True

    def check_length(self, length: int) -> None:
        """Whether rows of this many tokens can enter the model: learned positions come to an end.

        Raises:
            ModelError: They cannot.
        """
        zeros = {tensor.name: self._zeros(tensor.shape) for tensor in self.layers[0].tensors}
        tokens = torch.zeros((1, length), dtype=torch.int64, device=self.device)
        try:
            with torch.no_grad():
                self._forward.record(zeros, MicroBatchTensors(tokens))
        except Exception as error:  # an index out of range, or whatever the model checks
            limit = getattr(text_config(self.config), "max_position_embeddings", "unknown")
            raise ModelError(
                f"{self.config.model_type} does not take rows of {length} tokens (max_position_embeddings is {limit}); "
                f"lower data.max_length: {error}"
            ) from error

    def prologue(self, params: Mapping[str, Tensor], batch: MicroBatchTensors) -> Prologue:
        """Runs the model up to its first decoder layer and collects what each decoder layer will be called with.

        Args:
            params: Of layer 0.
            batch: One micro-batch.
        """
        assert self.constants_loaded, f"load_constants has not been called for {list(self.constants)}"
        with torch.enable_grad():  # only to see what depends on the parameters; the graph ends here
            hidden, calls = self._forward.record(_leaves(params), batch)
        leaves = {id(value): value.detach().requires_grad_() for value in _differentiable(calls)}

        def detached(value: Any) -> Any:
            return leaves.get(id(value), value)

        calls = tuple(
            LayerCall(tree_map(detached, call.args), tree_map(detached, call.kwargs), call.hidden_keyword)
            for call in calls
        )
        return Prologue(hidden.detach(), calls, tuple(leaves.values()))

    def layer_forward(self, index: int, params: Mapping[str, Tensor], hidden: Tensor, prologue: Prologue) -> Tensor:
        """Runs one decoder layer without a graph.

        Args:
            index: Of the layer in the stream: 1 is the first decoder layer.
            params: Of that layer.
            hidden: [B, S, H] from the layer before.
            prologue: Of the same micro-batch.

        Returns:
            [B, S, H].
        """
        with torch.no_grad():
            return self._forward.layer(index - 1, params, hidden, prologue.calls[index - 1])

    def layer_graph(self, index: int, params: Mapping[str, Tensor], hidden: Tensor, prologue: Prologue) -> LayerGraph:
        """As `layer_forward`, and keeps what `backward` needs: for layers that do not recompute."""
        leaves = _leaves(params)
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            output = self._forward.layer(index - 1, leaves, hidden, prologue.calls[index - 1])
        return LayerGraph(output, hidden, leaves, prologue.differentiable)

    @staticmethod
    def backward(graph: LayerGraph, grad_output: Tensor, sink: GradSink) -> Tensor:
        """Back-propagates through one layer and frees its graph.

        Args:
            graph: From `layer_graph`.
            grad_output: [B, S, H], gradient of ``graph.output``.
            sink: Takes each parameter's gradient once, as soon as it is ready.

        Returns:
            Gradient of ``graph.hidden``, [B, S, H].
        """
        _backward([graph.output], [grad_output], graph.leaves, sink, (graph.hidden, *graph.differentiable))
        return cast(Tensor, graph.hidden.grad)

    def layer_backward(
        self,
        index: int,
        params: Mapping[str, Tensor],
        hidden: Tensor,
        prologue: Prologue,
        grad_output: Tensor,
        sink: GradSink,
    ) -> Tensor:
        """Recomputes one decoder layer from its input and back-propagates; see `layer_graph` and `backward`."""
        return self.backward(self.layer_graph(index, params, hidden, prologue), grad_output, sink)

    def prologue_backward(
        self,
        params: Mapping[str, Tensor],
        batch: MicroBatchTensors,
        prologue: Prologue,
        grad_hidden: Tensor,
        sink: GradSink,
    ) -> None:
        """Runs the prologue again, with a graph, and back-propagates into the parameters of layer 0.

        Args:
            params: Of layer 0.
            batch: The micro-batch of ``prologue``.
            prologue: Went through the backward of every decoder layer.
            grad_hidden: [B, S, H], gradient of ``prologue.hidden``.
            sink: Takes each parameter's gradient once.
        """
        leaves = _leaves(params)
        with torch.enable_grad():
            hidden, calls = self._forward.record(leaves, batch)
        pairs = [(hidden, grad_hidden)]
        for value, leaf in zip(_differentiable(calls), prologue.differentiable, strict=True):
            if leaf.grad is not None:
                pairs.append((value, leaf.grad))
        _backward([value for value, _ in pairs], [grad for _, grad in pairs], leaves, sink, ())

    def epilogue_logits(self, params: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Logits of token positions, exactly as the model's forward returns them.

        Args:
            params: Of all layers in ``head_reads``.
            hidden: [N, H], any rows of the last decoder layer's output: the epilogue works token by token.

        Returns:
            [N, V]. Differentiable where grad mode is on.
        """
        return self._forward.replay({**self._placeholders, **params}, hidden)

    def head_loss(
        self,
        params: Mapping[str, Tensor],
        hidden: Tensor,
        targets: Tensor,
        *,
        normalizer: float,
        label_smoothing: float = 0.0,
        chunk_tokens: int,
    ) -> Tensor:
        """The loss of `head_backward` alone, for evaluation."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.no_grad():
            for start in range(0, hidden.shape[0], chunk_tokens):
                part = slice(start, start + chunk_tokens)
                logits = self.epilogue_logits(params, hidden[part])
                total += _cross_entropy(logits, targets[part], normalizer, label_smoothing)
        return total

    def head_backward(
        self,
        params: Mapping[str, Tensor],
        hidden: Tensor,
        targets: Tensor,
        *,
        normalizer: float,
        label_smoothing: float = 0.0,
        chunk_tokens: int,
        sink: GradSink,
    ) -> tuple[Tensor, Tensor]:
        """Loss and gradients of the epilogue, a chunk of tokens at a time: the logits are never whole.

        Args:
            params: Of all layers in ``head_reads``.
            hidden: [N, H], the last decoder layer's output at the positions that have a target.
            targets: int64 [N].
            normalizer: Target tokens of the whole optimizer step; the loss is the sum of token losses divided by it.
            label_smoothing: As in ``torch.nn.functional.cross_entropy``.
            chunk_tokens: Tokens whose logits exist at the same time.
            sink: Takes gradients once a chunk.

        Returns:
            The loss, a float64 scalar on the device (not synchronized), and the gradient of ``hidden``, [N, H].
        """
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            leaves = _leaves(params)
            rows = hidden[part].detach().requires_grad_()
            with torch.enable_grad():
                loss = _cross_entropy(self.epilogue_logits(leaves, rows), targets[part], normalizer, label_smoothing)
            total += loss.detach()
            _backward([loss], [torch.ones_like(loss)], leaves, sink, (rows,))
            grad_hidden[part] = cast(Tensor, rows.grad)
        return total, grad_hidden

    def _split_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
        """Which parameters each layer of the stream holds, tied ones once.

        What the prologue uses is found by a run over two tokens with weights of zeros that take no memory. The rest
        outside of the decoder layers is the head's.
        """
        prefixes = [f"{name}." for name in self._forward.layer_names]
        decoder = [[name for name in shapes if name.startswith(prefix)] for prefix in prefixes]
        inside = {name for names in decoder for name in names}
        for name, others in self.aliases.items():
            if any(each.startswith(tuple(prefixes)) for each in (name, *others)):
                raise ModelError(
                    f"{self.config.model_type} uses {name} again as {', '.join(others)}: weights shared with or "
                    "between decoder layers are not supported"
                )
        leaves = {name: self._zeros(()).requires_grad_() for name in shapes if name not in inside}
        expanded = {name: leaf.expand(shapes[name]) for name, leaf in leaves.items()}
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        used = _leaves_behind(self._forward.learn_outputs(expanded, MicroBatchTensors(tokens)))
        embed = [name for name, leaf in leaves.items() if leaf in used]
        head = [name for name, leaf in leaves.items() if leaf not in used]
        return {"embed": embed, **{decoder_layer_name(i): names for i, names in enumerate(decoder)}, "head": head}

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros that take the memory of one element: a parameter whose value does not matter."""
        return torch.zeros((), dtype=self._dtype, device=self.device).expand(shape)


def target_rows(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where the targets of a micro-batch are.

    Args:
        labels: int64 [B, S], unshifted, -100 where there is no target. Position 0 is predicted by nothing.

    Returns:
        Row indices into ``hidden.flatten(0, 1)`` and the token each must predict, both int64 [N].
    """
    shifted = torch.full_like(labels, -100)
    shifted[:, :-1] = labels[:, 1:]
    rows = (shifted.flatten() != -100).nonzero().squeeze(1)
    return rows, shifted.flatten()[rows]


def _cross_entropy(logits: Tensor, targets: Tensor, normalizer: float, label_smoothing: float) -> Tensor:
    """Sum of token losses over ``normalizer`` in fp32: transformers' ForCausalLMLoss with ``num_items_in_batch``."""
    total = nn.functional.cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=label_smoothing)
    return total / normalizer


def _leaves(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same storage as leaves that require a gradient."""
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def _differentiable(calls: Sequence[LayerCall]) -> list[Tensor]:
    """Tensors among the arguments of layers that carry a gradient, each once, in a fixed order."""
    values = tree_leaves([(call.args, call.kwargs) for call in calls])
    return list({id(value): value for value in values if isinstance(value, Tensor) and value.requires_grad}.values())


def _backward(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    leaves: Mapping[str, Tensor],
    sink: GradSink,
    others: tuple[Tensor, ...],
) -> None:
    """Back-propagates; parameter gradients go to ``sink`` as they appear, those of ``others`` to their ``grad``."""

    def deliver(name: str, leaf: Tensor) -> None:
        grad = cast(Tensor, leaf.grad)
        leaf.grad = None
        sink(name, grad)

    for name, leaf in leaves.items():
        cast(Any, leaf).register_post_accumulate_grad_hook(partial(deliver, name))
    torch.autograd.backward(outputs, grads, inputs=[*leaves.values(), *others])


def _leaves_behind(outputs: Sequence[Tensor]) -> set[Tensor]:
    """Leaves that the graphs of these tensors reach."""
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(pending)
    leaves: set[Tensor] = set()
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):  # the node of a leaf
            leaves.add(node.variable)
        fresh = [parent for parent, _ in node.next_functions if parent is not None and parent not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return leaves
