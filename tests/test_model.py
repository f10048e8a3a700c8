"""The streamed model against the library's own: loss and every gradient."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma3Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Zamba2Config,
)

from megatrain_ray.errors import ModelError
from megatrain_ray.gate import LabelledBatch, plain_gradients, streamed_gradients, uneven_batches
from megatrain_ray.layout import pack_layer
from megatrain_ray.model import MicroBatchTensors, StreamModel, target_rows
from megatrain_ray.skeleton import Skeleton, causal_lm
from megatrain_ray.tensors import bind
from tests.models import FAMILIES, NEEDS_EAGER, TINY, attn_implementation, awkward_llama, plain_model

Gradients = dict[str, Tensor]

MORE_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "awkward": awkward_llama,
    "awkward-tied": lambda: awkward_llama(tie_word_embeddings=True),
    "bloom": lambda: BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),  # its layers return tuples
    "falcon": lambda: FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
}


def parameters(module: nn.Module) -> Gradients:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def assert_equal_gradients(got: tuple[float, Gradients], expected: tuple[float, Gradients]) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    assert got[1].keys() == expected[1].keys()
    largest = max(float(grad.abs().max()) for grad in expected[1].values())
    for name, grad in expected[1].items():
        scale = max(float(grad.abs().max()), 1e-3 * largest)  # gradients of key biases are only rounding
        assert float((got[1][name] - grad).abs().max()) <= 1e-6 * scale, name


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_streamed_equals_plain(family: str) -> None:
    config = {**FAMILIES, **MORE_FAMILIES}[family]()
    attn = attn_implementation(family)
    plain = plain_model(config, attn=attn)
    model = StreamModel.from_config(config, attn_implementation=attn)
    model.load_constants({name: plain.state_dict()[name] for name in model.constants})
    batches = uneven_batches(97)
    expected = plain_gradients(plain, batches, label_smoothing=0.1)
    assert_equal_gradients(streamed_gradients(model, parameters(plain), batches, label_smoothing=0.1), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_hold_each_parameter_once(family: str) -> None:
    model = StreamModel.from_config(FAMILIES[family](), attn_implementation=attn_implementation(family))
    held = [(tensor.name, tensor.shape) for spec in model.layers for tensor in spec.tensors]
    assert sorted(held) == sorted((name, tuple(p.shape)) for name, p in model.module.named_parameters())
    assert [spec.index for spec in model.layers] == list(range(model.num_decoder_layers + 2))
    assert all(parameter.is_meta for parameter in model.module.parameters())
    assert not any(buffer.is_meta for buffer in model.module.buffers())


@pytest.mark.parametrize(("tied", "reads"), [(True, (0, 5)), (False, (5,))])
def test_the_head_reads_a_tied_embedding(tied: bool, reads: tuple[int, ...]) -> None:
    model = StreamModel.from_config(awkward_llama(tie_word_embeddings=tied))
    assert model.head_reads == reads
    assert [tensor.name for tensor in model.layers[0].tensors] == ["model.embed_tokens.weight"]
    assert ("lm_head.weight" in {tensor.name for tensor in model.layers[-1].tensors}) is not tied
    assert (model.vocab_size, model.hidden_size) == (997, 66)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt_oss"])
def test_bfloat16_computes_what_the_bfloat16_model_does(family: str) -> None:
    config = FAMILIES[family]()
    attn = attn_implementation(family)
    plain = causal_lm(config, torch.bfloat16, attn).eval()  # .to(bfloat16) would round the rotary tables too
    plain.load_state_dict(plain_model(config, attn=attn).state_dict())
    model = StreamModel.from_config(config, dtype="bfloat16", attn_implementation=attn)
    batch = uneven_batches(97)[:1]
    got = streamed_gradients(model, parameters(plain), batch, chunk_tokens=1000)
    expected = plain_gradients(plain, batch)
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    for name, grad in expected[1].items():
        torch.testing.assert_close(got[1][name], grad.float(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
def test_the_head_never_sees_more_tokens_than_a_chunk(chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_model(awkward_llama())
    model = StreamModel.from_config(awkward_llama())
    seen: list[int] = []
    epilogue_logits = StreamModel.epilogue_logits

    def spy(self: StreamModel, params: dict[str, Tensor], hidden: Tensor) -> Tensor:
        seen.append(hidden.shape[0])
        return epilogue_logits(self, params, hidden)

    monkeypatch.setattr(StreamModel, "epilogue_logits", spy)
    batches = uneven_batches(997)
    got = streamed_gradients(model, parameters(plain), batches, chunk_tokens=chunk_tokens)
    assert_equal_gradients(got, plain_gradients(plain, batches))
    assert max(seen) <= chunk_tokens
    assert sum(seen) == sum(target_rows(batch.labels)[0].numel() for batch in batches)


def test_evaluation_loss_is_the_training_loss() -> None:
    plain = plain_model(awkward_llama())
    model = StreamModel.from_config(awkward_llama())
    params = {tensor.name: parameters(plain)[tensor.name] for tensor in model.layers[-1].tensors}
    hidden, targets = torch.randn(7, 66), torch.arange(7)
    options: dict[str, Any] = {"normalizer": 7, "chunk_tokens": 3}
    loss, grad_hidden = model.head_backward(params, hidden, targets, **options, sink=lambda name, grad: None)
    assert float(model.head_loss(params, hidden, targets, **options)) == float(loss)
    assert grad_hidden.shape == hidden.shape


def test_a_kept_graph_gives_what_recomputing_gives() -> None:
    config = FAMILIES["gemma3"]()
    params = parameters(plain_model(config))
    model = StreamModel.from_config(config)
    of_layer = [{tensor.name: params[tensor.name] for tensor in spec.tensors} for spec in model.layers]
    prologue = model.prologue(of_layer[0], uneven_batches(97)[0].inputs)
    grad_output = torch.randn_like(prologue.hidden)
    graph = model.layer_graph(1, of_layer[1], prologue.hidden, prologue)
    kept: Gradients = {}
    again: Gradients = {}
    grad_kept = model.backward(graph, grad_output, kept.__setitem__)
    grad_again = model.layer_backward(1, of_layer[1], prologue.hidden, prologue, grad_output, again.__setitem__)
    assert torch.equal(graph.output, model.layer_forward(1, of_layer[1], prologue.hidden, prologue))
    assert torch.equal(grad_kept, grad_again)
    assert kept.keys() == of_layer[1].keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_dropout_repeats_under_the_same_seed() -> None:
    config = FAMILIES["gpt2"]()
    params = parameters(plain_model(config))
    model = StreamModel.from_config(config)
    model.train()
    of_layer = [{tensor.name: params[tensor.name] for tensor in spec.tensors} for spec in model.layers]
    prologue = model.prologue(of_layer[0], uneven_batches(97)[0].inputs)

    def forward(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model.layer_forward(1, of_layer[1], prologue.hidden, prologue)

    torch.manual_seed(3)
    graph = model.layer_graph(1, of_layer[1], prologue.hidden, prologue)
    assert torch.equal(graph.output, forward(3))
    assert not torch.equal(forward(3), forward(4))
    model.train(False)
    assert torch.equal(forward(3), forward(4))


def test_rotary_tables_are_those_of_a_loaded_model(tmp_path: Path) -> None:
    plain_model(awkward_llama()).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for length in (16, 2048):
        ids = torch.randint(0, 997, (1, length), generator=torch.Generator().manual_seed(length))
        batch = [LabelledBatch(MicroBatchTensors(ids), ids.clone())]
        with torch.no_grad():
            expected = float(loaded(input_ids=ids, labels=ids).loss)
        for _ in range(2):
            model = StreamModel.from_config_dir(str(tmp_path))
            assert streamed_gradients(model, parameters(loaded), batch)[0] == pytest.approx(expected, rel=1e-6)


def test_a_model_of_400_billion_parameters_builds_without_memory() -> None:
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = StreamModel.from_config(config)
    assert sum(spec.num_parameters for spec in model.layers) > 4e11
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_router_losses_are_switched_off() -> None:
    config = MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    model = StreamModel.from_config(config)
    assert config.output_router_logits and not model.config.output_router_logits
    assert any("router" in warning for warning in model.warnings)
    plain = plain_model(config)
    batches = uneven_batches(97)
    assert_equal_gradients(streamed_gradients(model, parameters(plain), batches), plain_gradients(plain, batches))


@pytest.mark.parametrize("family", sorted(NEEDS_EAGER))
def test_a_refused_attention_falls_back_to_eager(family: str) -> None:
    config = {**FAMILIES, **MORE_FAMILIES}[family]()
    model = StreamModel.from_config(config, attn_implementation="sdpa")
    assert model.config._attn_implementation == "eager"
    assert any("eager" in warning and family in warning for warning in model.warnings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma3Config(), "parts besides its language model"),
        (Zamba2Config(), "shared with or between decoder layers"),
    ],
)
def test_what_cannot_be_streamed_is_refused(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        StreamModel.from_config(config)


def test_an_unknown_attention_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.attn_implementation: 'fast' .* sdpa"):
        StreamModel.from_config(awkward_llama(), attn_implementation="fast")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("{", "cannot be read as JSON"),
        ("\ufeff{}", "cannot be read as JSON.*BOM"),
        ("[]", "expected a JSON object, got list"),
        ('{"model_type": "nonesuch", "architectures": ["NonesuchForCausalLM"]}', r"nonesuch.*NonesuchForCausalLM"),
        ("{}", "model_type None"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', r"quantized \(gptq\)"),
        ('{"model_type": "t5"}', r"config\.json: .*t5"),
        ('{"model_type": "clip_text_model"}', r"config\.json: .*clip_text_model.*AutoModelForCausalLM"),
        ('{"model_type": "bert", "num_hidden_layers": "many"}', "num_hidden_layers"),
    ],
)
def test_a_bad_config_json_is_refused_by_name(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        StreamModel.from_config_dir(str(tmp_path))


def test_constants_are_part_of_the_model() -> None:
    config = FAMILIES["glm4_moe"]()
    plain = plain_model(config)
    bias = next(buffer for name, buffer in plain.named_buffers() if name.endswith("correction_bias"))
    bias.copy_(torch.tensor([0.5, -0.5, 0.3, -0.3]))  # decides which experts are taken
    model = StreamModel.from_config(config)
    assert model.constants.keys() == {key for key in plain.state_dict() if key.endswith("correction_bias")}
    batches = uneven_batches(97)
    with pytest.raises(AssertionError, match="load_constants"):
        streamed_gradients(model, parameters(plain), batches)
    model.load_constants({key: plain.state_dict()[key] for key in model.constants})
    expected = plain_gradients(plain, batches)
    assert_equal_gradients(streamed_gradients(model, parameters(plain), batches), expected)
    model.load_constants({key: torch.zeros_like(value) for key, value in model.constants.items()})
    assert streamed_gradients(model, parameters(plain), batches)[0] != pytest.approx(expected[0], rel=1e-4)
    with pytest.raises(AssertionError, match="correction_bias"):
        model.load_constants({})


def test_learned_positions_limit_the_length() -> None:
    model = StreamModel.from_config(FAMILIES["gpt2"]())
    model.check_length(64)
    with pytest.raises(
        ModelError, match=r"rows of 65 tokens \(max_position_embeddings is 64\); lower data\.max_length"
    ):
        model.check_length(65)
    StreamModel.from_config(FAMILIES["llama"]()).check_length(65)


def test_parameters_that_the_library_keeps_in_fp32_are_cast() -> None:
    torch.manual_seed(0)
    plain = ToyModel("").to(torch.bfloat16)
    with torch.device("meta"):
        module = ToyModel("").to(torch.bfloat16)
    for each in (plain, module):
        for layer in each.layers:
            layer.keep_in_fp32()
    layers = tuple((f"layers.{index}", layer) for index, layer in enumerate(module.layers))
    config: Any = SimpleNamespace(model_type="toy")
    model = StreamModel(Skeleton(module, config, layers, (), ()), dtype="bfloat16", device="cpu")
    for parameter in plain.parameters():  # values that bfloat16 can hold, since the stream carries bfloat16
        parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
    params = {name: parameter.to(torch.bfloat16) for name, parameter in parameters(plain).items()}
    ids = torch.randint(0, 11, (2, 5))
    batches = [LabelledBatch(MicroBatchTensors(ids), ids.clone())]
    loss, grads = streamed_gradients(model, params, batches)
    plain_loss, plain_grads = plain_gradients(plain, batches)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for name, grad in plain_grads.items():
        torch.testing.assert_close(grads[name], grad.float(), rtol=0.02, atol=1e-3)


def test_targets_are_the_next_tokens() -> None:
    rows, targets = target_rows(torch.tensor([[5, 6, -100, 7], [8, -100, -100, 9]]))
    assert rows.tolist() == [0, 2, 6]  # the label at position 0 is no target
    assert targets.tolist() == [6, 7, 9]


def test_bind_gives_views() -> None:
    spec = pack_layer(0, "embed", [("a.weight", (3, 5)), ("b.bias", (7,))])
    flat = torch.zeros(spec.numel)
    bind(spec, flat)["b.bias"].fill_(1.0)
    assert bind(spec, flat)["a.weight"].shape == (3, 5)
    assert float(flat.sum()) == 7.0


class ToyLayer(nn.Module):
    """A decoder layer that also takes something made from the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def keep_in_fp32(self) -> None:
        self.linear.float()

    def forward(self, hidden_states: Tensor, extra: Tensor | None = None) -> Tensor:
        dtype = self.linear.weight.dtype
        output: Tensor = hidden_states + self.linear(hidden_states.to(dtype)).to(hidden_states.dtype)
        return output if extra is None else output * extra


