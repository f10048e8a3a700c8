"""Between the names in a checkpoint and the parameters of the model, with transformers' own converters, layer by layer.

transformers 5 renames and fuses weights while loading (Mixtral's experts become one tensor) and reverts that while
saving; see ``core_model_loading.py`` and ``conversion_mapping.py``. Which tensors take part is found here by running
the converters on the meta device, so that shapes are checked before any value is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping

from megatrain_ray.checkpoint.safetensors_file import StoredTensor
from megatrain_ray.checkpoint.save_spec import SavedLayer
from megatrain_ray.errors import ModelError
from megatrain_ray.model import StreamModel
from megatrain_ray.tensors import bind


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one or more parameters come out of stored tensors.

    Attributes:
        targets: Names and shapes of the parameters, as in the model's ``state_dict``.
        sources: The stored tensors, in the converter's order.
        converter: A transformers ``WeightConverter`` that takes them; None: the only source is the only target.
        patterns: The converter's source pattern of each source.
        first_target: The name by which the converter knows its result.
    """

    targets: dict[str, tuple[int, ...]]
    sources: tuple[StoredTensor, ...]
    converter: Any = None
    patterns: tuple[str, ...] = ()
    first_target: str = ""

    def convert(self, model: StreamModel, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Applies the converter to the sources' values; returns the targets."""
        converter = copy.deepcopy(self.converter)
        for source, pattern, tensor in zip(self.sources, self.patterns, tensors, strict=True):
            converter.add_tensor(self.first_target, source.name, pattern, tensor)
        result = converter.convert(self.first_target, model=model.module, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in result.items()}


def plan_reading(model: StreamModel, tensors: Mapping[str, StoredTensor]) -> tuple[list[Recipe], list[str]]:
    """Assigns stored tensors to parameters, as ``convert_and_load_state_dict_in_model`` of transformers does.

    Returns:
        The recipes, and the names of stored tensors that no parameter wants.

    Raises:
        ModelError: A converter cannot work on these tensors.
    """
    module: Any = model.module
    expected = {name: None for name in module.state_dict()}
    transforms = get_model_conversion_mapping(module)
    renamings = [entry for entry in transforms if isinstance(entry, core_model_loading.WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, core_model_loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    present = dict.fromkeys(expected, True)
    prefix = module.base_model_prefix
    direct: list[Recipe] = []
    gathered: dict[str, list[tuple[StoredTensor, str]]] = {}
    unexpected: list[str] = []
    for name in sorted(tensors, key=core_model_loading.dot_natural_key):
        renamed, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, present)
        if renamed not in present and name in present:
            renamed, pattern = core_model_loading.rename_source_key(name, [], [], prefix, present)
        if renamed not in present:
            unexpected.append(name)
        elif pattern is None:
            direct.append(Recipe({renamed: tensors[name].shape}, (tensors[name],)))
        else:
            gathered.setdefault(renamed, []).append((tensors[name], pattern))
    converted = [_converting(model, target, parts, by_pattern[parts[0][1]]) for target, parts in gathered.items()]
    return direct + converted, unexpected


def _converting(model: StreamModel, target: str, parts: list[tuple[StoredTensor, str]], converter: Any) -> Recipe:
    sources = tuple(tensor for tensor, _ in parts)
    recipe = Recipe({}, sources, converter, tuple(pattern for _, pattern in parts), target)
    try:
        result = recipe.convert(model, [torch.empty(tensor.shape, device="meta") for tensor in sources])
    except Exception as error:  # a converter on tensors that do not fit together raises anything
        raise ModelError(
            f"{sources[0].path}: {sources[0].name} and {len(sources) - 1} more tensors cannot be converted to "
            f"{target}: {error}"
        ) from error
    return Recipe(
        {name: tuple(tensor.shape) for name, tensor in result.items()}, sources, converter, recipe.patterns, target
    )


def plan_saving(model: StreamModel) -> tuple[tuple[SavedLayer, ...], dict[str, str]]:
    """The names that ``save_pretrained`` would write, layer by layer.

    Returns:
        The layers, and the constants: names in the checkpoint to names in the model.

    Raises:
        ModelError: transformers would combine weights of several layers.
    """
    meta = [
        {saved_name(model, tensor.name): torch.empty(tensor.shape, device="meta") for tensor in spec.tensors}
        for spec in model.layers
    ]
    constants = {name: torch.empty(value.shape, device="meta") for name, value in model.constants.items()}
    layers = []
    for spec, parameters in zip(model.layers, meta, strict=True):
        names = {saved_name(model, tensor.name): tensor.name for tensor in spec.tensors}
        shapes, kept = _reverted_names(model, parameters)
        same = len(kept) == len(shapes)
        layers.append(SavedLayer(shapes, {name: names[source] for name, source in kept.items()} if same else None))
    constant_shapes, saved_constants = _reverted_names(model, constants)
    everything = {name: shape for layer in layers for name, shape in layer.tensors.items()} | constant_shapes
    whole = _revert(model, {name: value for part in (*meta, constants) for name, value in part.items()})
    if len(saved_constants) != len(constant_shapes) or everything != {
        name: tuple(value.shape) for name, value in whole.items()
    }:
        raise ModelError(
            f"{model.config.model_type}: transformers saves this architecture by combining weights of several layers; "
            "that is not supported"
        )
    return tuple(layers), saved_constants


def convert_for_saving(model: StreamModel, index: int, flat: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """One layer's weights as ``save_pretrained`` would write them.

    Args:
        model: Any instance of the same configuration.
        index: Of the layer in the stream.
        flat: Its fp32 weights, not changed.

    Returns:
        Contiguous fp32 arrays by name, in the order of `plan_saving`.
    """
    tensors = bind(model.layers[index], from_dlpack(flat))  # unlike from_numpy, takes read-only arrays quietly
    parameters = {saved_name(model, name): value for name, value in tensors.items()}
    return {name: value.contiguous().numpy() for name, value in _revert(model, parameters).items()}


def saved_name(model: StreamModel, name: str) -> str:
    """The one of a tied parameter's names under which it is saved."""
    tied: Any = getattr(model.module, "all_tied_weights_keys", {})
    names = (name, *model.aliases.get(name, ()))
    return next((each for each in names if each not in tied), name)


def _reverted_names(
    model: StreamModel, parameters: dict[str, Tensor]
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes of meta tensors after reverting, and the old name of each one that is only renamed."""
    reverted = _revert(model, dict(parameters))
    old_names = {id(value): name for name, value in parameters.items()}
    kept = {name: old_names[id(value)] for name, value in reverted.items() if id(value) in old_names}
    return {name: tuple(value.shape) for name, value in reverted.items()}, kept


def _revert(model: StreamModel, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    module: Any = model.module
    return dict(core_model_loading.revert_weight_conversion(module, parameters))
