"""What a writer of checkpoints needs to know, made once in the driver; pickles, and needs neither torch nor ray."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatrain_ray.layout import LayerSpec


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """What one layer of the stream looks like in a checkpoint.

    Attributes:
        tensors: Names and shapes there, in writing order.
        parameters: The parameter that each of them is; None when transformers must convert values.
    """

    tensors: dict[str, tuple[int, ...]]
    parameters: dict[str, str] | None

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Constant:
    """A small tensor that training does not change but a checkpoint carries.

    Attributes:
        dtype: In safetensors' spelling.
        shape: Its shape.
        data: Its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """Everything of a model directory but the values of its weights.

    Attributes:
        layers: The stream.
        saved: For each layer, its names and shapes in the checkpoint.
        constants: By name in the checkpoint; usually none.
        config: ``config.json`` without a dtype.
        model_dtype: What the model's configuration asks for: the default of an export.
        files: Other files by name, such as the tokenizer's: small ones, carried unchanged.
        trust_remote_code: Whether code among those files may run, where values must be converted.
        warnings: What the user should know, one sentence each.
    """

    layers: tuple[LayerSpec, ...]
    saved: tuple[SavedLayer, ...]
    constants: dict[str, Constant]
    config: dict[str, Any]
    model_dtype: str
    files: dict[str, bytes]
    trust_remote_code: bool
    warnings: tuple[str, ...]

    def plan_shards(self, stem: str, *, max_numel: int = 0, constants: bool = False) -> dict[str, list[int]]:
        """File names and the layers in each, in stream order; layers without tensors are nowhere.

        Args:
            stem: ``model`` or ``optimizer``.
            max_numel: Layers share a file up to this many elements; 0: one layer a file.
            constants: Whether a last file without layers holds the constants, if there are any.
        """
        groups: list[list[int]] = []
        filled = 0
        for spec, saved in zip(self.layers, self.saved, strict=True):
            if not saved.tensors:
                continue
            if groups and filled + saved.numel <= max_numel:
                groups[-1].append(spec.index)
                filled += saved.numel
            else:
                groups.append([spec.index])
                filled = saved.numel
        if constants and self.constants:
            groups.append([])
        if len(groups) == 1 and max_numel:
            return {f"{stem}.safetensors": groups[0]}
        return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
