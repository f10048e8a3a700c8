"""Costs of layers without computing: against sizes counted by hand, and against what torch really allocates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, MixtralConfig

from megatrain_ray.config import load_config, with_override
from megatrain_ray.errors import PlanError
from megatrain_ray.footprint import measure_cost
from megatrain_ray.machine_file import load_machine
from megatrain_ray.model import StreamModel
from megatrain_ray.prepare import plan_elsewhere
from megatrain_ray.start import ModelRecipe
from megatrain_ray.timing import StepCost

ROOT = Path(__file__).resolve().parent.parent
ROWS, TOKENS, WIDTH, INNER, VOCABULARY = 2, 64, 128, 352, 1000
LLAMA = LlamaConfig(
    hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=VOCABULARY, tie_word_embeddings=False,
)  # fmt: skip


def cost(config: LlamaConfig | MixtralConfig, dtype: str = "float32") -> StepCost:
    recipe = ModelRecipe.of(config, attn_implementation="sdpa", trust_remote_code=False)
    return measure_cost(
        recipe.build(), recipe.build_first,
        dtype, rows=ROWS, row_tokens=TOKENS, chunk_tokens=32, on_cpu=False,
    )  # fmt: skip


def test_operations_and_bytes_of_a_llama() -> None:
    tokens = ROWS * TOKENS
    made = cost(LLAMA)
    assert made.hidden_bytes == 4 * tokens * WIDTH
    weights = WIDTH * (WIDTH + 2 * WIDTH // 2 + WIDTH) + 3 * WIDTH * INNER
    attention = 4 * ROWS * TOKENS * TOKENS * WIDTH
    layer = made.layers[1]
    assert layer.forward_flops == 2 * tokens * weights + attention
    # Recompute, then each product again for its input and for its weight; flash attention recomputes its scores.
    assert layer.backward_flops == 3 * 2 * tokens * weights + attention + 5 * attention // 2
    head = made.layers[-1]
    assert head.forward_flops == 2 * tokens * WIDTH * VOCABULARY
    assert head.backward_flops == 3 * head.forward_flops
    # Logits and their logarithms, of one chunk; then the gradients of both, and of the weights.
    logits = 4 * 32 * VOCABULARY
    assert 2 * logits <= head.forward_bytes - 3 * made.hidden_bytes <= 3 * logits
    assert 3 * logits <= head.backward_bytes - 3 * made.hidden_bytes <= 5 * logits + 4 * WIDTH * VOCABULARY
    # A graph keeps at least the gated MLP's four inner activations, and what enters attention and MLP.
    assert layer.graph_bytes >= 4 * tokens * (4 * INNER + 4 * WIDTH)
    assert layer.graph_bytes < layer.backward_bytes < 2 * layer.graph_bytes


def test_bytes_follow_the_dtype_and_count_the_mask() -> None:
    full, half = cost(LLAMA), cost(LLAMA, "bfloat16")
    assert half.hidden_bytes == full.hidden_bytes // 2
    assert 0.4 < half.layers[1].graph_bytes / full.layers[1].graph_bytes < 0.8
    assert full.prologue_bytes >= ROWS * TOKENS * TOKENS


def test_experts_count_as_often_as_tokens_choose_them() -> None:
    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    made = cost(config)
    tokens = ROWS * TOKENS
    attention = 4 * ROWS * TOKENS * TOKENS * WIDTH
    shared = 3 * WIDTH * WIDTH + WIDTH * 8
    assert made.layers[1].forward_flops == 2 * tokens * (shared + 2 * 3 * WIDTH * INNER) + attention


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("qwen2.5-32b", 32_763_876_352),
        ("llama-3-70b", 70_553_706_496),
        ("mistral-large-123b", 122_610_069_504),
    ],
)
def test_shipped_models_have_their_published_size(name: str, parameters: int) -> None:
    model = StreamModel.from_config_dir(str(ROOT / "examples" / "models" / name))
    assert sum(spec.num_parameters for spec in model.layers) == parameters


def test_a_model_of_over_100_billion_parameters_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 12 bytes of state a parameter; in RAM as far as it goes, the rest on disk."""
    monkeypatch.chdir(ROOT)
    config = load_config("examples/configs/mistral-large-123b.yaml")
    machine = load_machine("ray_configs/machines/h200-1.5tb.yaml")
    made, layers = plan_elsewhere(config, machine)
    assert made.checkpoint_bytes == 12 * 122_610_069_504
    state = {spec.index: 12 * spec.numel for spec in layers}
    in_ram, on_disk = sum(state[i] for i in made.shape.resident), sum(state[i] for i in made.shape.paged)
    assert in_ram + on_disk == sum(state.values())
    assert in_ram < made.peak_bytes["cpu_optimizer"] < in_ram + 2 * max(state.values())
    assert on_disk <= made.store_bytes
    assert 0.8 * made.limits["total_ram"] < made.peak_bytes["total_ram"] <= made.limits["total_ram"]
    assert made.peak_bytes["device"] <= machine.device_memory_bytes
    # Every weight: twice forward, four times backward, twice again for the recompute; a bit more for attention.
    tokens = made.tokens
    assert made.time is not None
    least_s = 8 * tokens * 122e9 / machine.speeds.bfloat16_flops_per_s
    assert made.time.busy_s["gpu_worker"] > 0.95 * least_s
    assert json.loads(json.dumps(made.to_json()))["placement"].count("nvme") == len(made.shape.paged)


def test_70_billion_parameters_on_a_workstation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 10 GB of state travel in parts; where the batch is too large the refusal names one that is not."""
    monkeypatch.chdir(ROOT)
    config = load_config("examples/configs/llama-3-70b.yaml")
    machine = load_machine("ray_configs/machines/rtx4090-64gb.yaml")
    with pytest.raises(PlanError, match=r"set training\.gradient_accumulation_steps: 4$"):
        plan_elsewhere(with_override(config, "training.gradient_accumulation_steps=8"), machine)
    smaller = with_override(config, "training.gradient_accumulation_steps=2")
    made, layers = plan_elsewhere(smaller, machine)
    assert made.shape.paged == set(made.shape.trainable)
    assert made.peak_bytes["cpu_optimizer"] < 3.2e9 + 2 * max(spec.numel for spec in layers)
    assert 4 * max(spec.numel for spec in layers) > 4e9
