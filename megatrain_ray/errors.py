"""The exceptions of megatrain_ray.

    MegatrainError                 anything this package raises on purpose
    +-- InvalidInput               found before any actor starts: exit status 2
    |   +-- ConfigError            a key, a type or a value of the configuration
    |   +-- ModelError             config.json, weights, an architecture that cannot be streamed exactly
    |   +-- DataError              a data file, a row, a token id, a template
    |   +-- PlanError              the machine cannot hold the run
    |   `-- RunDirectoryError      output_dir holds another run, is locked or read-only
    `-- TrainingError              while running: exit status 1
        +-- StoreError             bytes on disk: short, corrupt, no space
        +-- NonFiniteError         a loss or norm that is not finite; the step was not taken
        +-- StalledError           a wait that outlived its deadline
        `-- ActorLostError         an actor that died again and again at the same place

Every message says what, where, expected and got, and what to change. Exceptions cross process boundaries by pickling,
which calls ``type(error)(*error.args)`` and then restores ``__dict__``: one positional argument, the rest by keyword.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ActorLostError",
    "ConfigError",
    "DataError",
    "InvalidInput",
    "MegatrainError",
    "ModelError",
    "NonFiniteError",
    "PlanError",
    "RunDirectoryError",
    "StalledError",
    "StoreError",
    "TrainingError",
]


class MegatrainError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: One sentence or more for the person who started the run.
        context: Machine-readable facts (layer, path, expected, got); never needed to understand the message.
    """

    exit_status = 1

    def __init__(self, message: str, *, context: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.context: dict[str, Any] = dict(context or {})


class InvalidInput(MegatrainError):
    """The run was refused before any actor started."""

    exit_status = 2


class ConfigError(InvalidInput):
    """A configuration key or value; the message starts with ``file:line``."""


class ModelError(InvalidInput):
    """A model directory that cannot be read, or an architecture that cannot be trained exactly."""


class DataError(InvalidInput):
    """A data file or row; the message names file, line or row, and field."""


class PlanError(InvalidInput):
    """The plan does not fit the machine; the message holds needed and available bytes."""


class RunDirectoryError(InvalidInput):
    """``output_dir`` or the store directory cannot be used."""


class TrainingError(MegatrainError):
    """The run failed after it had started."""


class StoreError(TrainingError):
    """A read or write of the NVMe tier failed or returned wrong bytes."""


class NonFiniteError(TrainingError):
    """A loss or gradient norm is NaN or infinite. Scenario: a learning rate too high for bf16; lower it and resume."""


class StalledError(TrainingError):
    """A remote call did not finish before its deadline. Scenario: a drive that hangs, a stopped process."""


class ActorLostError(TrainingError):
    """An actor died repeatedly in one action. Scenario: the kernel kills the optimizer for memory at each retry."""
