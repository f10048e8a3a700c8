"""The learning rate of each step, by transformers' own schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import get_scheduler

from megatrain_ray.config import TrainingConfig
from megatrain_ray.errors import ConfigError

__all__ = ["learning_rate_schedule"]


def learning_rate_schedule(training: TrainingConfig, total_steps: int) -> Callable[[int], float]:
    """The learning rate of a step (from 1): a function of the step alone, so that nothing has to be resumed.

    Args:
        training: Names the scheduler, as for ``transformers.get_scheduler``.
        total_steps: Of the run.

    Raises:
        ConfigError: The scheduler refuses its arguments.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    try:
        scheduler: Any = get_scheduler(
            training.lr_scheduler_type,
            optimizer,
            num_warmup_steps=training.warmup(total_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
        )
        scheduler.lr_lambdas[0](total_steps - 1)
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"training.lr_scheduler_type: {training.lr_scheduler_type} with learning_rate "
            f"{training.learning_rate:g}, lr_scheduler_kwargs {training.lr_scheduler_kwargs} and "
            f"{total_steps} steps: {error}"
        ) from error
    return lambda step: training.learning_rate * float(scheduler.lr_lambdas[0](step - 1))
