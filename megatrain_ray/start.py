"""What a run starts from, opened in the process that imports it. This module loads neither torch nor transformers."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatrain_ray.layout import LayerSpec
from megatrain_ray.packed import MASTER, PackedLayer

if TYPE_CHECKING:
    from megatrain_ray.checkpoint.source import LayerSource
    from megatrain_ray.model import StreamModel

__all__ = ["ModelRecipe", "RunSource", "StartPoint"]


class RunSource(Protocol):
    """Gives layers, one at a time."""

    warnings: list[str]

    def read_layer(self, spec: LayerSpec) -> PackedLayer:
        """Masters in fp32, with moments if the source has them; padding is zero."""


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """How to make the model on meta in any process.

    Attributes:
        pickled_config: The transformers configuration; between processes of one run only, never on disk.
        attn_implementation, trust_remote_code: As configured.
    """

    pickled_config: bytes
    attn_implementation: str
    trust_remote_code: bool

    @classmethod
    def of(cls, model_config: Any, *, attn_implementation: str, trust_remote_code: bool) -> ModelRecipe:
        """A recipe for a transformers configuration."""
        return cls(pickle.dumps(model_config), attn_implementation, trust_remote_code)

    def build(self, dtype: str = "float32", device: str = "cpu") -> StreamModel:
        """The model, with parameters of ``dtype`` and buffers on ``device``."""
        from megatrain_ray.model import StreamModel

        return StreamModel.from_config(
            pickle.loads(self.pickled_config),
            dtype=dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
            device=device,
        )

    def build_first(self, dtype: str, num_layers: int) -> StreamModel:
        """The model's first decoder layers alone, between the same embedding and head."""
        from megatrain_ray.shrink import shorten
        from megatrain_ray.skeleton import text_config

        config = pickle.loads(self.pickled_config)
        shorten(text_config(config), num_layers)
        return ModelRecipe(pickle.dumps(config), self.attn_implementation, self.trust_remote_code).build(dtype)


class _Masters:
    """A source of weights alone."""

    def __init__(self, source: LayerSource) -> None:
        self._source = source
        self.warnings = source.warnings

    def read_layer(self, spec: LayerSpec) -> PackedLayer:
        return PackedLayer(spec.index, 0, "float32", MASTER, self._source.read_layer(spec).view(np.uint8))


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where layers come from.

    Attributes:
        recipe: Of the model.
        directory: Model directory or checkpoint; None: random initialization.
        seed: Of the random initialization.
        resumed: The directory is a checkpoint of this package, with moments.
    """

    recipe: ModelRecipe
    directory: str | None
    seed: int
    resumed: bool

    def open(self, model: StreamModel | None = None) -> RunSource:
        """Opens it; also loads the constants of ``model``, an fp32 model of the recipe.

        Raises:
            ModelError: It does not hold the model, from the files' headers alone.
        """
        from megatrain_ray.checkpoint.random_init import RandomSource
        from megatrain_ray.checkpoint.resume import ResumeSource
        from megatrain_ray.checkpoint.source import open_source

        model = model or self.recipe.build()
        if self.directory is None:
            return _Masters(RandomSource(model, self.seed))
        if self.resumed:
            return ResumeSource(self.directory, model)
        return _Masters(open_source(self.directory, model))
