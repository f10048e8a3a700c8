"""First weights: model directories of every shape, broken ones, and random initialization."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatrain_ray.checkpoint.random_init import RandomSource
from megatrain_ray.checkpoint.source import CheckpointSource, LayerSource, open_source
from megatrain_ray.errors import ModelError
from megatrain_ray.model import StreamModel
from megatrain_ray.tensors import bind
from tests.models import FAMILIES, attn_implementation, awkward_llama, plain_model


def read_all(source: LayerSource, model: StreamModel) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for spec in model.layers:
        flat = source.read_layer(spec)
        assert (flat.dtype, flat.size) == (np.float32, spec.numel)
        padding = np.ones(spec.numel, bool)
        for tensor in spec.tensors:
            padding[tensor.offset : tensor.end] = False
        assert not flat[padding].any()
        weights |= bind(spec, torch.from_numpy(flat))
    return weights


def assert_reads_like_transformers(directory: Path, attn: str = "sdpa") -> CheckpointSource:
    model = StreamModel.from_config_dir(str(directory), attn_implementation=attn)
    source = open_source(str(directory), model)
    weights = read_all(source, model)
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attn)
    assert weights.keys() == dict(expected.named_parameters()).keys()
    for name, value in model.constants.items():
        assert torch.equal(value, expected.get_buffer(name)), name
    for name, parameter in expected.named_parameters():
        assert torch.equal(weights[name], parameter), name
    return source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_directories(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    attn = attn_implementation(family)
    plain_model(FAMILIES[family](), attn=attn).to(dtype).save_pretrained(tmp_path, max_shard_size="16KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    source = assert_reads_like_transformers(tmp_path, attn)
    assert source.dtype == str(dtype).removeprefix("torch.")
    assert source.warnings == []


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A directory with one model.safetensors of the awkward Llama."""
    plain_model(awkward_llama()).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same as shards with an index."""
    plain_model(awkward_llama()).save_pretrained(tmp_path, max_shard_size="300KB")
    return tmp_path


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object], metadata: dict[str, str] | None = None) -> None:
    """Changes the tensors of a file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def index_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "model.safetensors.index.json").read_text())
    return content


