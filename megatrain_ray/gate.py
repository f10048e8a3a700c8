"""The equality gate: a shrunken model of the same configuration, streamed and plain, must give the same numbers.

It also finds out where an architecture uses the parameters outside its decoder layers (`Roles`). A model that cannot
pass is refused before anything is written: better no training than wrong training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatrain_ray.errors import ModelError
from megatrain_ray.model import MicroBatchTensors, StreamModel, find_decoder_layers, meta_model
from megatrain_ray.recipe import Roles

__all__ = ["check_equality", "shrink"]

TOLERANCE = 1e-4
"""Largest difference of a gradient, relative to the tensor's largest: room for another order of sums, no more."""

UNSHRUNKEN_LIMIT = 300_000_000
"""Parameters up to which a configuration that cannot be made narrower is tried as it is, with fewer layers."""

_WIDTHS = {
    "vocab_size": 199,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "sliding_window": 5,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "attention_chunk_size": 8,
}
"""What a configuration's sizes become; smaller ones and absent ones stay."""

_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def check_equality(config: Any, *, attn_implementation: str, trust_remote_code: bool = False) -> Roles:
    """Compares streamed and plain training of a small model with this configuration's architecture.

    Args:
        config: A transformers configuration; not changed.
        attn_implementation: As it will be used.
        trust_remote_code: As it will be used.

    Returns:
        How the architecture uses its parameters.

    Raises:
        ModelError: Loss or a gradient differs, or the architecture cannot be streamed; the message says why.
    """
    options: dict[str, Any] = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    failures: list[str] = []
    for small in _candidates(config):
        # The caller's random numbers stay as they are.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                small_config: Any = meta_model(small, dtype="float32", **options).config
                plain = AutoModelForCausalLM.from_config(
                    small,
                    attn_implementation=small_config._attn_implementation,
                    dtype=torch.float32,
                    trust_remote_code=trust_remote_code,
                ).eval()
                _spread(plain)
                batches = list(_batches(small))
                loss, gradients = _plain(plain, batches)
            except ModelError:
                raise
            except Exception as error:  # whatever a foreign model does with sizes that it was not made for
                failures.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
                continue
            roles = _find_roles(plain, batches[0][0])
            streamed = StreamModel(meta_model(small, dtype="float32", **options), roles)
            streamed.train(False)
            _compare(loss, gradients, *_streamed(streamed, plain, batches))
            return roles
    raise ModelError(
        f"{type(config).__name__}: no small model of this configuration could be run, so exactness cannot be checked: "
        + "; ".join(failures)
    )


def shrink(config: Any, *, narrow: bool) -> Any:
    """A copy with fewer layers (every kind of layer stays) and, with ``narrow``, small widths."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kinds = getattr(text, "layer_types", None)
    first_of_kind = max((list(kinds).index(kind) for kind in set(kinds)), default=0) if kinds else 0
    num_layers = min(text.num_hidden_layers, max(3, first_of_kind + 1))
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:
            setattr(text, name, type(value)(value[:num_layers]))
    text.num_hidden_layers = num_layers
    for part in {id(small): small, id(text): text}.values():
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False
    if narrow:
        _narrow(text)
        for name in _TOKENS:
            for part in (small, text):
                if getattr(part, name, None) is not None:
                    setattr(part, name, 1)
    return small


def _narrow(text: Any) -> None:
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    new_groups = min(groups, 2)
    new_heads = new_groups * min(heads // groups, 2) if heads % groups == 0 else heads
    explicit_head_dim = "head_dim" in vars(text) and text.head_dim is not None
    head_dim = min(text.head_dim if explicit_head_dim else text.hidden_size // heads, 16)
    text.num_attention_heads = new_heads
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = new_groups
    if explicit_head_dim:
        text.head_dim = head_dim
    text.hidden_size = new_heads * head_dim
    for name, size in _WIDTHS.items():
        value = getattr(text, name, None)
        if isinstance(value, int) and value > size:
            setattr(text, name, size)


def _candidates(config: Any) -> Iterator[Any]:
    yield shrink(config, narrow=True)
    wide = shrink(config, narrow=False)
    try:
        size = sum(
            param.numel() for param in meta_model(wide, dtype="float32", attn_implementation="eager").parameters()
        )
    except ModelError:
        return
    if size <= UNSHRUNKEN_LIMIT:
        yield wide


def _spread(model: nn.Module) -> None:
    """Makes weights large enough that a mistake anywhere shows, and no two norms or biases alike."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)


