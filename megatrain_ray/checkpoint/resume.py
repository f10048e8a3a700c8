"""A checkpoint of a run as the source of a resumed run, and as the source of an export."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_ray.checkpoint.describe import describe_saving
from megatrain_ray.checkpoint.directory import MANIFEST, TRAINER_STATE, find_problem
from megatrain_ray.checkpoint.safetensors_file import read_as_float32, read_header
from megatrain_ray.checkpoint.save_spec import SaveSpec
from megatrain_ray.checkpoint.source import open_source
from megatrain_ray.checkpoint.writer import ExportWriter
from megatrain_ray.errors import ModelError
from megatrain_ray.layout import LayerSpec
from megatrain_ray.model import StreamModel
from megatrain_ray.packed import STATE, PackedLayer

_WITHOUT_EFFECT = frozenset(
    (
        "architectures",
        "auto_map",
        "transformers_version",
        "dtype",  # a checkpoint's masters are fp32, whatever the model's weights were
        "torch_dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    )
)
"""Keys of a model configuration that say how it is stored, or how it generates."""


class ResumeSource:
    """Masters and moments of a complete checkpoint, one layer at a time.

    Args:
        checkpoint: Its directory.
        model: Built from the same configuration.

    Attributes:
        trainer_state: What `CheckpointWriter.finish` was given.
        step: Optimizer steps that the checkpoint has seen.
        warnings: As `LayerSource.warnings`.

    Raises:
        ModelError: The checkpoint is not complete, or is of another model.
    """

    def __init__(self, checkpoint: str, model: StreamModel) -> None:
        directory = Path(checkpoint)
        problem = find_problem(directory)
        if problem:
            raise ModelError(problem)
        self.trainer_state = read_trainer_state(directory)
        self.step = int(self.trainer_state["step"])
        self._masters = open_source(checkpoint, model)
        self.warnings = self._masters.warnings
        headers = [read_header(path) for path in sorted(directory.glob("optimizer-*.safetensors"))]
        self._moments = {name: tensor for header in headers for name, tensor in header.items()}
        for spec in model.layers:
            for tensor in spec.tensors:
                for section in STATE[1:]:
                    stored = self._moments.get(f"{section}.{tensor.name}")
                    if stored and (stored.shape != tensor.shape or stored.dtype != "F32"):
                        raise ModelError(
                            f"{stored.path}: {stored.name} is {stored.dtype} {list(stored.shape)}, expected F32 "
                            f"{list(tensor.shape)}"
                        )

    def read_layer(self, spec: LayerSpec) -> PackedLayer:
        """One layer's state, fp32; moments that were never written are zero."""
        data = np.zeros(len(STATE) * spec.numel, np.float32)
        self._masters.read_layer(spec, data[: spec.numel])
        for position, section in enumerate(STATE[1:], 1):
            for tensor in spec.tensors:
                stored = self._moments.get(f"{section}.{tensor.name}")
                if stored is None:
                    continue
                start = position * spec.numel + tensor.offset
                file_descriptor = os.open(stored.path, os.O_RDONLY)
                try:
                    read_as_float32(file_descriptor, stored, data[start : start + tensor.numel])
                finally:
                    os.close(file_descriptor)
        return PackedLayer(spec.index, self.step, "float32", STATE, data.view(np.uint8))


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """Reads ``trainer_state.json``.

    Raises:
        ModelError: It is missing or no JSON object with a step.
    """
    path = checkpoint / TRAINER_STATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("step"), int):
        raise ModelError(f"{path}: expected a JSON object with a step")
    return content


def model_differences(checkpoint: Path, model: StreamModel, spec: SaveSpec) -> list[tuple[str, Any, Any]]:
    """Keys of the model configuration that make it another model than the checkpoint's.

    Both are read by the same class, so that a default is the same whether it is written out or not.

    Args:
        checkpoint: Complete.
        model: As it would be trained now.
        spec: Of it.

    Returns:
        Key, old value and new value of each.
    """
    trained = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    old, new = (_flat(type(model.config).from_dict(copy.deepcopy(each)).to_dict()) for each in (trained, spec.config))
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [(key, old.get(key), new.get(key)) for key in changed]


def _flat(values: Mapping[Any, Any], at: str = "") -> dict[str, Any]:
    """Nested values by dotted key, without those that change no result."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{at}{name}"
        if name in _WITHOUT_EFFECT or str(name).startswith("_"):
            continue
        found |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return found


def export(checkpoint: str, out: str, dtype: str | None = None, *, trust_remote_code: bool = False) -> Path:
    """Writes a checkpoint as a Hugging Face model directory, one layer at a time.

    Args:
        checkpoint: ``checkpoint-N`` of a run, or any model directory.
        out: New, empty, or an older export, whose weights are replaced.
        dtype: ``float32``, ``bfloat16`` or ``float16``; None: what the model's configuration had before training.
        trust_remote_code: Whether code in the checkpoint may run.

    Returns:
        The absolute path of ``out``.

    Raises:
        ModelError: The checkpoint is not complete.
        RunDirectoryError: ``out`` holds something else.
    """
    directory = Path(checkpoint)
    model_dtype = None
    if (directory / MANIFEST).exists():
        problem = find_problem(directory)
        if problem:
            raise ModelError(problem)
        model_dtype = read_trainer_state(directory).get("model_dtype")
    model = StreamModel.from_config_dir(checkpoint, trust_remote_code=trust_remote_code)
    source = open_source(checkpoint, model)
    spec = describe_saving(model, checkpoint, trust_remote_code=trust_remote_code)
    writer = ExportWriter(out, spec, dtype=dtype or model_dtype, model=model)
    try:
        for layer in model.layers:
            writer.write_layer(layer.index, source.read_layer(layer))
        return writer.finish()
    except BaseException:
        writer.abort()
        raise
