"""Runs a transformers model piece by piece through its own ``forward``.

    prologue   a recorder in place of each decoder layer keeps that layer's arguments; the last one stops the run
    layers     called one by one with those arguments
    epilogue   recorders that return the true final hidden state; the run goes on through norm, head and soft-cap

Weights are arguments, bound with ``torch.func.functional_call``; nothing here holds any or knows about gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatrain_ray.errors import ModelError
from megatrain_ray.skeleton import Skeleton


@dataclass(frozen=True, slots=True)
class MicroBatchTensors:
    """One micro-batch on the model's device.

    Attributes:
        input_ids: int64 [B, S].
        attention_mask: int64 [B, S], 0 at padding; None when there is none.
        position_ids: int64 [B, S]; packed rows start again at 0 in each sample (and have no attention mask).
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How the model calls one decoder layer: its arguments without the hidden state.

    Attributes:
        args: Positional arguments after the hidden state (all of them when the hidden state is a keyword).
        kwargs: Keyword arguments.
        hidden_keyword: Name under which the hidden state goes in; None: as the first positional argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_keyword: str | None

    def arguments(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The full arguments for this hidden state."""
        if self.hidden_keyword is None:
            return (hidden, *self.args), self.kwargs
        return self.args, {**self.kwargs, self.hidden_keyword: hidden}


class _PrologueDone(Exception):
    """Stops the model's forward at the last decoder layer."""


class PiecewiseForward:
    """The pieces of a model's forward as functions of its parameters.

    Each decoder layer's own module on the meta device is its template, so layers that differ in configuration or
    buffers never share one.

    Attributes:
        model_type: For messages.
        module: The model, parameters on meta.
        layer_names: Full module name of each decoder layer.
        aliases: The other names of each tied parameter, by its first name.
    """

    def __init__(self, skeleton: Skeleton, dtype: torch.dtype) -> None:
        self.model_type: str = skeleton.config.model_type
        self.module = skeleton.module
        self.layer_names = tuple(name for name, _ in skeleton.decoder_layers)
        self.aliases = _aliases(skeleton.module)
        self._layers = tuple(layer for _, layer in skeleton.decoder_layers)
        self._hidden_keywords = tuple(next(iter(inspect.signature(layer.forward).parameters)) for layer in self._layers)
        self._upcast = {name for name, parameter in self.module.named_parameters() if parameter.dtype != dtype}
        self._tuple_outputs = False

    def record(self, params: Mapping[str, Tensor], batch: MicroBatchTensors) -> tuple[Tensor, tuple[LayerCall, ...]]:
        """Runs the prologue.

        Returns:
            The hidden state that enters the first decoder layer, [B, S, H], and how each layer is called.

        Raises:
            ModelError: The model does more between its decoder layers than hand on the hidden state.
        """
        calls: list[LayerCall] = []
        entering: list[Tensor] = []

        def record(position: int, *args: Any, **kwargs: Any) -> Any:
            keyword = None if args else self._hidden_keywords[position]
            hidden = args[0] if keyword is None else kwargs.pop(keyword)
            entering.append(hidden)
            if position != len(calls) or hidden is not entering[0]:
                raise ModelError(
                    f"{self.model_type} computes between its decoder layers (before layer {position}); "
                    "it cannot be run layer by layer"
                )
            calls.append(LayerCall(args[1:], kwargs, keyword))
            if len(calls) == len(self._layers):
                raise _PrologueDone
            return self._as_output(hidden)

        given = {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
        with self._recorders(record):
            try:
                self._run(params, {key: value for key, value in given.items() if value is not None}, batch.input_ids)
            except _PrologueDone:
                return entering[0], tuple(calls)
        raise ModelError(
            f"{self.model_type} called {len(calls)} of its {len(self._layers)} decoder layers; "
            "it cannot be run layer by layer"
        )

    def layer(self, position: int, params: Mapping[str, Tensor], hidden: Tensor, call: LayerCall) -> Tensor:
        """Runs one decoder layer.

        Args:
            position: Among the decoder layers, from 0.
            params: Of that layer, by full name.
            hidden: [B, S, H].
            call: Its other arguments.

        Returns:
            [B, S, H].
        """
        prefix = len(self.layer_names[position]) + 1
        local = {name[prefix:]: value for name, value in self._cast(params).items()}
        args, kwargs = call.arguments(hidden)
        output = torch.func.functional_call(self._layers[position], local, args, kwargs, tie_weights=False)
        return cast(Tensor, output[0] if isinstance(output, tuple) else output)

    def replay(self, params: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Runs the epilogue on token positions, [N, H] to logits [N, V], exactly as the model returns them."""
        rows = hidden.unsqueeze(1)  # N sequences of one token: masks and position tables stay tiny
        last = len(self._layers) - 1

        def replay(position: int, *_: Any, **__: Any) -> Any:
            return self._as_output(rows if position == last else rows.detach())

        with self._recorders(replay):
            ids = torch.zeros(rows.shape[:2], dtype=torch.int64, device=rows.device)
            return cast(Tensor, self._run(params, {}, ids).logits).squeeze(1)

    def learn_outputs(self, params: Mapping[str, Tensor], batch: MicroBatchTensors) -> list[Tensor]:
        """Finds out whether decoder layers return a tensor or a tuple, by trying; returns all tensors that reach them.

        Raises:
            ModelError: With neither can the prologue be recorded.
        """
        failures: list[Exception] = []
        for self._tuple_outputs in (False, True):
            try:
                hidden, calls = self.record(params, batch)
            except Exception as error:  # whatever a model's forward does with an output of the wrong kind
                failures.append(error)
            else:
                leaves = tree_leaves([(call.args, call.kwargs) for call in calls])
                return [hidden, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        if isinstance(failures[0], ModelError):
            raise failures[0]
        raise ModelError(f"{self.model_type}: its forward cannot be recorded: {failures[0]}") from failures[0]

    def _run(self, params: Mapping[str, Tensor], inputs: dict[str, Tensor], input_ids: Tensor) -> Any:
        bound = {
            alias: value for name, value in self._cast(params).items() for alias in (name, *self.aliases.get(name, ()))
        }
        arguments = {"input_ids": input_ids, **inputs, "use_cache": False, "return_dict": True}
        return torch.func.functional_call(self.module, bound, (), arguments, tie_weights=False)

    @contextmanager
    def _recorders(self, recorder: Callable[..., Any]) -> Iterator[None]:
        """Replaces each decoder layer's forward by ``recorder(position, *args, **kwargs)``; its attributes stay."""
        for position, layer in enumerate(self._layers):
            layer.forward = _at_position(recorder, position)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def _as_output(self, hidden: Tensor) -> Any:
        """What a decoder layer of this model would return: the hidden state, in some families first in a tuple."""
        return (hidden, None) if self._tuple_outputs else hidden

    def _cast(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Casts the parameters that the library computes with in fp32 whatever the model's dtype."""
        if not self._upcast:
            return params
        return {name: value.float() if name in self._upcast else value for name, value in params.items()}


def _at_position(recorder: Callable[..., Any], position: int) -> Callable[..., Any]:
    return lambda *args, **kwargs: recorder(position, *args, **kwargs)


def _aliases(module: nn.Module) -> dict[str, Sequence[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}
