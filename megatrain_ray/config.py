"""The configuration: typed sections, and the only parser. Every problem is an error that names key and line.

YAML is composed into nodes first, so that each key knows its line; then pydantic checks types and limits. Overrides
(``--set training.learning_rate=1e-4``) go through the same checks.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from megatrain_ray.errors import ConfigError

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "RayConfig",
    "TiersConfig",
    "TrainingConfig",
    "differences",
    "load_config",
    "parse_bytes",
]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def parse_bytes(value: Any) -> Any:
    """``8GiB``, ``500 MB`` or a number of bytes, as bytes; anything else is left for the type check."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", value)):
        unit = _UNITS.get(match[2].upper())
        if unit is not None:
            return int(float(match[1]) * unit)
    return value


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-5`` as text; people mean a number. Booleans are not numbers."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"a number is expected, not the text {value!r}") from None
    return value


def _whole(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"a whole number is expected, not {value:g}")
        return int(value)
    return value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_whole)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
AutoBytes = Literal["auto"] | Bytes
AutoWhole = Literal["auto"] | Annotated[Whole, Field(ge=0)]

SCHEDULERS = (
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "inverse_sqrt",
    "linear",
    "polynomial",
    "warmup_stable_decay",
)
"""Names of `transformers.get_scheduler` that depend on the step alone."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(_Section):
    """What is trained."""

    name_or_path: str
    """Directory with config.json, *.safetensors and tokenizer, or a hub id."""
    init: Literal["pretrained", "random"] = "pretrained"
    """``random`` needs config.json alone."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; ``auto``: the checkpoint's on a GPU, float32 on a CPU. Masters and moments are always float32."""
    attn_implementation: str = "sdpa"
    """As in transformers; one that the model refuses becomes ``eager``, and that is said."""
    trust_remote_code: bool = False
    """Run Python code that the model directory brings."""


class DataConfig(_Section):
    """What it is trained on."""

    path: str | tuple[str, ...]
    """File, list of files, or hub id; .json .jsonl .parquet .txt."""
    format: Literal["auto", "text", "alpaca", "sharegpt", "messages", "tokens"] = "auto"
    """What a row looks like."""
    eval_path: str | tuple[str, ...] | None = None
    """Held-out data, in the same format."""
    max_length: Annotated[Whole, Field(ge=2)] = 1024
    """Longest row, in tokens."""
    packing: bool = False
    """Several samples a row, no attention across them."""
    assistant_only_loss: bool = True
    """Chat formats: targets are every assistant turn with its end marker."""
    chat_template: str | None = None
    """Jinja template, or a file that holds one; overrides the tokenizer's."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class TrainingConfig(_Section):
    """How it is trained; names and meanings of transformers.TrainingArguments."""

    output_dir: str
    """Where the run's files go."""
    max_steps: Annotated[Whole, Field(ge=1)] | None = None
    """Optimizer steps; wins over ``num_train_epochs``."""
    num_train_epochs: Annotated[Number, Field(gt=0)] | None = None
    """Passes over the data; 1 when ``max_steps`` is not given either."""
    per_device_train_batch_size: Annotated[Whole, Field(ge=1)] = 2
    """Sequences in one micro-batch."""
    gradient_accumulation_steps: Annotated[Whole, Field(ge=1)] = 4
    """Micro-batches in one optimizer step."""
    learning_rate: Annotated[Number, Field(ge=0)] = 1e-5
    """Peak learning rate."""
    lr_scheduler_type: Literal[SCHEDULERS] = "cosine"  # type: ignore[valid-type]
    """As `transformers.get_scheduler`."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the scheduler."""
    warmup_steps: Annotated[Number, Field(ge=0)] = 10
    """Steps of linear warm-up; a fraction below 1 is a share of all steps."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.01
    """Never on norms, biases and other 1-D parameters."""
    adam_beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.999
    """Decay rate of the second moment."""
    adam_epsilon: Annotated[Number, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    max_grad_norm: Annotated[Number, Field(ge=0)] | None = 1.0
    """Clips the global norm; 0 or null: no clipping."""
    label_smoothing_factor: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """As in `torch.nn.functional.cross_entropy`."""
    save_steps: Annotated[Whole, Field(ge=1)] | None = 50
    """Steps between checkpoints; null: at the end only."""
    save_total_limit: Annotated[Whole, Field(ge=1)] | None = 2
    """Checkpoints to keep; null: all."""
    eval_steps: Annotated[Whole, Field(ge=1)] | None = None
    """Steps between evaluations on ``data.eval_path``."""
    logging_steps: Annotated[Whole, Field(ge=1)] = 1
    """Steps between lines on the terminal and in trackers; metrics.jsonl has every step."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers."""
    shuffle: bool = True
    """Deterministic per epoch."""
    group_by_length: bool = False
    """Rows of similar length together: less padding."""
    seed: Whole = 0
    """Of shuffling, random initialization and dropout."""

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.warmup_steps >= 1 and not float(self.warmup_steps).is_integer():
            raise ValueError(
                f"warmup_steps: a whole number, or a fraction below 1, is expected, not {self.warmup_steps:g}"
            )
        return self

    def warmup(self, total_steps: int) -> int:
        """Warm-up in steps."""
        return math.ceil(self.warmup_steps * total_steps) if self.warmup_steps < 1 else int(self.warmup_steps)


