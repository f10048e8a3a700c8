"""Every mistake in a configuration is found before anything starts, and shown with file, line and key."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatrain_ray.config import SCHEDULERS, Config, differences, load_config, parse_bytes
from megatrain_ray.errors import ConfigError

EXAMPLES = Path(__file__).parents[1] / "examples"

BASE = """\
model:
  name_or_path: path/to/hf_dir
  init: pretrained
  dtype: auto
data:
  path: data.jsonl
  format: auto
  eval_path: null
training:
  output_dir: runs/first
  max_steps: 100
  learning_rate: 1e-5
  lr_scheduler_type: cosine
  warmup_steps: 10
  max_grad_norm: 1.0
  report_to: []
tiers:
  device: auto
  host_memory: 8GiB
  prefetch_depth: auto
ray:
  address: null
"""

DOCUMENTED = """\
model:
  name_or_path: path/to/hf_dir    # directory (config.json, *.safetensors, tokenizer) or hub id
  init: pretrained                # or: random (config.json alone is enough)
  dtype: auto                     # compute dtype: float32 | bfloat16 | auto (the checkpoint's on a GPU, float32 on CPU)
  attn_implementation: sdpa
  trust_remote_code: false
data:
  path: data.jsonl                # file, list of files, or hub id; .json .jsonl .parquet .txt
  format: auto                    # text | alpaca | sharegpt | messages | tokens
  eval_path: null
  max_length: 1024
  packing: false                  # several samples a row, no attention across them
  assistant_only_loss: true       # chat formats: targets are every assistant turn with its end marker
  chat_template: null
training:                         # names and meanings of transformers.TrainingArguments
  output_dir: runs/first
  max_steps: 100                  # or num_train_epochs
  per_device_train_batch_size: 2  # sequences in one micro-batch
  gradient_accumulation_steps: 4  # micro-batches in one optimizer step
  learning_rate: 1e-5
  lr_scheduler_type: cosine       # as transformers.get_scheduler
  warmup_steps: 10
  weight_decay: 0.01              # never on norms, biases and other 1-D parameters
  adam_beta1: 0.9
  adam_beta2: 0.999
  adam_epsilon: 1e-8
  max_grad_norm: 1.0              # 0 or null: no clipping
  save_steps: 50
  save_total_limit: 2
  eval_steps: null
  logging_steps: 1
  report_to: []                   # tensorboard, wandb
  shuffle: true
  seed: 0
tiers:
  device: auto                    # cuda:0 | cpu
  nvme_dir: null                  # default: output_dir/store
  placement: auto                 # auto | ram | nvme: where masters and moments live
  host_memory: auto               # limits; "8GiB" style; auto respects cgroups
  object_store_memory: auto
  device_memory: auto
  prefetch_depth: auto            # 0: serial reference
ray:
  address: null                   # null: RAY_ADDRESS if set, else a local instance of its own
