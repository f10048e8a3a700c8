"""The equality gate: a shrunken model of the same configuration must give the plain model's loss and every gradient.

What cannot be run exactly layer by layer (state shared between layers, an epilogue that mixes tokens, parameters read
in two places) shows up here as a difference, and is refused instead of trained wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from megatrain_ray.errors import ModelError
from megatrain_ray.model import MicroBatchTensors, StreamModel, target_rows
from megatrain_ray.shrink import shrink_config
from megatrain_ray.skeleton import causal_lm

MAX_PARAMETERS = 50_000_000
"""A model larger than this is not compared: its widths could not be shrunk."""


@dataclass(frozen=True, slots=True)
class LabelledBatch:
    """A micro-batch with unshifted labels, int64 [B, S], -100 where there is no target."""

    inputs: MicroBatchTensors
    labels: Tensor


def check_equality(
    config: PreTrainedConfig,
    *,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    tolerance: float = 1e-5,
) -> None:
    """Compares the streamed with the plain model on a shrunken configuration, on the CPU in fp32.

    Args:
        config: Of the model to train; copied, not changed.
        attn_implementation: What training will use; one that needs a GPU is replaced by ``sdpa``.
        trust_remote_code: Whether code from the model directory may run.
        tolerance: Largest difference allowed, relative to the largest element of each tensor.

    Raises:
        ModelError: They differ, or nothing small enough to compare could be built.
    """
    if attn_implementation not in ("eager", "sdpa"):
        attn_implementation = "sdpa"
    options: dict[str, Any] = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, plain, batches, expected = _comparable(config, options)
        params = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        model.load_constants({name: plain.get_buffer(name) for name in model.constants})
        try:
            got = streamed_gradients(model, params, batches, chunk_tokens=4)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{config.model_type} cannot be run layer by layer: {error}") from error
    _compare(config.model_type, got, expected, tolerance)


def streamed_gradients(
    model: StreamModel,
    params: Mapping[str, Tensor],
    batches: Sequence[LabelledBatch],
    *,
    label_smoothing: float = 0.0,
    chunk_tokens: int = 1024,
) -> tuple[float, dict[str, Tensor]]:
    """One optimizer step's loss and gradients the streamed way, with all parameters in memory.

    Args:
        model: The model; its mode (dropout) is as the caller set it.
        params: All parameters in compute dtype.
        batches: The micro-batches of the step.
        label_smoothing: As in ``torch.nn.functional.cross_entropy``.
        chunk_tokens: See `StreamModel.head_backward`.

    Returns:
        Loss, and a gradient in fp32 for every parameter (zeros where there is none).
    """
    grads = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in params.items()}
    of_layer = [{tensor.name: params[tensor.name] for tensor in spec.tensors} for spec in model.layers]
    head_params = {name: value for index in model.head_reads for name, value in of_layer[index].items()}
    normalizer = sum(int(target_rows(batch.labels)[0].numel()) for batch in batches)

    def sink(name: str, grad: Tensor) -> None:
        grads[name] += grad

    loss = 0.0
    for batch in batches:
        prologue = model.prologue(of_layer[0], batch.inputs)
        hidden = [prologue.hidden]
        for index in range(1, model.num_decoder_layers + 1):
            hidden.append(model.layer_forward(index, of_layer[index], hidden[-1], prologue))
        final = hidden.pop()
        rows, targets = target_rows(batch.labels)
        part, grad_rows = model.head_backward(
            head_params,
            final.flatten(0, 1)[rows],
            targets,
            normalizer=normalizer,
            label_smoothing=label_smoothing,
            chunk_tokens=chunk_tokens,
            sink=sink,
        )
        loss += float(part)
        grad = torch.zeros_like(final).flatten(0, 1).index_copy(0, rows, grad_rows).view_as(final)
        for index in range(model.num_decoder_layers, 0, -1):
            grad = model.layer_backward(index, of_layer[index], hidden.pop(), prologue, grad, sink)
        model.prologue_backward(of_layer[0], batch.inputs, prologue, grad, sink)
    return loss, grads


def plain_gradients(
    module: nn.Module, batches: Sequence[LabelledBatch], *, label_smoothing: float = 0.0
) -> tuple[float, dict[str, Tensor]]:
    """The same by the library's own forward and autograd: cross entropy of ``module(...).logits``."""
    module.zero_grad()
    normalizer = sum(int(target_rows(batch.labels)[0].numel()) for batch in batches)
    loss = 0.0
    for batch in batches:
        given = {"attention_mask": batch.inputs.attention_mask, "position_ids": batch.inputs.position_ids}
        inputs = {key: value for key, value in given.items() if value is not None}
        logits = module(input_ids=batch.inputs.input_ids, use_cache=False, return_dict=True, **inputs).logits
        rows, targets = target_rows(batch.labels)
        selected = logits.flatten(0, 1)[rows].float()
        part = nn.functional.cross_entropy(selected, targets, reduction="sum", label_smoothing=label_smoothing)
        torch.autograd.backward(part / normalizer)
        loss += float(part.detach()) / normalizer
    grads = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in module.named_parameters()
    }
    return loss, grads