class TiersConfig(_Section):
    """Where things live."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """``cuda:0`` or ``cpu``; ``auto``: the GPU if there is one."""
    nvme_dir: str | None = None
    """The store; default: output_dir/store."""
    placement: Literal["auto", "ram", "nvme"] = "auto"
    """Where masters and moments live."""
    host_memory: AutoBytes = "auto"
    """Limit of all processes together; ``auto`` respects cgroups."""
    object_store_memory: AutoBytes = "auto"
    """Size of Ray's object store."""
    device_memory: AutoBytes = "auto"
    """Limit on the device."""
    prefetch_depth: AutoWhole = "auto"
    """Layers fetched ahead; 0: serial reference."""
    recompute: Literal["auto", "all"] | Annotated[Whole, Field(ge=0)] = "auto"
    """Decoder layers that recompute in backward; the last ones keep their graph when memory allows."""
    loss_chunk_tokens: Literal["auto"] | Annotated[Whole, Field(ge=1)] = "auto"
    """Target tokens whose logits exist at once."""
    direct_io: bool = True
    """O_DIRECT where the file system takes it."""
    deadline_s: Annotated[Number, Field(gt=0)] = 600.0
    """Longest wait for one action of an actor."""


class RayConfig(_Section):
    """Which Ray."""

    address: str | None = None
    """null: RAY_ADDRESS if set (as under `ray job submit`), else a local instance of its own."""
    dashboard: bool = True
    """Dashboard of a local instance, on the loopback interface."""


