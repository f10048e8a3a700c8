"""transformers' own initialization as the source of first weights, one layer at a time (``init: random``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from megatrain_ray.layout import LayerSpec
from megatrain_ray.model import StreamModel
from megatrain_ray.tensors import bind


class RandomSource:
    """Random weights; each layer depends on the seed and its index alone, so any layer can be made again.

    The model's constants count as loaded: they are what the library sets them to.

    Attributes:
        dtype: ``float32``.
        warnings: Empty.
    """

    dtype = "float32"

    def __init__(self, model: StreamModel, seed: int) -> None:
        self.warnings: list[str] = []
        self._model = model
        model.load_constants({name: value.clone() for name, value in model.constants.items()})
        self._seed = seed

    def read_layer(self, spec: LayerSpec) -> NDArray[np.float32]:
        """One layer as ``_init_weights`` of the model's classes draws it; see `LayerSource.read_layer`."""
        flat = np.zeros(spec.numel, np.float32)
        parameters = bind(spec, torch.from_numpy(flat))
        with torch.random.fork_rng(devices=[]), torch.no_grad(), guard_torch_init_functions():
            torch.manual_seed(int(np.random.SeedSequence([self._seed, spec.index]).generate_state(1, np.uint64)[0]))
            self._initialize(parameters)
        return flat

    def _initialize(self, parameters: dict[str, Tensor]) -> None:
        """Puts real tensors in place of a layer's meta parameters for as long as the library initializes them."""
        root = self._model.module
        swapped: list[tuple[nn.Module, str, Any]] = []
        try:
            for name, value in parameters.items():
                for each in (name, *self._model.aliases.get(name, ())):
                    owner, _, key = each.rpartition(".")
                    module = root.get_submodule(owner)
                    swapped.append((module, key, module._parameters[key]))
                    module._parameters[key] = nn.Parameter(value, requires_grad=False)
            for module, owner in _with_owner(root, {module for module, _, _ in swapped}):
                owner._init_weights(module)
        finally:
            for module, key, parameter in swapped:
                module._parameters[key] = parameter


def _with_owner(root: nn.Module, affected: set[nn.Module]) -> list[tuple[nn.Module, Any]]:
    """Affected modules and those that hold them, children first, each with the model that initializes it."""
    visited: list[tuple[nn.Module, Any]] = []

    def visit(module: nn.Module, owner: Any) -> bool:
        owner = module if isinstance(module, PreTrainedModel) else owner
        below = [visit(child, owner) for child in module.children()]
        if module in affected or any(below):
            visited.append((module, owner))
            return True
        return False

    visit(root, root)
    return visited
