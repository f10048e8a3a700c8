"""Tiny configurations of every family that must train exactly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 97
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**TINY, tie_word_embeddings=False),
    "llama-tied": lambda: LlamaConfig(**TINY, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**TINY, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**TINY, head_dim=12, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=4),
    "gemma3": lambda: Gemma3TextConfig(
        **{**TINY, "num_hidden_layers": 4},
        head_dim=12,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=30.0,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**{k: v for k, v in TINY.items() if k != "num_key_value_heads"}),
    "phi": lambda: PhiConfig(**TINY),
    "mixtral": lambda: MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: GptOssConfig(**TINY, head_dim=12, sliding_window=4, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": lambda: Glm4MoeConfig(
        **TINY,
        head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        first_k_dense_replace=1,
    ),
}
"""Family name to a function that makes its tiny configuration (hidden size 32, 3 or 4 layers, 97 tokens)."""

NEEDS_EAGER = {"gpt_oss", "bloom"}


def attn_implementation(family: str) -> str:
    """The attention implementation to test a family with."""
    return "eager" if family in NEEDS_EAGER else "sdpa"


def awkward_llama(**changes: object) -> LlamaConfig:
    """T of the case list: sizes that no block or alignment divides."""
    sizes = {
        "vocab_size": 997,
        "hidden_size": 66,
        "intermediate_size": 131,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**sizes, **changes})


def plain_model(
    config: PreTrainedConfig, *, attn: str = "sdpa", seed: int = 0, spread: float = 0.05
) -> torch.nn.Module:
    """The library's own model in fp32 with random weights, none of them zero or one (norms and biases included)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=spread)
        for name in model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
            model.get_buffer(name).add_(torch.randn_like(model.get_buffer(name)), alpha=spread)
    return model.eval()
