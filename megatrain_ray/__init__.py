"""Train 100B-class language models at full precision on one GPU, layer by layer, through Ray actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain_ray.config import Config, load_config
    from megatrain_ray.trainer import Trainer

__all__ = ["Config", "Trainer", "load_config"]
__version__ = "0.1.0"

_HOME = {"Config": "config", "load_config": "config", "Trainer": "trainer"}


def __getattr__(name: str) -> Any:
    """Imports on first use: actor processes and the command line start without what they do not need."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