def write_index(directory: Path, content: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def test_a_single_file_without_format_metadata(single: Path) -> None:
    rewrite(single / "model.safetensors", lambda tensors: None)
    model = StreamModel.from_config_dir(str(single))
    assert read_all(open_source(str(single), model), model).keys() == load_file(single / "model.safetensors").keys()


def test_names_without_the_base_prefix(tmp_path: Path) -> None:
    plain_model(FAMILIES["gpt2"]()).save_pretrained(tmp_path)

    def as_on_the_hub(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # old causal masks

    rewrite(tmp_path / "model.safetensors", as_on_the_hub, {"format": "pt"})
    assert assert_reads_like_transformers(tmp_path).warnings == []


@pytest.mark.parametrize("sharded_files", [False, True])
@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
def test_torch_files(family: str, sharded_files: bool, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    plain_model(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    if sharded_files:
        names = sorted(tensors)
        shards = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
        for shard, members in shards.items():
            torch.save({name: tensors[name].to(torch.bfloat16) for name in members}, tmp_path / shard)
        weight_map = {name: shard for shard, members in shards.items() for name in members}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]} if config.tie_word_embeddings else {}
        torch.save({**tensors, **tied}, tmp_path / "pytorch_model.bin")
    assert_reads_like_transformers(tmp_path)


def test_a_pickle_that_runs_code_is_refused(single: Path) -> None:
    (single / "model.safetensors").unlink()
    torch.save({"model.norm.weight": nn.Linear(2, 2)}, single / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: cannot be read with torch\.load\(weights_only=True"):
        open_source(str(single), StreamModel.from_config_dir(str(single)))


def test_an_index_wins_over_a_stray_file(sharded: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(3)}, sharded / "model.safetensors")
    model = StreamModel.from_config_dir(str(sharded))
    source = open_source(str(sharded), model)
    assert len(read_all(source, model)) == len(index_of(sharded)["weight_map"])
    (warning,) = source.warnings
    assert "model.safetensors: ignored" in warning


def test_values_that_are_not_finite_are_reported(single: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = float("nan")
        tensors["model.layers.2.mlp.up_proj.weight"][5, 6] = float("-inf")

    rewrite(single / "model.safetensors", spoil)
    model = StreamModel.from_config_dir(str(single))
    source = open_source(str(single), model)
    assert source.warnings == []
    read_all(source, model)
    (warning,) = source.warnings
    assert warning.startswith("model.layers.2.mlp.up_proj.weight: 2 of its")


def test_tensors_without_a_place_are_reported(single: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(11), "adapter.weight": torch.ones(2)}
    rewrite(single / "model.safetensors", lambda tensors: tensors.update(extra))
    (warning,) = open_source(str(single), StreamModel.from_config_dir(str(single))).warnings
    assert "1 tensors have no place in the model: adapter.weight" in warning


@pytest.mark.parametrize("equal", [True, False])
def test_both_names_of_a_tied_weight(equal: bool, tmp_path: Path) -> None:
    plain_model(awkward_llama(tie_word_embeddings=True)).save_pretrained(tmp_path)

    def add_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if equal else 1)

    rewrite(tmp_path / "model.safetensors", add_head, {"format": "pt"})
    if equal:
        assert_reads_like_transformers(tmp_path)
    else:
        with pytest.raises(ModelError, match=r"embed_tokens\.weight and lm_head\.weight differ.*tie_word_embeddings"):
            open_source(str(tmp_path), StreamModel.from_config_dir(str(tmp_path)))


def test_only_the_other_name_of_a_tied_weight(tmp_path: Path) -> None:
    plain_model(awkward_llama(tie_word_embeddings=True)).save_pretrained(tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(tmp_path / "model.safetensors", rename, {"format": "pt"})
    assert_reads_like_transformers(tmp_path)


def first_shard(directory: Path) -> Path:
    return sorted(directory.glob("model-*.safetensors"))[0]


def truncate(directory: Path) -> None:
    with first_shard(directory).open("r+b") as file:
        file.truncate(first_shard(directory).stat().st_size - 5)


def point_elsewhere(directory: Path) -> None:
    index = index_of(directory)
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.embed_tokens.weight"] = shards[-1]
    write_index(directory, index)


def leave_the_directory(target: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        index = index_of(directory)
        index["weight_map"]["model.norm.weight"] = target
        write_index(directory, index)

    return change


def edit_config(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def drop_from_index_and_shard(directory: Path) -> None:
    index = index_of(directory)
    shard = index["weight_map"].pop("model.layers.1.mlp.up_proj.weight")
    write_index(directory, index)
    rewrite(directory / shard, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def quantize(directory: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    shard = directory / index_of(directory)["weight_map"][name]
    rewrite(shard, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda directory: first_shard(directory).unlink(), r"model-00001.*: no such file, but .*index\.json lists it"),
        (truncate, r"model-00001.*truncated"),
        (lambda directory: first_shard(directory).write_bytes(b"\xff" * 50), r"model-00001.*header has \d+ bytes"),
        (point_elsewhere, r"embed_tokens\.weight is not in this file.*it is in model-00001"),
        (leave_the_directory("../other/model.safetensors"), r"norm\.weight.*'\.\./other.*leaves the model directory"),
        (leave_the_directory("/etc/model.safetensors"), "leaves the model directory"),
        (leave_the_directory(""), "leaves the model directory"),
        (lambda directory: write_index(directory, {"weights": {}}), r"index\.json: expected a JSON object"),
        (lambda directory: write_index(directory, [1]), r"index\.json: expected a JSON object"),
        (edit_config(intermediate_size=132), r"gate_proj.* \[131, 66\], but by config\.json it is \[132, 66\]"),
        (edit_config(num_hidden_layers=5), r"weights of 9 parameters are missing: model\.layers\.4\."),
        (edit_config(vocab_size=998), r"embed_tokens.* \[997, 66\], but .* \[998, 66\]"),
        (drop_from_index_and_shard, r"weights of 1 parameters are missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        (quantize, r"up_proj\.weight has dtype I8; expected F32, BF16 or F16"),
    ],
)
def test_broken_directories_are_refused_before_any_value_is_read(
    spoil: Callable[[Path], object], message: str, sharded: Path
) -> None:
    spoil(sharded)
    model = StreamModel.from_config_dir(str(sharded))
    with pytest.raises(ModelError, match=message):
        open_source(str(sharded), model)


def test_a_directory_without_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors.*found config\.json"):
        open_source(str(single), StreamModel.from_config_dir(str(single)))


def test_experts_that_do_not_fit_together(tmp_path: Path) -> None:
    plain_model(FAMILIES["mixtral"]()).save_pretrained(tmp_path)

    def cut(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if "experts.2.w1" in name)
        tensors[name] = tensors[name][:-1].clone()

    rewrite(tmp_path / "model.safetensors", cut)
    with pytest.raises(ModelError, match=r"experts.*cannot be converted to .*gate_up_proj"):
        open_source(str(tmp_path), StreamModel.from_config_dir(str(tmp_path)))


LIMITED_IMPORT = """
import resource, sys
from megatrain_ray.checkpoint.source import open_source
from megatrain_ray.model import StreamModel
model = StreamModel.from_config_dir(sys.argv[1])
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + int(sys.argv[2]),) * 2)
source = open_source(sys.argv[1], model)
print(sum(float(source.read_layer(spec).sum()) for spec in model.layers))
"""


def test_a_model_larger_than_the_address_space_left(tmp_path: Path) -> None:
    config = awkward_llama(hidden_size=384, intermediate_size=2048, num_attention_heads=6, num_hidden_layers=24)
    model = StreamModel.from_config(config)
    config.save_pretrained(tmp_path)
    weights = {tensor.name: torch.full(tensor.shape, 1.0) for spec in model.layers for tensor in spec.tensors}
    save_file(weights, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    limit = size // 2  # 48 MiB of blocks and a layer of 11 MiB fit, the file does not
    del weights
    run = subprocess.run(
        [sys.executable, "-c", LIMITED_IMPORT, str(tmp_path), str(limit)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == sum(spec.num_parameters for spec in model.layers)
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_drawn_as_the_library_draws_them(family: str) -> None:
    config = FAMILIES[family]()
    attn = attn_implementation(family)
    model = StreamModel.from_config(config, attn_implementation=attn)
    weights = read_all(RandomSource(model, 1), model)
    expected = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn)
    for name, parameter in expected.named_parameters():
        drawn = weights[name]
        if float(parameter.detach().std(correction=0)) == 0:
            assert torch.equal(drawn, parameter), name
        elif parameter.numel() > 200:
            assert float(drawn.std()) == pytest.approx(float(parameter.detach().std()), rel=0.25), name
            assert abs(float(drawn.mean())) < 0.2 * float(drawn.std()), name
    assert all(parameter.is_meta for parameter in model.module.parameters())


def test_random_weights_depend_on_seed_and_layer_alone() -> None:
    model = StreamModel.from_config(awkward_llama())
    torch.manual_seed(0)
    first = RandomSource(model, 7).read_layer(model.layers[2])
    read_all(RandomSource(model, 7), model)
    assert np.array_equal(RandomSource(StreamModel.from_config(awkward_llama()), 7).read_layer(model.layers[2]), first)
    assert not np.array_equal(RandomSource(model, 8).read_layer(model.layers[2]), first)
    assert not np.array_equal(RandomSource(model, 7).read_layer(model.layers[3]), first)
