"""How to make a run's model in any process. Importing this loads neither torch nor transformers."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatrain_ray.model import StreamModel

__all__ = ["ModelRecipe", "Roles"]


@dataclass(frozen=True, slots=True)
class Roles:
    """Where an architecture uses its parameters outside the decoder layers; found by trying (see `gate`).

    Attributes:
        prologue: Names of those that the hidden state entering the first layer depends on.
        epilogue: Names of those that the logits depend on, given the last hidden state.
        layer_outputs: Length of the tuple that a decoder layer returns; 0 when it returns the tensor itself.
    """

    prologue: frozenset[str]
    epilogue: frozenset[str]
    layer_outputs: int


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """Everything that the model on meta depends on.

    Attributes:
        pickled_config: The transformers configuration; between processes of one run only, never on disk.
        dtype: Of the parameters.
        attn_implementation, trust_remote_code: As configured.
        roles: Of the architecture.
    """

    pickled_config: bytes
    dtype: str
    attn_implementation: str
    trust_remote_code: bool
    roles: Roles

    @classmethod
    def of(
        cls, model_config: Any, *, dtype: str, attn_implementation: str, trust_remote_code: bool, roles: Roles
    ) -> ModelRecipe:
        """A recipe for a transformers configuration."""
        return cls(pickle.dumps(model_config), dtype, attn_implementation, trust_remote_code, roles)

    def build(self) -> torch.nn.Module:
        """The bare model."""
        from megatrain_ray.model import meta_model

        return meta_model(
            pickle.loads(self.pickled_config),
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
        )

    def build_masters(self) -> torch.nn.Module:
        """The bare model with parameters of the masters' dtype, float32."""
        return replace(self, dtype="float32").build()

    def stream(self, device: torch.device | str = "cpu") -> StreamModel:
        """The model as a stream of layers."""
        from megatrain_ray.model import StreamModel

        return StreamModel(self.build(), self.roles, device)
