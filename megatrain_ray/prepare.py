"""Everything that is checked and decided before an actor starts: model, exactness, data, weights, plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain_ray.checkpoint.directory import list_checkpoints
from megatrain_ray.checkpoint.save_spec import SaveSpec
from megatrain_ray.config import Config
from megatrain_ray.data.chat import resolve_chat_template
from megatrain_ray.data.corpus import Corpus
from megatrain_ray.data.packing_gate import check_packing
from megatrain_ray.data.sampler import TrainingData, build_evaluation_corpus, build_training_data
from megatrain_ray.errors import ModelError, PlanError
from megatrain_ray.footprint import measure_cost
from megatrain_ray.gate import check_equality
from megatrain_ray.layout import LayerSpec
from megatrain_ray.machine import Machine, Speeds, probe
from megatrain_ray.model import StreamModel
from megatrain_ray.observe.memory import private_bytes
from megatrain_ray.observe.trackers import check_trackers
from megatrain_ray.planner import NEW_RUN, Plan, Progress, loss_chunk_tokens, make_plan
from megatrain_ray.run_directory import RunDirectory, output_path
from megatrain_ray.shrink import shrink_config
from megatrain_ray.skeleton import read_model_config
from megatrain_ray.speeds import known_speeds, measure_speeds
from megatrain_ray.start import ModelRecipe, StartPoint
from megatrain_ray.tier_memory import Workload
from megatrain_ray.timing import StepCost

__all__ = ["Prepared", "plan_elsewhere", "plan_here", "prepare", "prepare_data", "usable_device"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can start.

    Attributes:
        model: On meta, fp32: layouts, constants.
        compute_dtype: Of weights on the device.
        device: ``cpu`` or ``cuda:N``.
        data: In optimizer steps.
        evaluation: Held-out corpus.
        packed_masks: The model needs ready-made masks to tell packed samples apart.
        start: Where the layers come from.
        save_spec: What a checkpoint consists of.
        plan: Of the machine.
        notes: What the person should know, though it is no error.
    """

    model: StreamModel
    compute_dtype: str
    device: str
    data: TrainingData
    evaluation: Corpus | None
    packed_masks: bool
    start: StartPoint
    save_spec: SaveSpec
    plan: Plan
    notes: tuple[str, ...]

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The stream."""
        return self.model.layers


def prepare(
    config: Config, run: RunDirectory, checkpoint: Path | None = None, step: int = 0, *, speeds: Speeds | None = None
) -> Prepared:
    """Checks and decides.

    Args:
        config: Of the run.
        run: Its directory.
        checkpoint: To continue from.
        step: Of the checkpoint.
        speeds: Of this machine; None: what is known of it.

    Raises:
        InvalidInput: Whatever would fail later.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        prepared = _prepare(config, run, checkpoint, step, speeds)
    shown = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    return replace(prepared, notes=tuple(dict.fromkeys((*prepared.notes, *shown))))


def _prepare(config: Config, run: RunDirectory, checkpoint: Path | None, step: int, speeds: Speeds | None) -> Prepared:
    # Loads transformers' converters, and through them torch.distributed: seconds that `plan_elsewhere` does not need.
    from megatrain_ray.checkpoint.describe import describe_saving

    wanted = config.model
    device = usable_device(config.tiers.device)
    check_trackers(config)
    directory, model_config, recipe, model = _checked_model(config)
    tokenizer = _tokenizer(directory, config)
    random = wanted.init == "random" and checkpoint is None
    start = StartPoint(
        recipe=recipe,
        directory=None if random else str(checkpoint or directory),
        seed=config.training.seed,
        resumed=checkpoint is not None,
    )
    source = start.open(model)
    dtype = _compute_dtype(config, model_config, device)

    data = build_training_data(config, tokenizer=tokenizer, vocabulary_rows=model.vocab_size)
    evaluation = build_evaluation_corpus(config, tokenizer=tokenizer, vocabulary_rows=model.vocab_size)
    machine = probe(run.store, run.path, device, speeds or known_speeds(run.store, device))
    # A run that starts removes its old store first.
    machine = replace(machine, disk_free_bytes=machine.disk_free_bytes + run.stored_bytes())
    complete = [found for found in list_checkpoints(run.path) if found.problem is None]
    progress = Progress(step, data.total_steps, len(complete))
    evaluated = None if evaluation is None else (len(evaluation), int(evaluation.lengths().max()))
    plan = _plan(config, recipe, model, dtype, data.max_row_tokens, evaluated, machine, progress)
    save_spec = describe_saving(
        model,
        str(directory),
        model_dtype=_stored_dtype(model_config),
        # Rows of tokens need neither tokenizer nor template, and without the one the other has no place to be saved.
        chat_template=tokenizer.chat_template if tokenizer is not None and config.data.chat_template else None,
        trust_remote_code=wanted.trust_remote_code,
    )
    return Prepared(
        model=model,
        compute_dtype=dtype,
        device=device,
        data=data,
        evaluation=evaluation,
        packed_masks=config.data.packing and _needs_packed_masks(model, wanted.trust_remote_code),
        start=start,
        save_spec=save_spec,
        plan=plan,
        notes=(*model.warnings, *source.warnings, *save_spec.warnings),
    )


def plan_here(config: Config, *, measure: bool, tell: Callable[[str], None]) -> tuple[Plan, tuple[LayerSpec, ...]]:
    """The plan that a run would have here and now.

    Args:
        config: Of the run.
        measure: Measure the machine's speeds even if they are known.
        tell: Called before what takes seconds.

    Raises:
        InvalidInput: Whatever would fail later.
    """
    store = config.tiers.nvme_dir
    run = RunDirectory(output_path(config.training.output_dir), None if store is None else output_path(store))
    device = usable_device(config.tiers.device)
    speeds = None if measure else known_speeds(run.store, device)
    if speeds is None:
        tell("measuring this machine: disk, memory, arithmetic")
        speeds = measure_speeds(run.store, device)
    prepared = prepare(config, run, speeds=speeds)
    return prepared.plan, prepared.layers


