"""Checkpoints and exports: written a layer at a time, whole or not at all, read back by transformers and by us."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatrain_ray.checkpoint import safetensors_file, writer
from megatrain_ray.checkpoint.describe import describe_saving
from megatrain_ray.checkpoint.directory import (
    find_problem,
    list_checkpoints,
    newest_complete,
    prune_checkpoints,
    remove_debris,
)
from megatrain_ray.checkpoint.resume import ResumeSource, export, model_differences
from megatrain_ray.checkpoint.safetensors_file import SafetensorsWriter
from megatrain_ray.checkpoint.save_spec import SaveSpec
from megatrain_ray.checkpoint.source import open_source
from megatrain_ray.checkpoint.writer import CheckpointWriter, ExportWriter, cast_blocks
from megatrain_ray.errors import ModelError, RunDirectoryError, StoreError
from megatrain_ray.layout import LayerSpec
from megatrain_ray.model import StreamModel
from megatrain_ray.packed import MASTER, STATE, PackedLayer
from tests.models import FAMILIES, attn_implementation, awkward_llama, plain_model


def make_model_dir(path: Path, *, family: str | None = None, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """A model directory with a tokenizer; the awkward Llama unless a family is given."""
    config = FAMILIES[family]() if family else awkward_llama()
    attn = attn_implementation(family) if family else "sdpa"
    model: Any = plain_model(config, attn=attn, seed=seed).to(getattr(torch, dtype))
    model.save_pretrained(path)
    words = Tokenizer(WordLevel({"<s>": 0, "a": 1, "b": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path / "model")


def state_of(spec: LayerSpec, step: int, master: NDArray[np.float32]) -> PackedLayer:
    """A layer's state with moments that say which step and layer they are of; read-only, as from Ray."""
    sections = [master, np.zeros_like(master), np.zeros_like(master)]
    for tensor in spec.tensors:
        sections[1][tensor.offset : tensor.end] = step + spec.index
        sections[2][tensor.offset : tensor.end] = step * 1000 + spec.index
    data = np.concatenate(sections).view(np.uint8)
    data.flags.writeable = False
    return PackedLayer(spec.index, step, "float32", STATE, data)


def save(model_dir: Path, output_dir: Path, step: int = 50, attn: str = "sdpa") -> Path:
    """Writes the weights of a model directory as a checkpoint."""
    model = StreamModel.from_config_dir(str(model_dir), attn_implementation=attn)
    source = open_source(str(model_dir), model)
    checkpoint = CheckpointWriter(str(output_dir), step, describe_saving(model, str(model_dir)))
    for spec in reversed(model.layers):  # any order
        checkpoint.write_layer(spec, state_of(spec, step, source.read_layer(spec)))
    return checkpoint.finish({"sampler": {"position": 3}})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_loads_with_transformers_and_resumes(family: str, tmp_path: Path) -> None:
    attn = attn_implementation(family)
    model_dir = make_model_dir(tmp_path / "model", family=family)
    path = save(model_dir, tmp_path / "run", attn=attn)
    assert path == tmp_path / "run" / "checkpoint-50"
    expected = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation=attn)
    got, info = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attn, output_loading_info=True)
    assert not any(info.values()), info
    assert got.dtype == torch.float32
    for (name, parameter), (_, other) in zip(expected.named_parameters(), got.named_parameters(), strict=True):
        assert torch.equal(parameter, other), name

    expected.save_pretrained(tmp_path / "reference")
    reference = load_file(tmp_path / "reference" / "model.safetensors")
    ours = {name: tensor for shard in path.glob("model-*.safetensors") for name, tensor in load_file(shard).items()}
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in reference)

    model = StreamModel.from_config_dir(str(path), attn_implementation=attn)
    masters = open_source(str(model_dir), model)
    resumed = ResumeSource(str(path), model)
    assert resumed.step == 50
    assert resumed.trainer_state == {"sampler": {"position": 3}, "step": 50, "model_dtype": "bfloat16"}
    for spec in model.layers:
        packed = resumed.read_layer(spec)
        assert (packed.layer, packed.step, packed.sections) == (spec.index, 50, STATE)
        assert packed.data.tobytes() == state_of(spec, 50, masters.read_layer(spec)).data.tobytes()


