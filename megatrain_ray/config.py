"""The configuration: typed sections, and the only parser. Every problem is an error that names key and line.

YAML is composed into nodes first, so that each key knows its line; then pydantic checks types and limits. Overrides
(``--set training.learning_rate=1e-4``) go through the same checks.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

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
    "read_yaml",
]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def parse_bytes(value: Any) -> int:
    """``8GiB``, ``500 MB`` or a number of bytes, as bytes.

    Raises:
        ValueError: It is no size.
    """
    match = None if isinstance(value, bool) else re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if size == 0:
        raise ValueError("expected a size above 0, such as 8GiB")
    return size


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-5`` as text; people mean a number. Booleans are not numbers."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _whole(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("expected a whole number")
    return int(value)


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("expected auto, cpu, cuda or cuda:N")
    return value


def _warmup(value: float) -> float:
    if value >= 1 and not float(value).is_integer():
        raise ValueError("expected a whole number of steps, or a share of all steps below 1")
    return value


def _scheduler(value: str) -> str:
    if value not in SCHEDULERS:
        raise ValueError(f"expected one of {', '.join(SCHEDULERS)}{_suggestion(value, SCHEDULERS)}")
    return value


def _scheduler_kwargs(values: Any) -> Any:
    """Numbers, as everywhere; only ``warmup_type`` and ``decay_type`` are words."""
    if not isinstance(values, Mapping):
        return values
    return {key: value if str(key).endswith("_type") else _number(value) for key, value in values.items()}


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


SCHEDULERS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "inverse_sqrt": ("timescale",),
    "linear": (),
    "polynomial": ("lr_end", "power"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}
"""Names of `transformers.get_scheduler` that depend on the step alone, and what ``lr_scheduler_kwargs`` may hold.

Written out, because importing transformers takes seconds; a test compares them with the library's signatures.
"""
_NEEDED_KWARGS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Exactly one of these must be given."""

