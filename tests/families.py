"""Tiny configurations of every family that must train exactly."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

_ROPE = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "vocab_size": 151,
}
_GROUPED = {**_ROPE, "num_key_value_heads": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_GROUPED, "tie_word_embeddings": False}),
    "llama-tied": ("llama", {**_GROUPED, "tie_word_embeddings": True}),
    "llama-awkward": (
        "llama",
        {"num_hidden_layers": 4, "hidden_size": 66, "intermediate_size": 77, "num_attention_heads": 3,
         "num_key_value_heads": 1, "head_dim": 22, "vocab_size": 997},
    ),
    "qwen2": ("qwen2", _GROUPED),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": 5}),
    "gemma3": (
        "gemma3_text",
        {**_GROUPED, "head_dim": 16, "sliding_window": 4,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
    ),
    "gpt2": (
        "gpt2",
        {"n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": 151, "n_positions": 64,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "gpt_neox": ("gpt_neox", {**_ROPE, "max_position_embeddings": 64}),
    "phi": ("phi", {**_ROPE, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "gpt_oss",
        {**_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> Any:
    """The configuration of a family, with changes."""
    model_type, sizes = FAMILIES[family]
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(model_type, **{**tokens, **sizes, **changes})
