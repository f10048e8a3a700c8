"""The equality gate: what it accepts, what it refuses, and what it compares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
    RwkvConfig,
)

from megatrain_ray import gate
from megatrain_ray.errors import ModelError
from megatrain_ray.gate import check_equality
from megatrain_ray.model import GradSink, MicroBatchTensors, StreamModel
from megatrain_ray.shrink import shrink_config
from tests.models import FAMILIES, awkward_llama

LONGROPE = Phi3Config(
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 48,
        "long_factor": [1.5] * 48,
        "original_max_position_embeddings": 4096,
    }
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family: str) -> None:
    check_equality(FAMILIES[family]())


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        DeepseekV3Config(),
        MixtralConfig(),
        GptOssConfig(),
        GPT2Config(),
        LONGROPE,
    ],
    ids=lambda config: config.model_type,
)
def test_full_size_configurations_are_shrunk(config: PreTrainedConfig) -> None:
    check_equality(config, attn_implementation="flash_attention_2")


def test_every_kind_of_layer_is_kept() -> None:
    config = Gemma3TextConfig(num_hidden_layers=62, hidden_size=5376, num_attention_heads=32, head_dim=128)
    small = shrink_config(config, narrow=True, attn_implementation="sdpa", trust_remote_code=False)
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_hidden_layers == len(small.layer_types) == 6
    assert small.hidden_size != small.num_attention_heads * small.head_dim
    assert config.num_hidden_layers == 62

    config = Qwen3MoeConfig(num_hidden_layers=48, mlp_only_layers=[0, 1, 2], num_experts=128)
    small = shrink_config(config, narrow=True, attn_implementation="sdpa", trust_remote_code=False)
    assert (small.num_hidden_layers, small.num_experts) == (4, 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [(Gemma3nTextConfig(), "gemma3n_text"), (RwkvConfig(), "rwkv")],
    ids=["gemma3n", "rwkv"],
)
def test_what_cannot_be_exact_is_refused(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_equality(config)


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer_backward = StreamModel.layer_backward

    def rescaled(self: StreamModel, index: int, *args: Tensor, sink: GradSink | None = None) -> Tensor:
        *rest, last = args

        def wrong(name: str, grad: Tensor) -> None:
            last(name, grad * 1.01 if "up_proj" in name and index == 2 else grad)

        return layer_backward(self, index, *rest, wrong)

    monkeypatch.setattr(StreamModel, "layer_backward", rescaled)
    with pytest.raises(
        ModelError, match=r"llama .* gradient of model\.layers\.1\.mlp\.up_proj\.weight differs by 1\.\d+e-02"
    ):
        check_equality(awkward_llama())


def test_a_wrong_loss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prologue = StreamModel.prologue

    def without_mask(self: StreamModel, params: dict[str, Tensor], batch: MicroBatchTensors) -> object:
        return prologue(self, params, MicroBatchTensors(batch.input_ids.flip(1)))

    monkeypatch.setattr(StreamModel, "prologue", without_mask)
    with pytest.raises(ModelError, match=r"streamed loss \S+, plain loss \S+"):
        check_equality(awkward_llama())


def test_what_is_too_large_to_compare_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_PARAMETERS", 10)
    with pytest.raises(ModelError, match=r"cannot be compared on a small scale: .*M parameters"):
        check_equality(awkward_llama())


def test_the_random_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_equality(awkward_llama())
    assert torch.equal(torch.rand(3), expected)
