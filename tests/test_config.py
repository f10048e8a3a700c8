"""Every mistake in a configuration is found before anything starts, and shown with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain_ray.config import Config, differences, load_config
from megatrain_ray.errors import ConfigError

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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  dtype: auto", "  dtyp: auto", "run.yaml:4: unknown key model.dtyp; did you mean dtype?"),
        ("  init: pretrained", "  max_steps: 3", "run.yaml:3: unknown key model.max_steps; it belongs into"),
        ("  init: pretrained", "  dtype: auto", "run.yaml:4: model.dtype is repeated"),
        ("ray:\n", "rya:\n", "run.yaml:21: unknown section 'rya'; did you mean ray?"),
        ("model:\n", "max_steps: 3\nmodel:\n", "run.yaml:1: unknown section 'max_steps'; it belongs into"),
        ("  learning_rate: 1e-5", '  learning_rate: "abc"', "run.yaml:12: training.learning_rate: a number is"),
        ("  learning_rate: 1e-5", "  learning_rate: -1", "run.yaml:12: training.learning_rate"),
        ("  learning_rate: 1e-5", "  learning_rate: .nan", "run.yaml:12: training.learning_rate"),
        ("  max_steps: 100", "  max_steps: 2.5", "run.yaml:11: training.max_steps: a whole number is expected"),
        ("  max_steps: 100", "  max_steps: true", "run.yaml:11: training.max_steps: a number is expected"),
        ("  max_steps: 100", "  max_steps: 0", "run.yaml:11: training.max_steps"),
        ("  device: auto", "  device: tpu", "run.yaml:18: tiers.device"),
        ("  host_memory: 8GiB", "  host_memory: 8 apples", "run.yaml:19: tiers.host_memory"),
        ("  lr_scheduler_type: cosine", "  lr_scheduler_type: cosin", "run.yaml:13: training.lr_scheduler_type"),
        ("  path: data.jsonl\n", "", "run.yaml:5: data.path is missing"),
        ("  max_steps: 100", "  max_steps: 100\n  eval_steps: 5", "eval_steps needs data.eval_path"),
        ("  path: data.jsonl", "  path: [data.jsonl", "not valid YAML"),
        ("  name_or_path: path/to/hf_dir", "  name_or_path: 5", "run.yaml:2: model.name_or_path"),
    ],
)  # fmt: skip
def test_mistakes_name_file_line_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in BASE
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
            "--set training.learning_rate=fast: training.learning_rate: a number is expected",
        ),
        ("training.lr=1", "--set training.lr=1: unknown key training.lr"),
        ("trainig.seed=1", "did you mean training?"),
        ("seed=1", "expected section.key=value"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(path, [override])
        assert message in str(caught.value)


def test_a_missing_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="model is missing"):
        load_config(write(tmp_path, ""))
    with pytest.raises(ConfigError, match="expected sections"):
        load_config(write(tmp_path, "- a\n"))


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