def plan_elsewhere(config: Config, machine: Machine) -> tuple[Plan, tuple[LayerSpec, ...]]:
    """The plan on a machine that is described: no data and no weights are read; rows are ``data.max_length`` long.

    Returns:
        The plan, and the stream.

    Raises:
        InvalidInput: The model cannot be streamed exactly, or does not fit; a GPU is wanted and none is described.
    """
    wanted = config.tiers.device
    if wanted.startswith("cuda") and machine.device_memory_bytes is None:
        raise PlanError(
            f"tiers.device is {wanted}, and the machine file ({machine.host_memory_source}) describes no GPU; add "
            "device_memory and link to it, or set tiers.device: cpu"
        )
    _, model_config, recipe, model = _checked_model(config)
    if wanted == "cpu":
        machine = replace(machine, device_memory_bytes=None)
    device = "cpu" if machine.device_memory_bytes is None else "cuda:0"
    dtype = _compute_dtype(config, model_config, device)
    row_tokens = config.data.max_length
    evaluated = None if config.data.eval_path is None else (config.training.per_device_train_batch_size, row_tokens)
    return _plan(config, recipe, model, dtype, row_tokens, evaluated, machine, NEW_RUN), model.layers


def _checked_model(config: Config) -> tuple[Path, Any, ModelRecipe, StreamModel]:
    """Directory, configuration, recipe and fp32 model on meta, which the equality gate has let pass."""
    wanted = config.model
    directory = _local_directory(wanted.name_or_path)
    model_config = read_model_config(str(directory), trust_remote_code=wanted.trust_remote_code)
    recipe = ModelRecipe.of(
        model_config, attn_implementation=wanted.attn_implementation, trust_remote_code=wanted.trust_remote_code
    )
    model = recipe.build()
    check_equality(
        model_config,
        attn_implementation=model.config._attn_implementation,
        trust_remote_code=wanted.trust_remote_code,
    )
    model.check_length(config.data.max_length)
    return directory, model_config, recipe, model


def _plan(
    config: Config,
    recipe: ModelRecipe,
    model: StreamModel,
    dtype: str,
    row_tokens: int,
    evaluated: tuple[int, int] | None,
    machine: Machine,
    progress: Progress,
) -> Plan:
    """The plan for rows of so many tokens; ``evaluated``: held-out rows that there are, and tokens of the longest."""
    chunk_tokens = loss_chunk_tokens(config, model.vocab_size)

    @cache
    def cost(rows: int, row_tokens: int) -> StepCost:
        return measure_cost(
            model,
            recipe.build_first,
            dtype,
            rows=rows,
            row_tokens=row_tokens,
            chunk_tokens=chunk_tokens,
            on_cpu=machine.device_memory_bytes is None,
        )

    def workload(config: Config) -> Workload:
        training, most_tokens = config.training, config.data.max_length
        rows, tokens = training.per_device_train_batch_size, min(row_tokens, most_tokens)
        held_out = None
        if evaluated is not None:
            held_out = cost(min(rows, evaluated[0]), min(evaluated[1], most_tokens))
        return Workload(
            tokens=rows * tokens,
            micro_batches=training.gradient_accumulation_steps,
            cost=cost(rows, tokens),
            driver_bytes=driver_bytes,
            evaluation=held_out,
        )

    driver_bytes = private_bytes()
    return make_plan(
        config,
        model.layers,
        model.head_reads,
        compute_dtype=dtype,
        chunk_tokens=chunk_tokens,
        workload=workload,
        machine=machine,
        progress=progress,
    )


def prepare_data(config: Config, cache_dir: str | None = None) -> tuple[TrainingData, Corpus | None]:
    """The data part alone: what a run would train and evaluate on.

    Args:
        config: Of the run.
        cache_dir: Of tokens; default: in the cache directory of `datasets`.

    Raises:
        InvalidInput: A row or the tokenizer cannot be used.
    """
    directory = _local_directory(config.model.name_or_path)
    model_config: Any = read_model_config(str(directory), trust_remote_code=config.model.trust_remote_code)
    tokenizer = _tokenizer(directory, config)
    rows = model_config.get_text_config().vocab_size
    return (
        build_training_data(config, tokenizer=tokenizer, vocabulary_rows=rows, cache_dir=cache_dir),
        build_evaluation_corpus(config, tokenizer=tokenizer, vocabulary_rows=rows, cache_dir=cache_dir),
    )


def _needs_packed_masks(model: StreamModel, trust_remote_code: bool) -> bool:
    """Tries packing on a small model of the same architecture."""
    attention = model.config._attn_implementation
    if "flash" in attention:
        raise ModelError(
            f"data.packing with attn_implementation {attention}: transformers keeps packed samples apart in one row "
            "only; use sdpa"
        )
    options: dict[str, Any] = {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
    small = shrink_config(model.config, narrow=True, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(small, dtype=torch.float32, **options).eval()
        return check_packing(plain, name=type(model.module).__name__) == "masks"


def usable_device(wanted: str) -> str:
    """``tiers.device`` as ``cpu`` or ``cuda:N``.

    Raises:
        PlanError: There is no such GPU.
    """
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
    if config.data.chat_template is not None:
        tokenizer.chat_template = resolve_chat_template(config.data.chat_template)
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
