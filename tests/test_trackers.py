"""Records as tensorboard and wandb get them, across a resume; and what happens without the packages."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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


def test_every_logging_step_and_every_evaluation_is_sent(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(model_dir("llama"), training__report_to="tensorboard", training__logging_steps=3)
    trackers = Trackers(config, tmp_path, step=0)
    for step in range(1, 8):
        trackers.publish(record(step, 1.0, **({"eval_loss": 2.0} if step == 5 else {})))
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [3, 5, 6]


def test_an_evaluation_that_was_made_up_for_is_sent(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(model_dir("llama"), training__report_to="tensorboard", training__logging_steps=2)
    for step, later in ((1, False), (2, False), (2, True), (5, True)):
        trackers = Trackers(config, tmp_path, step=step)
        made_up = {"eval_loss": 2.0, "eval_perplexity": 7.4} if later else {}
        trackers.publish(record(step, 1.0, **made_up), evaluated_later=later)
        trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 5]
    assert [event.step for event in events.Scalars("train/loss")] == [2, 5], "one value a step"


class WandbStub(SimpleNamespace):
    """Records what is asked of wandb; refuses like wandb when there is no account."""

    def __init__(self, *, refuses: bool = False) -> None:
        error = type("UsageError", (Exception,), {})
        super().__init__(errors=SimpleNamespace(Error=error), refuses=refuses, finished=0)
        self.started, self.logged, self.axes = [], [], {}

    def init(self, **options: Any) -> WandbStub:
        if self.refuses:
            raise self.errors.Error("No API key configured.")
        self.started.append(options)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_goes_on_under_the_same_id_and_a_new_run_gets_another(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = WandbStub()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    config = make_config(model_dir("llama"), training__report_to=["wandb"])
    for step in (0, 2, 0):  # a run, resumed, and one that overwrites it
        trackers = Trackers(config, tmp_path, step=step)
        trackers.publish(record(step + 1, 1.5))
        trackers.close()
    first, resumed, other = (options["id"] for options in stub.started)
    assert first == resumed != other
    assert [values["train/global_step"] for values in stub.logged] == [1, 3, 1]
    assert stub.axes["*"] == "train/global_step"
    assert stub.logged[0]["train/loss"] == 1.5
    assert {options["resume"] for options in stub.started} == {"allow"}
    assert stub.finished == 3


def test_wandb_without_an_account_is_refused_before_the_actors(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", WandbStub(refuses=True))
    config = make_config(model_dir("llama"), training__report_to=["wandb"])
    with pytest.raises(ConfigError, match=r"wandb cannot start: No API key configured\.; run `wandb login`") as caught:
        Trackers(config, tmp_path, step=0)
    assert caught.value.exit_status == 2


def test_wandb_offline_writes_a_run_that_can_be_synchronized(
    model_dir: ModelDir, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install 'megatrain-ray[trackers]'")
    config = make_config(model_dir("llama"), training__report_to=["wandb"])
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = Trackers(config, tmp_path, step=0)
    trackers.publish(record(1, 1.5))
    trackers.close()
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert (tmp_path / "wandb" / "id").read_text() in written.name
    give_up_s = time.monotonic() + 60
    while b"train/loss" not in written.read_bytes():  # its own process writes, a little later
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
