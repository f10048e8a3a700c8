"""A model directory as the source of first weights, one layer at a time."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain_ray.checkpoint.conversion import Recipe, plan_reading
from megatrain_ray.checkpoint.safetensors_file import BLOCK_BYTES
from megatrain_ray.checkpoint.weights import TORCH_DTYPES, WeightFiles, open_weight_files
from megatrain_ray.errors import ModelError
from megatrain_ray.layout import LayerSpec
from megatrain_ray.model import StreamModel
from megatrain_ray.tensors import bind

LEFTOVERS = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$")
"""Tensors of old checkpoints that transformers has long computed instead of loading: no warning for them."""


class LayerSource(Protocol):
    """Where the first weights of a run come from.

    Attributes:
        warnings: What the user should know, one sentence each; may grow while layers are read.
    """

    warnings: list[str]

    def read_layer(self, spec: LayerSpec) -> NDArray[np.float32]:
        """One layer's weights, fp32, ``spec.numel`` elements, padding zero; nothing else stays in memory."""


def open_source(model_dir: str, model: StreamModel) -> CheckpointSource:
    """Opens a model directory for reading layer by layer; checks it from file headers alone.

    Args:
        model_dir: Holds ``model.safetensors`` or shards with an index (or the same as ``.bin``).
        model: Built from the configuration that the weights must fit; its constants are loaded.

    Raises:
        ModelError: Missing or broken files, an index that lies, missing tensors, shapes or dtypes that do not fit.
    """
    directory = Path(model_dir)
    return CheckpointSource(directory, model, open_weight_files(directory))


class CheckpointSource:
    """The weights of a model directory; see `open_source`.

    Attributes:
        dtype: Of most of the weights: ``float32``, ``bfloat16`` or ``float16``.
        warnings: See `LayerSource`; grows by a sentence for each parameter with values that are not finite.
    """

    def __init__(self, directory: Path, model: StreamModel, files: WeightFiles) -> None:
        self.warnings: list[str] = list(files.warnings)
        self._model = model
        self._files = files
        recipes, unexpected = plan_reading(model, files.tensors)
        self._by_target = {name: recipe for recipe in recipes for name in recipe.targets}
        self._by_layer = [self._recipes_of(directory, spec) for spec in model.layers]
        self.dtype = _most_common_dtype(recipes)
        self._load_constants(directory)
        ignored = [name for name in unexpected if not _is_leftover(model, name)]
        if ignored:
            self.warnings.append(f"{directory}: {len(ignored)} tensors have no place in the model: {_some(ignored)}")

    def read_layer(self, spec: LayerSpec, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """See `LayerSource.read_layer`.

        Args:
            spec: The layer.
            out: Zeros to read into; None: a new array.

        Raises:
            ModelError: A file changed or ends early.
        """
        flat = np.zeros(spec.numel, np.float32) if out is None else out
        bound = bind(spec, torch.from_numpy(flat))
        for recipe, parameters in self._by_layer[spec.index]:
            if recipe.converter is None:
                (name,) = parameters.values()
                self._files.read(recipe.sources[0], bound[name].reshape(-1).numpy())
                continue
            values = recipe.convert(self._model, [self._files.load(source) for source in recipe.sources])
            for target, value in values.items():
                bound[parameters[target]].copy_(value)
        self._warn_of_not_finite(spec, flat)
        return flat

    def _recipes_of(self, directory: Path, spec: LayerSpec) -> list[tuple[Recipe, dict[str, str]]]:
        """The recipes that make one layer, each with the parameter that each of its targets is.

        Raises:
            ModelError: A parameter is missing, or does not fit.
        """
        recipes: dict[int, tuple[Recipe, dict[str, str]]] = {}
        missing = []
        for tensor in spec.tensors:
            names = [
                name for name in (tensor.name, *self._model.aliases.get(tensor.name, ())) if name in self._by_target
            ]
            if not names:
                missing.append(tensor.name)
                continue
            for name in names:
                self._check_fit(self._by_target[name], name, tensor.shape)
            self._check_tie(names)
            recipe = self._by_target[names[0]]
            recipes.setdefault(id(recipe), (recipe, {}))[1][names[0]] = tensor.name
        if missing:
            raise ModelError(f"{directory}: the weights of {len(missing)} parameters are missing: {_some(missing)}")
        for recipe, parameters in recipes.values():
            if parameters.keys() != recipe.targets.keys():
                raise ModelError(
                    f"{directory}: transformers makes {_some(list(recipe.targets))} together, which belong to "
                    "different layers; that cannot be read layer by layer"
                )
        return list(recipes.values())

    def _load_constants(self, directory: Path) -> None:
        missing = [name for name in self._model.constants if name not in self._by_target]
        if missing:
            raise ModelError(f"{directory}: the values of {len(missing)} buffers are missing: {_some(missing)}")
        values = {}
        for name, constant in self._model.constants.items():
            recipe = self._by_target[name]
            if recipe.converter is not None or recipe.targets[name] != tuple(constant.shape):
                raise ModelError(
                    f"{recipe.sources[0].path}: {recipe.sources[0].name} does not fit {name} of shape "
                    f"{list(constant.shape)}"
                )
            values[name] = self._files.load(recipe.sources[0])
        self._model.load_constants(values)

    def _check_fit(self, recipe: Recipe, name: str, shape: tuple[int, ...]) -> None:
        first = recipe.sources[0]
        if recipe.targets[name] != shape:
            raise ModelError(
                f"{first.path}: {first.name} gives {name} the shape {list(recipe.targets[name])}, but by config.json "
                f"it is {list(shape)}"
            )
        for source in recipe.sources:
            if source.dtype not in TORCH_DTYPES:
                raise ModelError(
                    f"{source.path}: {source.name} has dtype {source.dtype}; expected F32, BF16 or F16: quantized "
                    "weights cannot be trained"
                )

    def _check_tie(self, names: list[str]) -> None:
        first, *others = (self._by_target[name] for name in names)
        for other in others:
            if first.converter or other.converter or not self._files.equal(first.sources[0], other.sources[0]):
                raise ModelError(
                    f"{other.sources[0].path}: {' and '.join(names)} differ, but config.json ties them; set "
                    "tie_word_embeddings to false in config.json to train them apart"
                )

    def _warn_of_not_finite(self, spec: LayerSpec, flat: NDArray[np.float32]) -> None:
        for tensor in spec.tensors:
            bad = 0
            for start in range(tensor.offset, tensor.end, BLOCK_BYTES // 4):
                block = flat[start : min(start + BLOCK_BYTES // 4, tensor.end)]
                bad += block.size - int(np.count_nonzero(np.isfinite(block)))
            if bad:
                self.warnings.append(f"{tensor.name}: {bad} of its {tensor.numel} values are NaN or infinite")


def _most_common_dtype(recipes: list[Recipe]) -> str:
    counts = Counter[str]()
    for recipe in recipes:
        for source in recipe.sources:
            counts[source.dtype] += source.numel
    return str(TORCH_DTYPES[counts.most_common(1)[0][0]]).removeprefix("torch.")


def _is_leftover(model: StreamModel, name: str) -> bool:
    module: Any = model.module
    patterns = (*LEFTOVERS, *(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()))
    return any(re.search(pattern, name) for pattern in patterns)


def _some(names: list[str]) -> str:
    """The first few names of a list."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