def uneven_batches(vocab_size: int, seed: int = 0) -> list[LabelledBatch]:
    """Two micro-batches of different length, one with padding, with uneven numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for length, padding in ((9, 3), (6, 0)):
        ids = torch.randint(0, vocab_size, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        labels = ids.clone()
        if padding:
            mask[1, -padding:] = 0
        labels[mask == 0] = -100
        labels[0, : length // 2] = -100
        batches.append(LabelledBatch(MicroBatchTensors(ids, mask if padding else None), labels))
    return batches


def _comparable(
    config: PreTrainedConfig, options: dict[str, Any]
) -> tuple[StreamModel, nn.Module, list[LabelledBatch], tuple[float, dict[str, Tensor]]]:
    """The first shrunken configuration on which the plain model runs."""
    reasons: list[str] = []
    for narrow in (True, False):
        try:
            model = StreamModel.from_config(shrink_config(config, narrow=narrow, **options), **options)
            total = sum(spec.num_parameters for spec in model.layers)
            if total > MAX_PARAMETERS:
                reasons.append(f"{total / 1e6:.0f}M parameters with the widths of the configuration")
                continue
            plain = _plain(model, options)
            batches = uneven_batches(min(101, model.vocab_size))
            return model, plain, batches, plain_gradients(plain, batches)
        except Exception as error:  # of transformers, on sizes that it may not take
            reasons.append(f"{type(error).__name__}: {error}")
    raise ModelError(
        f"{config.model_type} is refused, because streamed and plain model cannot be compared on a small scale: "
        + "; ".join(dict.fromkeys(reasons))
    )


def _plain(model: StreamModel, options: dict[str, Any]) -> nn.Module:
    """The library's model with random weights, none of them zero or one."""
    attn_implementation = model.config._attn_implementation  # what the model took, perhaps not what was asked for
    module = causal_lm(model.config, torch.float32, attn_implementation, options["trust_remote_code"])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for name in model.constants:
            buffer = module.get_buffer(name)
            if buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer), alpha=0.05)
    return cast(nn.Module, module.eval())


def _compare(
    name: str, got: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]], tolerance: float
) -> None:
    (loss, grads), (plain_loss, plain_grads) = got, expected
    if not abs(loss - plain_loss) <= tolerance * abs(plain_loss):
        raise ModelError(f"{name} cannot be trained exactly: streamed loss {loss:.8g}, plain loss {plain_loss:.8g}")
    floor = 0.01 * max(float(plain.abs().max()) for plain in plain_grads.values())
    for key, plain in plain_grads.items():
        if key not in grads:
            raise ModelError(f"{name} cannot be trained exactly: {key} is in no layer of the stream")
        scale = max(float(plain.abs().max()), floor)  # some gradients are only rounding, such as those of key biases
        difference = float((grads[key] - plain).abs().max()) / scale
        if not difference <= tolerance:
            raise ModelError(
                f"{name} cannot be trained exactly: the gradient of {key} differs by {difference:.2e} of its largest "
                f"element (tolerance {tolerance:.0e})"
            )