class Config(_Section):
    """A run."""

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    tiers: TiersConfig = TiersConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.training.eval_steps is not None and self.data.eval_path is None:
            raise ValueError("training.eval_steps needs data.eval_path")
        return self

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "configuration") -> Config:
        """A configuration built in code.

        Raises:
            ConfigError: Naming the key.
        """
        return _validate(values, {}, source)

    def to_yaml(self) -> str:
        """Text that `load_config` reads back to the same configuration."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


_SECTIONS: dict[str, type[_Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "tiers": TiersConfig,
    "ray": RayConfig,
}

_Lines = dict[tuple[str, ...], str]
"""Where each key stands: ``file:line``, or ``--set``."""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads a YAML file.

    Args:
        path: The file; a byte-order mark is fine.
        overrides: ``section.key=value``, each value read as YAML.

    Raises:
        ConfigError: The first problem, with file, line and key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error}") from error
    lines: _Lines = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = _mapping(root, (), str(path), lines) if root is not None else {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem or error.context}") from error
    for override in overrides:
        _override(values, override, lines)
    return _validate(values, lines, str(path))


def _mapping(node: yaml.Node, at: tuple[str, ...], path: str, lines: _Lines) -> Any:
    """A node as plain values; records the line of every key, refuses repeated ones."""
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            where = f"{path}:{key_node.start_mark.line + 1}"
            if key in values:
                raise ConfigError(f"{where}: {'.'.join((*at, key))} is repeated; keep one of the two")
            lines[(*at, key)] = where
            values[key] = _mapping(value_node, (*at, key), path, lines)
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_mapping(item, at, path, lines) for item in node.value]
    constructor = yaml.constructor.SafeConstructor()
    return constructor.construct_object(node, deep=True)


def _override(values: Any, override: str, lines: _Lines) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or "." in name:
        raise ConfigError(f"--set {override}: expected section.key=value, such as training.learning_rate=1e-4")
    where = f"--set {override}"
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: the value is not valid YAML") from error
    if not isinstance(values, dict):
        return
    if section not in _SECTIONS:
        raise ConfigError(f"{where}: unknown section {section!r}{_suggestion(section, _SECTIONS)}")
    target = values.get(section)
    values[section] = {**target, name: value} if isinstance(target, dict) else {name: value}
    lines[(section, name)] = where


def _suggestion(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _validate(values: Any, lines: _Lines, source: str) -> Config:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}:1: expected sections ({', '.join(_SECTIONS)}), got {type(values).__name__}")
    for section, content in values.items():
        where = lines.get((section,), source)
        if section not in _SECTIONS:
            homes = [name for name, model in _SECTIONS.items() if section in model.model_fields]
            hint = f"; it belongs into section {homes[0]}" if homes else _suggestion(section, _SECTIONS)
            raise ConfigError(f"{where}: unknown section {section!r}{hint}")
        if not isinstance(content, Mapping):
            raise ConfigError(f"{where}: section {section!r} must hold keys, got {content!r}")
        fields = _SECTIONS[section].model_fields
        for key in content:
            if key in fields:
                continue
            where = lines.get((section, key), source)
            homes = [name for name, model in _SECTIONS.items() if key in model.model_fields]
            hint = f"; it belongs into section {homes[0]}" if homes else _suggestion(key, fields)
            raise ConfigError(f"{where}: unknown key {section}.{key}{hint}")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, values, lines, source)) from None


def _explain(error: ValidationError, values: Mapping[str, Any], lines: _Lines, source: str) -> str:
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"] if isinstance(part, str)]
    key = tuple(place[:2])
    where = lines.get(key) or lines.get(key[:1]) or source
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{where}: {'.'.join(key)} is missing; add it"
    if not key:
        return f"{where}: {message}"
    got: Any = values
    for part in key:
        got = got.get(part) if isinstance(got, Mapping) else got
    if len(key) == 1:
        return f"{where}: {key[0]}: {message}"
    expected = sorted({problem["msg"].removeprefix("Value error, ") for problem in error.errors()
                       if tuple(problem["loc"][:2]) == key})  # fmt: skip
    return f"{where}: {'.'.join(key)}: {' or '.join(expected)}; got {got!r}"


_FREE: Mapping[str, Sequence[str]] = {
    "training": ("output_dir", "save_steps", "save_total_limit", "eval_steps", "logging_steps", "report_to"),
    "data": ("eval_path",),
    "tiers": tuple(TiersConfig.model_fields),
    "ray": tuple(RayConfig.model_fields),
}
"""Keys that do not change what is computed: a resumed run may change them."""


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Keys that change the course of a run, as (section.key, old value, new value)."""
    found = []
    for section in _SECTIONS:
        before, after = getattr(old, section).model_dump(), getattr(new, section).model_dump()
        for key in before:
            if key not in _FREE.get(section, ()) and before[key] != after[key]:
                found.append((f"{section}.{key}", before[key], after[key]))
    return found