def test_what_lies_in_a_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    path = save(model_dir, tmp_path / "run")
    assert AutoTokenizer.from_pretrained(path)("a b a").input_ids == [1, 2, 1]
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in path.glob("model-*.safetensors")}
    for shard in path.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            assert file.metadata()["format"] == "pt"
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["checkpoint-50"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"].keys() | {"manifest.json"} == {entry.name for entry in path.iterdir()}
    assert find_problem(path, deep=True) is None


def test_moments_that_were_never_written_are_zero(model_dir: Path, tmp_path: Path) -> None:
    model = StreamModel.from_config_dir(str(model_dir))
    source = open_source(str(model_dir), model)
    checkpoint = CheckpointWriter(str(tmp_path / "run"), 0, describe_saving(model, str(model_dir)))
    for spec in model.layers:
        master = source.read_layer(spec)
        checkpoint.write_layer(spec, PackedLayer(spec.index, 0, "float32", MASTER, master.view(np.uint8)))
    resumed = ResumeSource(str(checkpoint.finish({})), model)
    packed = resumed.read_layer(model.layers[1])
    assert packed.section("master").any()
    assert not packed.section("exp_avg").any()
    assert not packed.section("exp_avg_sq").any()


NO_TORCH = """
import pickle, sys
import numpy as np
from megatrain_ray.checkpoint.writer import CheckpointWriter
from megatrain_ray.packed import MASTER, PackedLayer
spec = pickle.load(sys.stdin.buffer)
writer = CheckpointWriter(sys.argv[1], 1, spec)
for layer in spec.layers:
    writer.write_layer(layer, PackedLayer(layer.index, 1, "float32", MASTER, np.zeros(4 * layer.numel, np.uint8)))
writer.finish({})
print(sorted({"torch", "transformers", "ray"} & set(sys.modules)))
"""


def test_writing_needs_no_torch(model_dir: Path, tmp_path: Path) -> None:
    spec = describe_saving(StreamModel.from_config_dir(str(model_dir)), str(model_dir))
    command = [sys.executable, "-c", NO_TORCH, str(tmp_path / "run")]
    run = subprocess.run(command, input=pickle.dumps(spec), capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout.decode().strip() == "[]"
    assert find_problem(tmp_path / "run" / "checkpoint-1", deep=True) is None


def test_a_full_disk_leaves_the_older_checkpoint(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model_dir, tmp_path / "run", step=1)
    written: list[int] = []
    write = SafetensorsWriter._write

    def until_full(self: SafetensorsWriter, view: memoryview) -> None:
        written.append(len(view))
        if sum(written) > 500_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, view)

    monkeypatch.setattr(SafetensorsWriter, "_write", until_full)
    with pytest.raises(StoreError, match=r"checkpoint-2: cannot be written: No space left"):
        save(model_dir, tmp_path / "run", step=2)
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["checkpoint-1"]
    newest = newest_complete(tmp_path / "run", deep=True)
    assert newest is not None and newest.step == 1


def test_too_little_room_is_refused_before_writing(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(StoreError, match=r"a checkpoint needs \d+ bytes, the file system has 1000 free"):
        save(model_dir, tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_an_interrupted_save_is_no_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    model = StreamModel.from_config_dir(str(model_dir))
    spec = describe_saving(model, str(model_dir))
    source = open_source(str(model_dir), model)
    checkpoint = CheckpointWriter(str(output_dir), 7, spec)
    layer = model.layers[1]
    checkpoint.write_layer(layer, state_of(layer, 7, source.read_layer(layer)))
    assert newest_complete(output_dir) is None and list_checkpoints(output_dir) == []
    assert [path.name for path in remove_debris(output_dir)] == [".checkpoint-7.partial"]
    assert list(output_dir.iterdir()) == []

    checkpoint = CheckpointWriter(str(output_dir), 7, spec)
    with pytest.raises(AssertionError, match="never written"):
        checkpoint.finish({})
    CheckpointWriter(str(output_dir), 7, spec).abort()
    assert list(output_dir.iterdir()) == []


def test_a_checkpoint_of_the_same_step_is_replaced(model_dir: Path, tmp_path: Path) -> None:
    other = make_model_dir(tmp_path / "other", seed=1)
    save(model_dir, tmp_path / "run")
    path = save(other, tmp_path / "run")
    expected = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    got = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(got.lm_head.weight, expected.lm_head.weight)
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["checkpoint-50"]


def test_what_is_renamed_is_on_the_disk(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, then the directory that names them, then the rename, then the directory above."""
    events: list[tuple[str, Path, int]] = []
    fsync, rename = os.fsync, os.rename

    def traced_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor).st_size))

    def traced_rename(source: Path, target: Path) -> None:
        rename(source, target)
        events.append(("rename", Path(target), 0))

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "rename", traced_rename)
    path = save(model_dir, tmp_path / "run")
    (renamed,) = (index for index, event in enumerate(events) if event == ("rename", path, 0))
    before, after = events[:renamed], events[renamed + 1 :]
    flushed = {file.name: size for _, file, size in before if file.parent.name == ".checkpoint-50.partial"}
    assert flushed == {file.name: file.stat().st_size for file in path.iterdir()}
    assert before[-1][:2] == ("fsync", path.with_name(".checkpoint-50.partial"))
    assert after[0][:2] == ("fsync", path.parent)


def test_checkpoints_are_ordered_by_number_and_others_left_alone(model_dir: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    for step in (9, 10, 100):
        save(model_dir, output_dir, step)
    for name in ("checkpoint-best", "checkpoint-007", "old-checkpoint-200"):
        (output_dir / name).mkdir()
    (output_dir / "checkpoint-300").write_text("a file")
    (output_dir / "checkpoint-200").mkdir()
    found = list_checkpoints(output_dir)
    assert [checkpoint.step for checkpoint in found] == [9, 10, 100, 200]
    assert found[-1].problem is not None and "never completed" in found[-1].problem
    newest = newest_complete(output_dir)
    assert newest is not None and newest.step == 100
    assert [path.name for path in prune_checkpoints(output_dir, 1)] == ["checkpoint-9", "checkpoint-10"]
    assert {"checkpoint-100", "checkpoint-200", "checkpoint-best", "checkpoint-007"} < {
        path.name for path in output_dir.iterdir()
    }


def shorten(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "name", "deep", "message"),
    [
        (Path.unlink, "optimizer-00002-of-00006.safetensors", False, "is missing"),
        (shorten, "model-00003-of-00006.safetensors", False, r"has \d+ bytes, expected \d+"),
        (flip_a_byte, "model-00003-of-00006.safetensors", True, "corrupt"),
        (shorten, "manifest.json", False, "cannot be read"),
        (Path.unlink, "manifest.json", False, "never completed"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    spoil: Any, name: str, deep: bool, message: str, model_dir: Path, tmp_path: Path
) -> None:
    save(model_dir, tmp_path / "run", 1)
    path = save(model_dir, tmp_path / "run", 2)
    spoil(path / name)
    newest = newest_complete(tmp_path / "run", deep=deep)
    assert newest is not None and newest.step == 1
    problem = find_problem(path, deep=deep)
    assert problem is not None and name in problem and re.search(message, problem)
    if not deep:
        with pytest.raises(ModelError, match=message):
            ResumeSource(str(path), StreamModel.from_config_dir(str(path)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_that_means_another_model_is_noticed(family: str, tmp_path: Path) -> None:
    """Its keys are named; how it is written is no difference."""
    model_dir = make_model_dir(tmp_path / "model", family=family)
    checkpoint = save(model_dir, tmp_path / "run", attn=attn_implementation(family))

    def changed(**changes: Any) -> list[tuple[str, Any, Any]]:
        content = json.loads((checkpoint / "config.json").read_text()) | changes
        (tmp_path / "model" / "config.json").write_text(json.dumps(content))
        model = StreamModel.from_config_dir(str(model_dir), attn_implementation=attn_implementation(family))
        open_source(str(model_dir), model)
        return model_differences(checkpoint, model, describe_saving(model, str(model_dir)))

    assert changed(transformers_version="0.1", dtype="float16", architectures=["Other"], use_cache=False) == []
    written_out = AutoConfig.from_pretrained(checkpoint).to_dict()
    assert changed(**written_out) == []
    epsilon = next(key for key in written_out if key.endswith(("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")))
    assert changed(**{epsilon: 0.5}) == [(epsilon, written_out[epsilon], 0.5)]


def test_resuming_with_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    path = save(model_dir, tmp_path / "run")
    with pytest.raises(ModelError, match=r"by config\.json it is \[129, 66\]"):
        ResumeSource(str(path), StreamModel.from_config(awkward_llama(intermediate_size=129)))


@pytest.mark.parametrize("family", [None, "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_export_has_the_dtype_that_was_asked_for(family: str | None, dtype: str | None, tmp_path: Path) -> None:
    path = save(make_model_dir(tmp_path / "model", family=family), tmp_path / "run")
    out = export(str(path), str(tmp_path / "out"), dtype)
    expected = getattr(torch, dtype or "bfloat16")
    assert AutoConfig.from_pretrained(out).dtype == expected
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {expected}
    assert {entry.name for entry in out.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert not list(out.glob("optimizer*")) and not (out / "manifest.json").exists()
    got = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    plain = AutoModelForCausalLM.from_pretrained(path).to(expected)
    for name, parameter in plain.named_parameters():
        assert torch.equal(got.get_parameter(name), parameter), name


def test_export_over_an_older_and_differently_sharded_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (save(make_model_dir(tmp_path / f"model{seed}", seed=seed), tmp_path / f"run{seed}") for seed in (0, 1))
    out = tmp_path / "out"
    for checkpoint, shard_numel in ((old, 10_000), (new, 10**9), (old, 50_000)):
        monkeypatch.setattr(writer, "EXPORT_SHARD_NUMEL", shard_numel)
        export(str(checkpoint), str(out))
        (out / "README.md").write_text("mine")
        got, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(info.values())
        expected = AutoModelForCausalLM.from_pretrained(checkpoint).to(torch.bfloat16)
        assert torch.equal(got.lm_head.weight, expected.lm_head.weight)
        shards = {path.name for path in out.glob("*.safetensors")}
        index = out / "model.safetensors.index.json"
        listed = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        assert shards == listed
    assert len(shards) > 1 and (out / "README.md").read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_export_does_not_touch_what_is_no_model(model_dir: Path, tmp_path: Path) -> None:
    path = save(model_dir, tmp_path / "run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out, message in (
        (tmp_path / "notes", "holds no model"),
        (tmp_path / "file", "no directory"),
        (path, "is a checkpoint"),
    ):
        with pytest.raises(RunDirectoryError, match=message):
            export(str(path), str(out))
    with pytest.raises(ModelError, match="cannot export in int8"):
        export(str(path), str(tmp_path / "out"), "int8")
    shorten(path / "model-00001-of-00006.safetensors")
    with pytest.raises(ModelError, match=r"has \d+ bytes, expected"):
        export(str(path), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_failed_export_leaves_the_older_one(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(model_dir, tmp_path / "run")
    out = export(str(path), str(tmp_path / "out"))
    before = {entry.name: entry.read_bytes() for entry in out.iterdir()}

    def fail(self: ExportWriter, index: int, flat: NDArray[np.float32]) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(ExportWriter, "write_layer", fail)
    with pytest.raises(OSError, match="broken"):
        export(str(path), str(out), "float32")
    assert {entry.name: entry.read_bytes() for entry in out.iterdir()} == before
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casting_rounds_as_torch_does(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 64)
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint64).astype(np.uint32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45, 65504, 65520], np.float32)
    values = np.concatenate([bits.view(np.float32), special])
    got = np.concatenate(list(cast_blocks(values, dtype)))
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    not_nan = ~np.isnan(values)
    assert np.array_equal(got.view(np.uint16)[not_nan], expected.view(torch.uint16).numpy()[not_nan])
    assert torch.from_numpy(got.view(np.uint16)).view(getattr(torch, dtype))[torch.from_numpy(~not_nan)].isnan().all()


@pytest.fixture
def described(model_dir: Path) -> Iterator[Any]:
    model = StreamModel.from_config_dir(str(model_dir))
    yield lambda **options: describe_saving(model, str(model_dir), **options)


def test_generation_settings_that_transformers_refuses_are_reported_and_carried(
    model_dir: Path, tmp_path: Path, described: Any
) -> None:
    content = '{"do_sample": false, "temperature": 0.5, "top_p": 0.9}'
    (model_dir / "generation_config.json").write_text(content)
    (warning,) = described().warnings
    assert "generation_config.json" in warning and "temperature" in warning
    path = save(model_dir, tmp_path / "run")
    assert (path / "generation_config.json").read_text() == content
    assert AutoModelForCausalLM.from_pretrained(path).generation_config.top_p == 0.9


def test_a_chat_template_of_the_configuration_is_saved(model_dir: Path, tmp_path: Path, described: Any) -> None:
    spec: SaveSpec = described(chat_template="{{ 'mine' }}")
    for name, content in spec.files.items():
        (tmp_path / name).write_bytes(content)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == "{{ 'mine' }}"
    assert AutoTokenizer.from_pretrained(model_dir).chat_template == "{{ messages }}"


def test_dtype_of_the_configuration(model_dir: Path, described: Any) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert described().model_dtype == "bfloat16"
    config["torch_dtype"] = config.pop("dtype").replace("bfloat16", "float16")
    (model_dir / "config.json").write_text(json.dumps(config))
    assert described().model_dtype == "float16"
    del config["torch_dtype"]
    (model_dir / "config.json").write_text(json.dumps(config))
    assert described().model_dtype == "float32"
    assert described(model_dtype="bfloat16").model_dtype == "bfloat16"


def test_rows_beyond_the_tokenizer_are_kept(model_dir: Path, tmp_path: Path) -> None:
    out = export(str(save(model_dir, tmp_path / "run")), str(tmp_path / "out"))
    assert len(AutoTokenizer.from_pretrained(out)) == 4
    assert AutoModelForCausalLM.from_pretrained(out).get_input_embeddings().weight.shape[0] == 997


def test_blocks_smaller_than_a_tensor(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = export(str(save(model_dir, tmp_path / "run")), str(tmp_path / "out")) / "model.safetensors"
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(writer, "BLOCK_BYTES", 4096)
    got = export(str(save(model_dir, tmp_path / "run2")), str(tmp_path / "out2")) / "model.safetensors"
    assert got.read_bytes() == expected.read_bytes()
