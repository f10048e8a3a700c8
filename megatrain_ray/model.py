"""A transformers causal language model as a stream of layers, through the model's own forward.

The model lives on the meta device: no parameter has memory, buffers (rotary tables, causal masks) are real. Its forward
runs twice with each decoder layer replaced by a recorder:

* *prologue*: embeddings, scaling, masks and rotary tables are made; each recorder keeps the exact arguments of its
  layer; the last one ends the forward.
* *epilogue*: the last recorder returns the true final hidden state, for norm, head, soft-cap.

In between, each decoder layer's own module is called with its recorded arguments and streamed weights
(`torch.func.functional_call`). Nothing of an architecture is rewritten.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from megatrain_ray.errors import ModelError
from megatrain_ray.layout import LayerSpec, decoder_layer_name, pack_layer
from megatrain_ray.recipe import Roles

__all__ = ["LayerGraph", "MicroBatchTensors", "Prologue", "StreamModel", "load_model_config", "meta_model"]


@dataclass(frozen=True, slots=True)
class MicroBatchTensors:
    """Inputs of the model's forward.

    Attributes:
        input_ids: int64 [B, S].
        attention_mask: int64 [B, S], 0 on padding; None when there is none.
        position_ids: int64 [B, S]; None for 0, 1, 2, ... in every row. Restarting positions separate packed samples.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the forward."""
        given = {"attention_mask": self.attention_mask, "position_ids": self.position_ids}
        present = {name: value for name, value in given.items() if value is not None}
        return {"input_ids": self.input_ids, "use_cache": False, **present}


@dataclass(slots=True)
class Prologue:
    """What the decoder layers of one micro-batch are called with.

    Attributes:
        hidden: [B, S, H], what enters the first decoder layer.
        calls: Positional and keyword arguments of each decoder layer, hidden state left out; layers share the tensors.
        extras: Tensors among them, other than the hidden state, through which a gradient flows (leaves).
        extra_grads: Their gradients so far.
    """

    hidden: Tensor
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    extras: list[Tensor] = field(default_factory=list)
    extra_grads: list[Tensor | None] = field(default_factory=list)


class _PrologueDone(Exception):
    """Ends the model's forward once the last layer's arguments are known."""


def load_model_config(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """Reads ``config.json`` of a directory or hub id.

    Raises:
        ModelError: There is none, or it names an architecture that transformers does not know.
    """
    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model.name_or_path {name_or_path}: cannot read its config.json: {first}; "
            "give a directory with config.json, or a hub id"
        ) from error


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter registered inside loses its memory at once; buffers keep theirs."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        registered = module._parameters[name]
        if registered is not None and registered.device.type != "meta":
            module._parameters[name] = nn.Parameter(registered.to("meta"), requires_grad=registered.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def meta_model(config: Any, *, dtype: str, attn_implementation: str, trust_remote_code: bool = False) -> nn.Module:
    """The model of a configuration with parameters on meta and real buffers.

    An attention implementation that the model refuses is replaced by ``eager``, with a warning.

    Raises:
        ModelError: transformers has no causal language model for this configuration.
    """
    options = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}

    def build(attention: str) -> nn.Module:
        with _parameters_on_meta(), no_init_weights():
            model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **options)
        model.tie_weights()  # type: ignore[operator]
        return model

    try:
        try:
            return build(attn_implementation)
        except (ValueError, ImportError) as error:
            if attn_implementation == "eager" or "attention" not in str(error).lower():
                raise
            warnings.warn(f"attn_implementation {attn_implementation} refused, using eager: {error}", stacklevel=2)
            return build("eager")
    except (ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"model_type {getattr(config, 'model_type', '?')!r} ({', '.join(config.architectures or ['?'])}) is no "
            f"causal language model that transformers can build: {str(error).splitlines()[0]}"
        ) from error


def find_decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The module list of the decoder layers, and its name.

    Raises:
        ModelError: There is not exactly one list as long as ``num_hidden_layers``.
    """
    config: Any = model.config
    num_layers = config.get_text_config().num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    outer = [(name, module) for name, module in found if not any(name.startswith(f"{other}.") for other, _ in found)]
    if len(outer) != 1:
        names = ", ".join(name for name, _ in outer) or "none"
        raise ModelError(
            f"{type(model).__name__} cannot be streamed: it must have exactly one list of {num_layers} decoder layers "
            f"(num_hidden_layers); found {names}"
        )
    return outer[0]