"""
"""Every key that the documentation shows, as it shows it."""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_what_people_type(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "\ufeff" + BASE))
    assert config.training.learning_rate == 1e-5
    assert config.tiers.host_memory == 8 << 30
    assert config.data.paths == ("data.jsonl",)
    assert config.training.weight_decay == 0.01
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config


def test_the_examples_load() -> None:
    loaded = {path.stem for path in EXAMPLES.rglob("*.yaml") if load_config(path)}
    assert loaded >= {"alpaca", "identity", "quickstart", "larger_than_memory", "llama-3-70b"}


def test_the_documented_configuration_loads_as_it_is(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, DOCUMENTED))
    shown = yaml.safe_load(DOCUMENTED)
    defaults = Config.from_mapping(
        {
            "model": {"name_or_path": "path/to/hf_dir"},
            "data": {"path": "data.jsonl"},
            "training": {"output_dir": "runs/first", "max_steps": 100},
        }
    )
    assert config == defaults
    for section, keys in shown.items():
        assert set(keys) <= set(type(getattr(config, section)).model_fields)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # Keys: unknown, misplaced, repeated.
        ("  dtype: auto", "  dtyp: auto", "run.yaml:4: unknown key model.dtyp; did you mean dtype?"),
        ("  dtype: auto", "  zzz: 1", "run.yaml:4: unknown key model.zzz; remove it"),
        ("  dtype: auto", "  bf16: true", "run.yaml:4: unknown key model.bf16; here it is model.dtype: bfloat16"),
        ("  warmup_steps: 10", "  warmup_ratio: 0.1", "run.yaml:14: unknown key training.warmup_ratio; here it is"),
        ("  init: pretrained", "  max_steps: 3", "run.yaml:3: unknown key model.max_steps; it belongs into section tr"),
        ("  init: pretrained", "  dtype: auto", "run.yaml:4: model.dtype is repeated (first: "),
        ("  dtype: auto", "  ? [a, b]\n  : 1", "run.yaml:4: expected a name as key"),
        ("ray:\n", "rya:\n", "run.yaml:21: unknown section 'rya'; did you mean ray?"),
        ("ray:\n", "data:\n", "run.yaml:21: data is repeated (first: "),
        ("model:\n", "max_steps: 3\nmodel:\n", "run.yaml:1: unknown section 'max_steps'; it belongs into section tr"),
        ("ray:\n  address: null", "ray: 5", "run.yaml:21: section ray: expected keys, got 5"),
        ("  path: data.jsonl\n", "", "run.yaml:5: data.path is missing; add it"),
        # Types and limits.
        ("1e-5", '"abc"', "run.yaml:12: training.learning_rate: expected a number; got 'abc'"),
        ("1e-5", "true", "run.yaml:12: training.learning_rate: expected a number; got True"),
        ("1e-5", "", "run.yaml:12: training.learning_rate: expected a number; got None"),
        ("1e-5", "-1", "run.yaml:12: training.learning_rate: expected greater than or equal to 0; got -1"),
        ("1e-5", ".nan", "run.yaml:12: training.learning_rate: expected a finite number; got nan"),
        ("1e-5", "1e400", "run.yaml:12: training.learning_rate: expected a finite number; got '1e400'"),
        ("max_steps: 100", "per_device_train_batch_size: 2.5", "train_batch_size: expected a whole number; got 2.5"),
        ("max_steps: 100", "per_device_train_batch_size: 0", "expected greater than or equal to 1; got 0"),
        ("max_steps: 100", "max_steps: .inf", "run.yaml:11: training.max_steps: expected a whole number; got inf"),
        ("max_steps: 100", "max_steps: true", "run.yaml:11: training.max_steps: expected a number; got True"),
        ("max_steps: 100", "max_steps: [3]", "run.yaml:11: training.max_steps: expected a number; got [3]"),
        ("max_steps: 100", "seed: -1", "run.yaml:11: training.seed: expected greater than or equal to 0; got -1"),
        ("max_steps: 100", "shuffle: 1", "run.yaml:11: training.shuffle: expected true or false; got 1"),
        ("warmup_steps: 10", "warmup_steps: 2.5", "run.yaml:14: training.warmup_steps: expected a whole number of st"),
        ("report_to: []", "report_to: [mlflow]", "run.yaml:16: training.report_to: expected 'tensorboard' or 'wandb'"),
        ("device: auto", "device: tpu", "run.yaml:18: tiers.device: expected auto, cpu, cuda or cuda:N; got 'tpu'"),
        ("8GiB", "8 apples", "run.yaml:19: tiers.host_memory: expected 'auto' or a size above 0, such as 8GiB; got"),
        ("8GiB", "true", "run.yaml:19: tiers.host_memory: expected 'auto' or a size above 0"),
        ("prefetch_depth: auto", "prefetch_depth: deep", "tiers.prefetch_depth: expected 'auto' or a number; got"),
        ("path/to/hf_dir", "5", "run.yaml:2: model.name_or_path: expected text; got 5"),
        ("path/to/hf_dir", '""', "run.yaml:2: model.name_or_path: expected text that is not empty; got ''"),
        ("data.jsonl", "[]", "run.yaml:6: data.path: expected text or a list that is not empty; got []"),
        ("data.jsonl", "2024-13-45", "run.yaml:6: data.path: month must be in 1..12; got '2024-13-45': put it in quo"),
        # Keys that must agree.
        ("max_steps: 100", "eval_steps: 5", "run.yaml:11: training.eval_steps: needs data.eval_path"),
        ("type: cosine", "type: cosin", "run.yaml:13: training.lr_scheduler_type: expected one of constant, "),
        ("type: cosine", "type: warmup_stable_decay", "run.yaml:13: training.lr_scheduler_type: warmup_stable_decay"),
        ("max_steps: 100", "lr_scheduler_kwargs: {lr_end: 0}", "run.yaml:11: training.lr_scheduler_kwargs: cosine ta"),
        ("max_steps: 100", "lr_scheduler_kwargs: {num_cycles: x}", "lr_scheduler_kwargs: expected a number; got"),
        # Files that are no configuration.
        ("data.jsonl", "[data.jsonl", "run.yaml:7: not valid YAML"),
        ("data.jsonl", "\x07", "run.yaml:6: not valid YAML: character 0x7 is not text"),
        ("data.jsonl", "&a [*a]", "nested too deeply, or an alias"),
    ],
)  # fmt: skip
def test_mistakes_name_file_line_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert BASE.count(old) == 1 or old.startswith("  ") or old.endswith("\n")
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, BASE.replace(old, new, 1)))
    assert message in str(caught.value)
    assert caught.value.exit_status == 2


def test_overrides_pass_the_same_checks(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    assert load_config(path, ["training.learning_rate=0", "data.path=[a.txt, b.txt]"]).data.paths == ("a.txt", "b.txt")
    for override, message in [
        (
            "training.learning_rate=fast",
            "--set training.learning_rate=fast: training.learning_rate: expected a number; got 'fast'",
        ),
        ("training.lr=1", "--set training.lr=1: unknown key training.lr"),
        ("trainig.seed=1", "did you mean training?"),
        ("seed=1", "--set seed=1: expected section.key=value"),
        ("training.seed", "--set training.seed: expected section.key=value"),
        ("model.dtype=[", "--set model.dtype=[: not valid YAML"),
        ("data.eval_path=2024-13-45", "month must be in 1..12"),
        ("training.lr_scheduler_kwargs={a: 1, a: 2}", "lr_scheduler_kwargs.a is repeated"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(path, [override])
        assert message in str(caught.value)
    broken = write(tmp_path, BASE.replace("ray:\n  address: null", "ray: 5"))
    with pytest.raises(ConfigError, match="section ray: expected keys, got 5"):
        load_config(broken, ["ray.address=auto"])


def test_a_missing_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match=r"model\.name_or_path is missing"):
        load_config(write(tmp_path, ""))
    with pytest.raises(ConfigError, match="expected sections"):
        load_config(write(tmp_path, "- a\n"))
    (tmp_path / "utf16.yaml").write_bytes(BASE.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"utf16\.yaml: expected UTF-8 text, got byte 0xff at 0"):
        load_config(tmp_path / "utf16.yaml")


def test_differences_leave_out_what_does_not_change_the_run(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    old = load_config(path)
    assert (
        differences(
            old, load_config(path, ["tiers.prefetch_depth=0", "training.output_dir=b", "training.save_steps=3"])
        )
        == []
    )
    assert differences(old, load_config(path, ["training.max_steps=7"])) == [("training.max_steps", 100, 7)]


def test_built_in_code() -> None:
    config = Config.from_mapping(
        {"model": {"name_or_path": "m"}, "data": {"path": "d"}, "training": {"output_dir": "o", "warmup_steps": 0.1}}
    )
    assert config.training.warmup(50) == 5
    with pytest.raises(ConfigError, match=r"configuration: data\.path is missing"):
        Config.from_mapping({"model": {"name_or_path": "m"}, "data": {}, "training": {"output_dir": "o"}})


def test_sections_without_keys_mean_defaults(tmp_path: Path) -> None:
    text = BASE.replace("ray:\n  address: null", "ray:")
    assert load_config(write(tmp_path, text)) == load_config(write(tmp_path, BASE))
    assert load_config(write(tmp_path, text), ["ray.address=auto"]).ray.address == "auto"


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("500 MB", 500_000_000), ("1.5kib", 1536), ("7", 7), (4096, 4096), ("2T", None), ("-1B", None)],
)
def test_sizes(text: object, size: int | None) -> None:
    if size is not None:
        assert parse_bytes(text) == size
        return
    with pytest.raises(ValueError, match="expected a size above 0"):
        parse_bytes(text)


def test_a_scheduler_gets_what_transformers_takes(tmp_path: Path) -> None:
    from transformers import SchedulerType
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    without_steps = {"reduce_lr_on_plateau", "greedy"}  # these look at the loss
    assert set(SCHEDULERS) == {kind.value for kind in SchedulerType} - without_steps
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for kind, names in SCHEDULERS.items():
        assert set(names) == set(inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[kind]).parameters) - ours
    path = write(tmp_path, BASE.replace("type: cosine", "type: cosine_with_min_lr"))
    config = load_config(path, ["training.lr_scheduler_kwargs={min_lr_rate: 1e-1}"])
    assert config.training.lr_scheduler_kwargs == {"min_lr_rate": 0.1}


def test_reading_a_configuration_loads_no_framework() -> None:
    code = "import sys, megatrain_ray.config; print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
