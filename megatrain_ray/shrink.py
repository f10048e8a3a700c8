"""A small model of the same kind: every mechanism of a configuration at a size that runs in milliseconds."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from megatrain_ray.skeleton import Skeleton, build_skeleton, text_config

HEAD_DIM = 16
HIDDEN_SIZE = 64
CAPS = {
    "vocab_size": 101,
    "vocab_size_per_layer_input": 101,
    "intermediate_size": 72,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "n_inner": 72,
    "ffn_hidden_size": 72,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": HEAD_DIM // 2,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "attention_window_size": 4,
}
"""Upper limits by transformers' names of configuration keys; a width that is not here keeps its size, which costs
little beside narrow neighbours. Windows are cut below the gate's sequence length, so that they matter."""


def shrink_config(
    config: PreTrainedConfig, *, narrow: bool, attn_implementation: str, trust_remote_code: bool
) -> PreTrainedConfig:
    """A copy of a configuration with the first layers only, as few as hold every kind of layer.

    Args:
        config: Of any size.
        narrow: Whether to cut widths as well.
        attn_implementation: To build the model with.
        trust_remote_code: Whether code from the model directory may run.

    Raises:
        Exception: Whatever transformers raises when the model cannot be built at these sizes.
    """
    small = copy.deepcopy(config)
    if narrow:
        _narrow(text_config(small))
    skeleton = build_skeleton(small, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code)
    shorten(text_config(small), _layers_to_keep(skeleton))
    return small


def _narrow(config: Any) -> None:
    """Cuts widths, heads, experts and vocabulary, keeping which of them are equal or differ."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    coupled = head_dim * heads == config.hidden_size
    config.hidden_size = HIDDEN_SIZE if coupled else HIDDEN_SIZE * 3 // 4
    config.num_attention_heads = HIDDEN_SIZE // HEAD_DIM
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = {heads: HIDDEN_SIZE // HEAD_DIM, 1: 1}.get(groups, 2)
    if vars(config).get("head_dim") is not None and not hasattr(config, "qk_rope_head_dim"):
        config.head_dim = HEAD_DIM
    for key, cap in CAPS.items():
        value = getattr(config, key, None)
        if isinstance(value, list):
            setattr(config, key, [min(entry, cap) for entry in value])
        elif isinstance(value, int) and value > cap:
            setattr(config, key, cap)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(config, key, None)
        if isinstance(token, int) and token >= config.vocab_size:
            setattr(config, key, config.vocab_size - 1)
    _narrow_rope(getattr(config, "rope_parameters", None), head_dim)


def _narrow_rope(parameters: Any, head_dim: int) -> None:
    """Cuts per-frequency lists (longrope's factors) to the new head dimension, in place."""
    if not isinstance(parameters, dict):
        return
    for key, value in parameters.items():
        if isinstance(value, list) and key.endswith("factor"):
            parameters[key] = value[: len(value) * HEAD_DIM // head_dim]
        _narrow_rope(value, head_dim)


def _layers_to_keep(skeleton: Skeleton) -> int:
    """The shortest prefix that holds every kind of decoder layer, and at least two layers."""
    kinds = [_kind(skeleton.config, index, layer) for index, (_, layer) in enumerate(skeleton.decoder_layers)]
    return min(len(kinds), max(2, 1 + max(kinds.index(kind) for kind in kinds)))


def _kind(config: PreTrainedConfig, index: int, layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers that compute the same function of their parameters: classes, shapes and settings."""
    settings = tuple(
        (name, type(part).__name__, key, value)
        for name, part in layer.named_modules()
        for key, value in sorted(vars(part).items())
        if isinstance(value, (bool, int, float, str, type(None))) and not key.startswith("__") and "idx" not in key
    )
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    layer_types = getattr(text_config(config), "layer_types", None)
    return settings, shapes, layer_types[index] if layer_types else None


def shorten(config: Any, num_layers: int) -> None:
    """Keeps the first layers, in every list that has one entry a layer."""
    depth = config.num_hidden_layers
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, value[:num_layers])
    config.num_hidden_layers = num_layers
