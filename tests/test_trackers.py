"""Records as tensorboard shows them, across a resume; and what happens without the packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.errors import ConfigError
from megatrain_ray.observe.trackers import Trackers, check_trackers

ModelDir = Callable[[str], Path]
MakeConfig = Callable[..., Any]


def record(step: int, loss: float, **more: float) -> dict[str, Any]:
    names = ("grad_norm", "learning_rate", "epoch", "tokens_per_s", "step_time_s", "device_idle_fraction")
    return {"step": step, "loss": loss, **dict.fromkeys(names, 0.5), **more}


def test_tensorboard_shows_one_value_a_step_across_a_resume(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(model_dir("llama"), training__report_to="tensorboard")
    first = Trackers(config, tmp_path, step=0)
    for step in range(1, 6):
        first.publish(record(step, 5.0 - step))
    first.close()
    second = Trackers(config, tmp_path, step=3)  # the checkpoint was at 3: steps 4 and 5 are taken again
    second.publish(record(4, 0.25, eval_loss=2.0, eval_perplexity=7.4))
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == {1: 4.0, 2: 3.0, 3: 2.0, 4: 0.25}
    assert [(event.step, event.value) for event in events.Scalars("eval/loss")] == [(4, 2.0)]
    assert {"train/learning_rate", "train/grad_norm", "eval/perplexity"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_the_run(
    name: str, model_dir: ModelDir, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find_spec(wanted))
    check_trackers(make_config(model_dir("llama")))
    with pytest.raises(ConfigError, match=rf"training.report_to: {name} is not installed; .*megatrain-ray\[trackers\]"):
        check_trackers(make_config(model_dir("llama"), training__report_to=[name]))