class StreamModel:
    """One model, its layers' layouts, and how to run each.

    Args:
        model: From `meta_model`.
        roles: Of the parameters outside the decoder layers.
        device: Where buffers are, and computation happens.

    Attributes:
        layers: ``embed``, the decoder layers, ``head``.
        head_reads: Layers whose weights the epilogue uses.
    """

    def __init__(self, model: nn.Module, roles: Roles, device: torch.device | str = "cpu") -> None:
        self.model = model.train()
        self.config: Any = model.config
        self.roles = roles
        self.device = torch.device(device)
        self._path, self._decoder_layers = find_decoder_layers(model)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        self.layers = self._lay_out()
        self._outer_shapes = {
            name: (param.shape, param.dtype) for name, param in model.named_parameters() if not self._inside(name)
        }
        head = len(self.layers) - 1
        reads_embed = any(tensor.name in roles.epilogue for tensor in self.layers[0].tensors)
        self.head_reads = (*((0,) if reads_embed else ()), *((head,) if self.layers[head].numel else ()))

    def _inside(self, name: str) -> bool:
        return name.startswith(f"{self._path}.")

    def _lay_out(self) -> tuple[LayerSpec, ...]:
        shapes = {name: tuple(param.shape) for name, param in self.model.named_parameters()}
        outer = {name: shape for name, shape in shapes.items() if not self._inside(name)}
        embed = [(name, shape) for name, shape in outer.items() if name in self.roles.prologue]
        head = [(name, shape) for name, shape in outer.items() if name not in self.roles.prologue]
        specs = [pack_layer(0, "embed", embed)]
        for index in range(len(self._decoder_layers)):
            prefix = f"{self._path}.{index}."
            own = [(name, shape) for name, shape in shapes.items() if name.startswith(prefix)]
            specs.append(pack_layer(index + 1, decoder_layer_name(index), own))
        specs.append(pack_layer(len(specs), "head", head))
        return tuple(specs)

    def train(self, mode: bool) -> None:
        """Dropout on or off."""
        self.model.train(mode)

    # --- prologue -------------------------------------------------------------------------------------------------

    def prologue(self, params: Mapping[str, Tensor], batch: MicroBatchTensors) -> Prologue:
        """Runs what comes before the first decoder layer.

        Args:
            params: Weights of ``embed``.
            batch: One micro-batch on the device.

        Returns:
            Detached from the graph of the prologue itself.
        """
        with torch.enable_grad():
            hidden, calls = self._record(self._requiring_grad(params), batch)
        extras: dict[int, Tensor] = {}

        def detach(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.requires_grad and id(value) not in extras:
                extras[id(value)] = value.detach().requires_grad_()
            return extras.get(id(value), value)

        detached = [tree_map(detach, call) for call in calls]
        return Prologue(hidden.detach(), detached, list(extras.values()), [None] * len(extras))

    def prologue_backward(
        self, params: Mapping[str, Tensor], batch: MicroBatchTensors, prologue: Prologue, grad_hidden: Tensor
    ) -> dict[str, Tensor | None]:
        """Gradients of the weights of ``embed``; runs the prologue again."""
        leaves = self._requiring_grad(params)
        with torch.enable_grad():
            hidden, calls = self._record(leaves, batch)
        outputs: dict[int, Tensor] = {}

        def collect(value: Any) -> Any:
            if isinstance(value, Tensor) and value.requires_grad:
                outputs.setdefault(id(value), value)
            return value

        tree_map(collect, calls)
        pairs = [(hidden, grad_hidden)]
        pairs += [
            (out, grad) for out, grad in zip(outputs.values(), prologue.extra_grads, strict=True) if grad is not None
        ]
        gradients = torch.autograd.grad(
            [out for out, _ in pairs], list(leaves.values()), [grad for _, grad in pairs], allow_unused=True
        )
        return dict(zip(leaves, gradients, strict=True))

    def _record(
        self, params: Mapping[str, Tensor], batch: MicroBatchTensors
    ) -> tuple[Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        entered: list[Tensor] = []

        def recorder(index: int) -> Callable[..., Any]:
            def record(*args: Any, **kwargs: Any) -> Any:
                hidden, rest, keywords = _split_hidden(args, kwargs)
                entered.append(hidden)
                calls.append((rest, keywords))
                if index == len(self._decoder_layers) - 1:
                    raise _PrologueDone
                return self._as_output(hidden)

            return record

        with self._recording(recorder), contextlib.suppress(_PrologueDone):
            functional_call(self.model, dict(params), (), batch.kwargs())
        return entered[0], calls

    # --- decoder layers -------------------------------------------------------------------------------------------

    def layer_forward(self, layer: int, params: Mapping[str, Tensor], hidden: Tensor, prologue: Prologue) -> Tensor:
        """One decoder layer.

        Args:
            layer: Index in the stream, from 1.
            params: The layer's weights by full name.
            hidden: [B, S, H], what enters it.
            prologue: Of the same micro-batch.

        Returns:
            [B, S, H], what leaves it.
        """
        prefix = len(f"{self._path}.{layer - 1}.")
        args, kwargs = prologue.calls[layer - 1]
        local = {name[prefix:]: tensor for name, tensor in params.items()}
        output = functional_call(self._decoder_layers[layer - 1], local, (hidden, *args), kwargs)
        left: Tensor = output[0] if isinstance(output, tuple) else output
        return left

    def layer_with_graph(
        self, layer: int, params: Mapping[str, Tensor], hidden: Tensor, prologue: Prologue
    ) -> LayerGraph:
        """`layer_forward` that can be differentiated later."""
        entered = hidden.detach().requires_grad_()
        leaves = self._requiring_grad(params)
        with torch.enable_grad():
            output = self.layer_forward(layer, leaves, entered, prologue)
        return LayerGraph(entered, leaves, output, prologue)

    # --- epilogue -------------------------------------------------------------------------------------------------

    def logits(self, params: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Logits [N, V] of last hidden states ``rows`` [N, H], as the model computes them."""
        count = rows.shape[0]

        def recorder(index: int) -> Callable[..., Any]:
            last = index == len(self._decoder_layers) - 1

            def give(*args: Any, **kwargs: Any) -> Any:
                return self._as_output(rows.unsqueeze(1) if last else _split_hidden(args, kwargs)[0])

            return give

        # Each row is a sequence of one token: what follows the layers works on tokens, and no position is out of range.
        batch = MicroBatchTensors(torch.zeros(count, 1, dtype=torch.int64, device=rows.device))
        with self._recording(recorder):
            output = functional_call(self.model, {**self._placeholders(params), **params}, (), batch.kwargs())
        logits: Tensor = output.logits
        return logits.squeeze(1)

    def head_backward(
        self,
        params: Mapping[str, Tensor],
        rows: Tensor,
        targets: Tensor,
        *,
        target_tokens: int,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
        """Loss of some target tokens and its gradient.

        Args:
            params: Weights of `head_reads`.
            rows: [N, H], the last hidden states that predict ``targets`` [N].
            targets: Token ids.
            target_tokens: Of the whole optimizer step: the loss is a sum divided by it.
            label_smoothing: As in `torch.nn.functional.cross_entropy`.

        Returns:
            The loss (fp32 scalar), its gradient with respect to ``rows``, and with respect to each weight.
        """
        entered = rows.detach().requires_grad_()
        leaves = self._requiring_grad(params)
        with torch.enable_grad():
            loss = self.loss(leaves, entered, targets, label_smoothing) / target_tokens
        grad_rows, *gradients = torch.autograd.grad(loss, [entered, *leaves.values()], allow_unused=True)
        return loss.detach(), grad_rows, dict(zip(leaves, gradients, strict=True))

    def loss(self, params: Mapping[str, Tensor], rows: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Summed cross entropy of ``targets`` [N], in fp32 as transformers computes it."""
        logits = self.logits(params, rows).float()
        return nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)

    # --- internals ------------------------------------------------------------------------------------------------

    def _placeholders(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zeros without memory for what the epilogue runs through but does not depend on (an untied embedding)."""
        return {
            name: torch.zeros((), dtype=dtype, device=self.device).expand(shape)
            for name, (shape, dtype) in self._outer_shapes.items()
            if name not in params
        }

    @staticmethod
    def _requiring_grad(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().requires_grad_() for name, tensor in params.items()}

    def _as_output(self, hidden: Tensor) -> Any:
        count = self.roles.layer_outputs
        return (hidden, *[None] * (count - 1)) if count else hidden

    @contextlib.contextmanager
    def _recording(self, recorder: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        """Replaces the forward of each decoder layer; its other attributes stay."""
        for index, layer in enumerate(self._decoder_layers):
            layer.forward = recorder(index)
        try:
            yield
        finally:
            for layer in self._decoder_layers:
                del layer.forward


@dataclass(slots=True)
class LayerGraph:
    """One decoder layer's forward of one micro-batch, kept for its backward."""

    entered: Tensor
    leaves: dict[str, Tensor]
    output: Tensor
    prologue: Prologue

    def backward(self, grad_output: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Gradients of what entered the layer and of its weights (None: unused); those of extras are added up."""
        extras = self.prologue.extras
        inputs = [self.entered, *extras, *self.leaves.values()]
        grad_entered, *rest = torch.autograd.grad(self.output, inputs, grad_output, allow_unused=True)
        for index, grad in enumerate(rest[: len(extras)]):
            so_far = self.prologue.extra_grads[index]
            self.prologue.extra_grads[index] = grad if so_far is None else so_far if grad is None else so_far + grad
        return grad_entered, dict(zip(self.leaves, rest[len(extras) :], strict=True))


def _split_hidden(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden state among a decoder layer's arguments, and the others."""
    keywords = dict(kwargs)
    if args:
        return args[0], tuple(args[1:]), keywords
    return keywords.pop("hidden_states"), (), keywords