Text = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_whole)]
AutoBytes = Literal["auto"] | Annotated[int, BeforeValidator(parse_bytes)]
AutoWhole = Literal["auto"] | Annotated[Whole, Field(ge=0)]
Paths = Text | Annotated[tuple[Text, ...], Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(_Section):
    """What is trained."""

    name_or_path: Text
    """Directory with config.json, *.safetensors and tokenizer, or a hub id."""
    init: Literal["pretrained", "random"] = "pretrained"
    """``random`` needs config.json alone."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; ``auto``: the checkpoint's on a GPU, float32 on a CPU. Masters and moments are always float32."""
    attn_implementation: Text = "sdpa"
    """As in transformers; one that the model refuses becomes ``eager``, and that is said."""
    trust_remote_code: Flag = False
    """Run Python code that the model directory brings."""


class DataConfig(_Section):
    """What it is trained on."""

    path: Paths
    """File, list of files, or hub id; .json .jsonl .parquet .txt."""
    format: Literal["auto", "text", "alpaca", "sharegpt", "messages", "tokens"] = "auto"
    """What a row looks like."""
    eval_path: Paths | None = None
    """Held-out data, in the same format."""
    max_length: Annotated[Whole, Field(ge=2)] = 1024
    """Longest row, in tokens."""
    packing: Flag = False
    """Several samples a row, no attention across them."""
    assistant_only_loss: Flag = True
    """Chat formats: targets are every assistant turn with its end marker."""
    chat_template: Text | None = None
    """Jinja template, or a file that holds one; overrides the tokenizer's."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class TrainingConfig(_Section):
    """How it is trained; names and meanings of transformers.TrainingArguments."""

    output_dir: Text
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
    lr_scheduler_type: Annotated[str, AfterValidator(_scheduler)] = "cosine"
    """As `transformers.get_scheduler`."""
    lr_scheduler_kwargs: Annotated[dict[str, Any], BeforeValidator(_scheduler_kwargs)] = Field(default_factory=dict)
    """Further arguments of the scheduler."""
    warmup_steps: Annotated[Number, Field(ge=0), AfterValidator(_warmup)] = 10
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
    report_to: Annotated[tuple[Literal["tensorboard", "wandb"], ...], BeforeValidator(_one_or_more)] = ()
    """Trackers."""
    shuffle: Flag = True
    """Deterministic per epoch."""
    group_by_length: Flag = False
    """Rows of similar length together: less padding."""
    seed: Annotated[Whole, Field(ge=0, lt=2**32)] = 0
    """Of shuffling, random initialization and dropout."""

    def warmup(self, total_steps: int) -> int:
        """Warm-up in steps."""
        return math.ceil(self.warmup_steps * total_steps) if self.warmup_steps < 1 else int(self.warmup_steps)


class TiersConfig(_Section):
    """Where things live."""

    device: Annotated[str, AfterValidator(_device)] = "auto"
    """``cuda:0`` or ``cpu``; ``auto``: the GPU if there is one."""
    nvme_dir: Text | None = None
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
    direct_io: Flag = True
    """O_DIRECT where the file system takes it."""
    deadline_s: Annotated[Number, Field(gt=0)] = 600.0
    """Longest wait for one action of an actor."""


class RayConfig(_Section):
    """Which Ray."""

    address: Text | None = None
    """null: RAY_ADDRESS if set (as under `ray job submit`), else a local instance of its own."""
    dashboard: Flag = True
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
        """Keys that must agree. Each message starts with the key whose line it is shown with."""
        training = self.training
        if training.eval_steps is not None and self.data.eval_path is None:
            raise ValueError("training.eval_steps: needs data.eval_path; add it, or remove eval_steps")
        kind, given = training.lr_scheduler_type, training.lr_scheduler_kwargs
        for name in given:
            if name not in SCHEDULERS[kind]:
                known = ", ".join(SCHEDULERS[kind]) or "nothing"
                raise ValueError(f"training.lr_scheduler_kwargs: {kind} takes {known}; got {name!r}")
        needed = _NEEDED_KWARGS.get(kind, ())
        if needed and sum(name in given for name in needed) != 1:
            raise ValueError(
                f"training.lr_scheduler_type: {kind} needs {' or '.join(needed)}, and one only, in "
                f"lr_scheduler_kwargs; got {given}"
            )
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

_ELSEWHERE = {
    "bf16": "model.dtype: bfloat16",
    "fp16": "model.dtype: bfloat16 (float16 is not offered: its range needs loss scaling)",
    "cutoff_len": "data.max_length",
    "epochs": "training.num_train_epochs",
    "gradient_checkpointing": "tiers.recompute",
    "lr": "training.learning_rate",
    "batch_size": "training.per_device_train_batch_size",
    "warmup_ratio": "training.warmup_steps, as a fraction below 1",
}
"""What people bring from other tools, and what it is called here."""

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
    values, lines = read_yaml(path)
    values = {} if values is None else values
    for override in overrides:
        _override(values, override, lines)
    return _validate(values, lines, str(path))


def read_yaml(path: str | Path) -> tuple[Any, _Lines]:
    """A YAML file as plain values, and where each key stands.

    Raises:
        ConfigError: It cannot be read, is not valid YAML, or repeats a key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#x} at {error.start}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror or error}") from None
    lines: _Lines = {}
    return _read(text, lambda line: f"{path}:{line}", (), lines), lines


def with_override(config: Config, override: str) -> Config:
    """The same configuration with ``section.key=value``.

    Raises:
        ConfigError: The key or the value is none.
    """
    values: dict[str, Any] = config.model_dump(mode="json")
    lines: _Lines = {}
    _override(values, override, lines)
    return _validate(values, lines, "configuration")


def _read(text: str, where: Callable[[int], str], at: tuple[str, ...], lines: _Lines) -> Any:
    """YAML text as plain values.

    Args:
        text: One document.
        where: Shows a line number, from 1.
        at: Key that the document is the value of.
        lines: Gets the place of every key.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if root is None else _plain(root, where, at, lines)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{where(line)}: not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{where(line)}: not valid YAML: character {error.character:#x} is not text") from None
    except RecursionError:
        raise ConfigError(f"{where(1)}: nested too deeply, or an alias (*name) that contains itself") from None


def _plain(node: yaml.Node, where: Callable[[int], str], at: tuple[str, ...], lines: _Lines) -> Any:
    """A node as plain values; records the line of every key, refuses repeated ones."""
    here = where(node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            here = where(key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{here}: expected a name as key, got a list or a mapping")
            key = (*at, str(key_node.value))
            if key[-1] in values:
                raise ConfigError(f"{here}: {'.'.join(key)} is repeated (first: {lines[key]}); keep one of the two")
            lines[key] = here
            values[key[-1]] = _plain(value_node, where, key, lines)
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, where, at, lines) for item in node.value]
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except ValueError as error:  # text that looks like a date or a number, and is none
        raise ConfigError(
            f"{here}: {'.'.join(at)}: {error}; got {node.value!r}: put it in quotes if it is text"
        ) from None


def _override(values: Any, override: str, lines: _Lines) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    where = f"--set {override}"
    if not equals or not dot or "." in name:
        raise ConfigError(f"{where}: expected section.key=value, such as training.learning_rate=1e-4")
    if section not in _SECTIONS:
        raise ConfigError(f"{where}: unknown section {section!r}{_hint(section, _SECTIONS)}")
    value = _read(text, lambda _: where, (section, name), lines)
    target = values.get(section) if isinstance(values, dict) else values
    if target is None:
        target = values[section] = {}
    if isinstance(target, dict):  # anything else is an error of the file, found next
        target[name] = value
        lines[(section, name)] = where


def _suggestion(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _hint(key: str, known: Iterable[str]) -> str:
    """What an unknown key may have been meant to be."""
    if key in _ELSEWHERE:
        return f"; here it is {_ELSEWHERE[key]}"
    homes = [name for name, model in _SECTIONS.items() if key in model.model_fields]
    return f"; it belongs into section {homes[0]}" if homes else _suggestion(key, known) or "; remove it"


def _validate(values: Any, lines: _Lines, source: str) -> Config:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}:1: expected sections ({', '.join(_SECTIONS)}), got {values!r}")
    for section, content in values.items():
        where = lines.get((section,), source)
        if section not in _SECTIONS:
            raise ConfigError(f"{where}: unknown section {section!r}{_hint(section, _SECTIONS)}")
        if content is not None and not isinstance(content, Mapping):
            raise ConfigError(f"{where}: section {section}: expected keys, got {content!r}")
        fields = _SECTIONS[section].model_fields
        for key in content or ():
            if key not in fields:
                where = lines.get((section, key), source)
                raise ConfigError(f"{where}: unknown key {section}.{key}{_hint(key, fields)}")
    filled = {section: {} if content is None else content for section, content in values.items()}
    filled = {name: {} for name in ("model", "data", "training")} | filled
    try:
        return Config.model_validate(filled)
    except ValidationError as error:
        raise ConfigError(_explain(error, filled, lines, source)) from None


_WORDS = {
    "Value error, ": "",
    "Input should be ": "expected ",
    "a valid boolean": "true or false",
    "a valid dictionary": "a mapping",
    "a valid tuple": "a list",
    "a valid string": "text",
    "a valid number": "a number",
    "String should have at least 1 character": "expected text that is not empty",
    "Tuple should have at least 1 item after validation, not 0": "expected a list that is not empty",
}
"""Pydantic's words, and ours."""


def _explain(error: ValidationError, values: Mapping[str, Any], lines: _Lines, source: str) -> str:
    """The first problem: place, key, expected, got."""
    problems = error.errors(include_url=False)
    section, key = ([*(str(part) for part in problems[0]["loc"][:2]), "", ""])[:2]
    messages = []
    for problem in problems:
        message = problem["msg"]
        for theirs, ours in _WORDS.items():
            message = message.replace(theirs, ours)
        if problem["loc"][:2] == problems[0]["loc"][:2] and message not in messages:
            messages.append(message)
    if not section:  # keys that do not agree
        section, _, key = messages[0].partition(":")[0].partition(".")
        return f"{lines.get((section, key)) or lines.get((section,), source)}: {messages[0]}"
    where = lines.get((section, key)) or lines.get((section,), source)
    if problems[0]["type"] == "missing":
        return f"{where}: {section}.{key} is missing; add it"
    expected = " or ".join([messages[0], *(message.removeprefix("expected ") for message in messages[1:])])
    return f"{where}: {section}.{key}: {expected}; got {values[section][key]!r}"


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