def _batches(config: Any) -> Iterator[tuple[MicroBatchTensors, Tensor]]:
    """Two micro-batches with padding and uneven targets; labels [B, S], unshifted."""
    vocabulary = config.get_text_config().vocab_size
    for lengths in ((11, 7), (3, 9)):
        ids = torch.randint(2, vocabulary, (2, max(lengths)))
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        labels = torch.where(mask.bool(), ids, -100)
        labels[0, :2] = -100
        yield MicroBatchTensors(ids, mask), labels


def _plain(model: nn.Module, batches: list[tuple[MicroBatchTensors, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    total = torch.zeros(())
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batches)
    for batch, labels in batches:
        logits = model(**batch.kwargs()).logits[:, :-1].float()
        total = total + nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
    (total / count).backward()
    gradients = {
        name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in model.named_parameters()
    }
    return float(total.detach()) / count, gradients


def _find_roles(model: nn.Module, batch: MicroBatchTensors) -> Roles:
    """Runs the plain model once and follows the graph between its ends and its decoder layers."""
    path, layers = find_decoder_layers(model)
    outer = {name: param for name, param in model.named_parameters() if not name.startswith(f"{path}.")}
    entered: list[Tensor] = []
    left: list[Tensor] = []
    lengths: set[int] = set()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        lengths.add(len(output) if isinstance(output, tuple) else 0)
        hidden = (output[0] if isinstance(output, tuple) else output).detach().requires_grad_()
        left.append(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        logits = model(**batch.kwargs()).logits
    finally:
        for hook in hooks:
            hook.remove()
    if len(lengths) != 1 or len(entered) != len(layers):
        raise ModelError(
            f"{type(model).__name__} cannot be streamed: its decoder layers are not called alike, once each"
        )

    def reached(output: Tensor) -> frozenset[str]:
        if not output.requires_grad:
            return frozenset()
        found = torch.autograd.grad(output.sum(), list(outer.values()), allow_unused=True, retain_graph=True)
        return frozenset(name for name, gradient in zip(outer, found, strict=True) if gradient is not None)

    return Roles(reached(entered[0]), reached(logits), lengths.pop())


def _streamed(
    model: StreamModel, plain: nn.Module, batches: list[tuple[MicroBatchTensors, Tensor]]
) -> tuple[float, dict[str, Tensor]]:
    """The same step as `_plain`, layer by layer, with the same weights."""
    weights = {name: param.detach() for name, param in plain.named_parameters()}
    params = [{tensor.name: weights[tensor.name] for tensor in spec.tensors} for spec in model.layers]
    head_params = {name: tensor for index in model.head_reads for name, tensor in params[index].items()}
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batches)
    gradients = {name: torch.zeros_like(param) for name, param in weights.items()}
    loss = 0.0

    def add(found: dict[str, Tensor | None]) -> None:
        for name, gradient in found.items():
            if gradient is not None:
                gradients[name] += gradient

    for batch, labels in batches:
        prologue = model.prologue(params[0], batch)
        hidden, inputs = prologue.hidden, []
        with torch.no_grad():
            for layer in range(1, len(model.layers) - 1):
                inputs.append(hidden)
                hidden = model.layer_forward(layer, params[layer], hidden, prologue)
        chosen = (labels[:, 1:] != -100).nonzero(as_tuple=True)
        part, grad_rows, found = model.head_backward(
            head_params, hidden[chosen], labels[:, 1:][chosen], target_tokens=count
        )
        loss += float(part)
        add(found)
        grad_hidden = torch.zeros_like(hidden)
        grad_hidden[chosen] = grad_rows
        for layer in range(len(model.layers) - 2, 0, -1):
            graph = model.layer_with_graph(layer, params[layer], inputs[layer - 1], prologue)
            grad_hidden, found = graph.backward(grad_hidden)
            add(found)
        add(model.prologue_backward(params[0], batch, prologue, grad_hidden))
    return loss, gradients


def _compare(loss: float, gradients: dict[str, Tensor], got_loss: float, got: dict[str, Tensor]) -> None:
    if not abs(loss - got_loss) <= TOLERANCE * abs(loss):
        raise ModelError(f"equality gate: the streamed loss is {got_loss:.7g}, the plain model's {loss:.7g}; refused")
    for name, expected in gradients.items():
        scale = float(expected.abs().max())
        difference = float((got[name] - expected).abs().max())
        if not difference <= TOLERANCE * max(scale, 1e-6):
            raise ModelError(
                f"equality gate: the gradient of {name} differs by {difference:.3g} (largest element {scale:.3g}) from "
                "the plain model's; this architecture cannot be streamed exactly and is refused"
            )
