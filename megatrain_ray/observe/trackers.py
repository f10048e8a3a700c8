"""Metrics records sent to tensorboard and wandb, under the names that transformers' Trainer uses."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain_ray.config import Config
from megatrain_ray.errors import ConfigError

__all__ = ["Trackers", "check_trackers"]

_TRAIN = ("loss", "grad_norm", "learning_rate", "epoch", "tokens_per_s", "step_time_s", "device_idle_fraction")

_WANDB_STEP = "train/global_step"
"""The axis of every chart. wandb's own step only grows: it would refuse what a resumed run repeats or makes up for."""


def check_trackers(config: Config) -> None:
    """Looks for what ``training.report_to`` needs.

    Raises:
        ConfigError: A package is missing.
    """
    for name in config.training.report_to:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"training.report_to: {name} is not installed; pip install 'megatrain-ray[trackers]', or take it out"
            )


class Trackers:
    """Sends records to whatever ``training.report_to`` names.

    Args:
        config: Of the run.
        directory: Of the run; tensorboard's files go to its ``tensorboard`` folder, wandb's to ``wandb``.
        step: Steps done: what an interrupted run has reported beyond them no longer counts; 0: a new run.

    Raises:
        ConfigError: wandb cannot start, as without an account or a network.
    """

    def __init__(self, config: Config, directory: Path, *, step: int) -> None:
        self._writer: Any = None
        self._wandb: Any = None
        self._every = config.training.logging_steps
        names = config.training.report_to
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)
        if "wandb" in names:
            self._wandb = _start_wandb(config, directory, fresh=step == 0)

    def publish(self, record: Mapping[str, Any], *, evaluated_later: bool = False) -> None:
        """Sends one record, if its step is one of every ``logging_steps`` or evaluated.

        ``evaluated_later``: it was sent without its evaluation, which had been left out when the run was stopped.
        """
        logged = record["step"] % self._every == 0
        if not logged and "eval_loss" not in record:
            return
        values = {} if logged and evaluated_later else {f"train/{key}": record[key] for key in _TRAIN}
        values |= {
            key.replace("eval_", "eval/"): record[key] for key in ("eval_loss", "eval_perplexity") if key in record
        }
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, record["step"])
            self._writer.flush()
        if self._wandb is not None:
            self._wandb.log(values | {_WANDB_STEP: record["step"]})

    def close(self) -> None:
        """Completes what was sent."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(config: Config, directory: Path, *, fresh: bool) -> Any:
    """A wandb run; a resumed run goes on under the id that it had, a new one in the same directory never does."""
    import wandb

    id_file = directory / "wandb" / "id"
    if fresh or not id_file.exists():
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(secrets.token_hex(4), encoding="ascii")
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megatrain_ray"),
            name=directory.name,
            id=id_file.read_text(encoding="ascii"),
            resume="allow",
            dir=str(directory),
            config=config.model_dump(mode="json"),
        )
    except wandb.errors.Error as error:
        raise ConfigError(
            f"training.report_to: wandb cannot start: {error}; run `wandb login`, or set WANDB_MODE=offline"
        ) from error
    run.define_metric(_WANDB_STEP)
    run.define_metric("*", step_metric=_WANDB_STEP)
    return run