class ToyModel(nn.Module):
    """A model with the habits that transformers models may have.

    Args:
        habit: ``extra`` (a differentiable argument), ``between`` (work between the layers), ``skip`` (a layer is not
            called) or ``shared`` (two layers share a weight).
    """

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.embed = nn.Embedding(11, 8)
        self.scale = nn.Linear(8, 8)
        layers = [ToyLayer() for _ in range(3)]
        if habit == "shared":
            layers[1].linear.weight = layers[0].linear.weight
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, use_cache: bool, return_dict: bool) -> Any:
        hidden = self.embed(input_ids)
        extra = torch.tanh(self.scale(hidden)) if self.habit == "extra" else None
        for layer in self.layers[:2] if self.habit == "skip" else self.layers:
            hidden = layer(hidden_states=hidden, extra=extra)
            if self.habit == "between":
                hidden = hidden * 2
        return SimpleNamespace(logits=self.head(hidden))


def toy(habit: str) -> tuple[StreamModel, ToyModel]:
    torch.manual_seed(0)
    plain = ToyModel(habit)
    with torch.device("meta"):
        module = ToyModel(habit)
    layers = tuple((f"layers.{index}", layer) for index, layer in enumerate(module.layers))
    config: Any = SimpleNamespace(model_type="toy")
    return StreamModel(Skeleton(module, config, layers, (), ()), dtype="float32", device="cpu"), plain


def test_arguments_made_from_the_embedding_carry_gradients() -> None:
    model, plain = toy("extra")
    assert {tensor.name for tensor in model.layers[0].tensors} == {"embed.weight", "scale.weight", "scale.bias"}
    ids = torch.randint(0, 11, (2, 5))
    batches = [LabelledBatch(MicroBatchTensors(part), part.clone()) for part in (ids, ids[:, :3])]
    got = streamed_gradients(model, parameters(plain), batches)
    assert_equal_gradients(got, plain_gradients(plain, batches))
    assert float(got[1]["scale.weight"].abs().max()) > 0


@pytest.mark.parametrize(
    ("habit", "message"),
    [("between", "computes between its decoder layers"), ("skip", "called 2 of its 3"), ("shared", "shared with")],
)
def test_models_that_are_no_plain_chain_are_refused(habit: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        toy(habit)
