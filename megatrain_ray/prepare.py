"""Everything that is checked and decided before an actor starts: model, exactness, data, weights, plan."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from megatrain_ray.checkpoint import CheckpointWriter, saved_names
from megatrain_ray.config import Config
from megatrain_ray.data.corpus import Corpus, read_corpus
from megatrain_ray.data.sampler import TrainingData
from megatrain_ray.errors import ModelError, PlanError
from megatrain_ray.gate import check_equality
from megatrain_ray.layout import LayerSpec
from megatrain_ray.machine import probe
from megatrain_ray.model import StreamModel, load_model_config
from megatrain_ray.planner import Plan, Workload, make_plan
from megatrain_ray.recipe import ModelRecipe
from megatrain_ray.run_directory import RunDirectory
from megatrain_ray.sources import CheckpointSource, LayerSource, RandomSource, open_pretrained

__all__ = ["Prepared", "prepare"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can start.

    Attributes:
        recipe: Of the model, in the compute dtype.
        layers: The stream.
        device: ``cpu`` or ``cuda:N``.
        data: In optimizer steps.
        evaluation: Held-out corpus.
        source: Where the layers come from.
        writer: Of checkpoints.
        plan: Of the machine.
        notes: What the person should know, though it is no error.
    """

    recipe: ModelRecipe
    layers: tuple[LayerSpec, ...]
    device: str
    data: TrainingData
    evaluation: Corpus | None
    source: LayerSource
    writer: CheckpointWriter
    plan: Plan
    notes: tuple[str, ...]


def prepare(config: Config, run: RunDirectory, checkpoint: tuple[Path, int] | None = None) -> Prepared:
    """Checks and decides.

    Args:
        config: Of the run.
        run: Its directory.
        checkpoint: To continue from, and its step.

    Raises:
        InvalidInput: Whatever would fail later.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        prepared = _prepare(config, run, checkpoint)
    notes = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    return Prepared(**{**{f: getattr(prepared, f) for f in Prepared.__slots__}, "notes": tuple(dict.fromkeys(notes))})


def _prepare(config: Config, run: RunDirectory, checkpoint: tuple[Path, int] | None) -> Prepared:
    device = _device(config.tiers.device)
    directory = _local_directory(config.model.name_or_path)
    model_config = load_model_config(str(directory), trust_remote_code=config.model.trust_remote_code)
    tokenizer = _tokenizer(directory, config)
    roles = check_equality(
        model_config,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
    )
    dtype = _compute_dtype(config, model_config, device)
    recipe = ModelRecipe(model_config, dtype, config.model.attn_implementation, config.model.trust_remote_code, roles)
    model = recipe.stream()
    vocabulary_rows = int(model.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    def corpus(path: str | tuple[str, ...]) -> Corpus:
        paths = (path,) if isinstance(path, str) else path
        return read_corpus(
            paths,
            config.data.format,
            tokenizer=tokenizer,
            max_length=config.data.max_length,
            vocabulary_rows=vocabulary_rows,
        )

    pad = getattr(tokenizer, "pad_token_id", None)
    data = TrainingData(corpus(config.data.path), config, pad if pad is not None else 0)
    evaluation = corpus(config.data.eval_path) if config.data.eval_path is not None else None
    text = model_config.get_text_config()
    workload = Workload(
        row_tokens=int(data.corpus.lengths().max()),
        rows=config.training.per_device_train_batch_size,
        micro_batches=config.training.gradient_accumulation_steps,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary_rows=vocabulary_rows,
    )
    build = recipe.build_masters
    plan = make_plan(
        config,
        model.layers,
        model.head_reads,
        compute_dtype=dtype,
        workload=workload,
        machine=probe(run.store, device),
    )
    return Prepared(
        recipe=recipe,
        layers=model.layers,
        device=device,
        data=data,
        evaluation=evaluation,
        source=_source(config, directory, model, build, checkpoint),
        writer=_writer(config, run, directory, model, build, tokenizer),
        plan=plan,
        notes=(),
    )


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return wanted
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(wanted.partition(":")[2] or 0)
    if index >= count:
        raise PlanError(
            f"tiers.device is {wanted}, and this machine has {count} usable GPUs; set tiers.device: cpu, or look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return f"cuda:{index}"


def _local_directory(name_or_path: str) -> Path:
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") != 1:
        raise ModelError(f"model.name_or_path {name_or_path}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name_or_path, ignore_patterns=["*.gguf", "*.onnx", "*.msgpack", "*.h5"]))
    except Exception as error:  # the hub client raises many kinds, from many libraries
        raise ModelError(
            f"model.name_or_path {name_or_path}: no such directory, and the hub gives no such model: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        ) from error


def _tokenizer(directory: Path, config: Config) -> Any:
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory}: the tokenizer cannot be loaded: {str(error).splitlines()[0]}") from error
    template = config.data.chat_template
    if template is not None:
        is_file = len(template) < 4096 and Path(template).is_file()
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8-sig") if is_file else template
    return tokenizer


def _compute_dtype(config: Config, model_config: Any, device: str) -> str:
    if config.model.dtype != "auto":
        return config.model.dtype
    if device == "cpu":
        return "float32"
    stored = _stored_dtype(model_config)
    if stored == "float16":
        warnings.warn("the checkpoint is float16; computing in bfloat16, which does not overflow", stacklevel=2)
        return "bfloat16"
    return stored


def _stored_dtype(model_config: Any) -> str:
    """The configuration's dtype, by name."""
    dtype = getattr(model_config, "dtype", None) or torch.float32
    return str(dtype).removeprefix("torch.")


def _source(
    config: Config,
    directory: Path,
    model: StreamModel,
    build: Callable[[], Any],
    checkpoint: tuple[Path, int] | None,
) -> LayerSource:
    if checkpoint is not None:
        path, step = checkpoint
        return CheckpointSource(open_pretrained(path, model.layers, model.model, build), path, step, len(model.layers))
    if config.model.init == "random":
        return RandomSource(build, config.training.seed)
    return open_pretrained(directory, model.layers, model.model, build)


def _writer(
    config: Config, run: RunDirectory, directory: Path, model: StreamModel, build: Callable[[], Any], tokenizer: Any
) -> CheckpointWriter:
    saved = model.config.to_dict()
    saved["dtype"] = "float32"
    saved.setdefault("architectures", None)
    saved["architectures"] = saved["architectures"] or [type(model.model).__name__]
    side_files = {"config.json": json.dumps(saved, indent=2, default=str)}
    generation = directory / "generation_config.json"
    if generation.exists():
        side_files[generation.name] = generation.read_text(encoding="utf-8-sig")
        problem = _generation_problem(directory)
        if problem:
            warnings.warn(
                f"{generation}: transformers would refuse to save it ({problem}); it is copied as it is", stacklevel=2
            )
    if config.data.chat_template is not None and tokenizer is not None:
        side_files["chat_template.jinja"] = tokenizer.chat_template
    copied = [directory / name for name in _TOKENIZER_FILES if (directory / name).exists() and name not in side_files]
    return CheckpointWriter(
        output_dir=run.path,
        num_layers=len(model.layers),
        names=saved_names(model.model, model.layers),
        build=build,
        side_files=side_files,
        copied_files=tuple(copied),
        keep=config.training.save_total_limit,
        model_dtype=_stored_dtype(model.config),
    )


def _generation_problem(directory: Path) -> str | None:
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_pretrained(str(directory)).validate(strict=True)
    except (ValueError, OSError) as error:
        return str(error).strip().splitlines()[0]
    return None
