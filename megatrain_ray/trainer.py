"""The training loop: one schedule a step, a record of each, checkpoints on the way."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from megatrain_ray.actors.cpu_optimizer import Hyper, arena_bytes
from megatrain_ray.actors.gpu_worker import GradInfo
from megatrain_ray.checkpoint.directory import newest_complete
from megatrain_ray.checkpoint.resume import export, model_differences, read_trainer_state
from megatrain_ray.cluster import MAX_ATTEMPTS, Cluster, TierSpec
from megatrain_ray.config import Config, differences, with_override
from megatrain_ray.control import ControlServer
from megatrain_ray.data.batches import StepBatch
from megatrain_ray.data.corpus import left_out
from megatrain_ray.data.sampler import evaluation_batches
from megatrain_ray.errors import ConfigError, NonFiniteError, RunDirectoryError, StalledError, StoreError, TrainingError
from megatrain_ray.layout import LayerSpec
from megatrain_ray.learning_rate import learning_rate_schedule
from megatrain_ray.observe.about import minimum_bytes, write_about
from megatrain_ray.observe.inspection import find_layer
from megatrain_ray.observe.logs import LOGS, DriverLog, Place
from megatrain_ray.observe.metrics import RunMetrics
from megatrain_ray.observe.status import live_status
from megatrain_ray.observe.step_record import StepRecords
from megatrain_ray.observe.trace import write_trace
from megatrain_ray.observe.trackers import Trackers
from megatrain_ray.pipeline import Pipeline, Record
from megatrain_ray.prepare import Prepared, prepare
from megatrain_ray.run_directory import RunDirectory, output_path, replace_text
from megatrain_ray.schedule import UPDATES, Action, Op, Schedule, Tier, build_flush, build_import, build_step
from megatrain_ray.speeds import remember_call
from megatrain_ray.tier_memory import value_bytes
from megatrain_ray.tiers import tier_builders

__all__ = ["Trainer"]


class Trainer:
    """Trains one model as its configuration says.

    Building it checks everything and starts nothing; the first step starts the actors. A context manager.

    Args:
        config: Of the run.
        resume: Continue from the newest complete checkpoint in ``output_dir``; start fresh when there is none.
        overwrite: Replace a run that ``output_dir`` holds.
        changed: ``section.key`` names that a resumed run may change on purpose.
        tell: Called with what a person should know.

    Raises:
        InvalidInput: Whatever would fail later.

    Attributes:
        step: Optimizer steps done.
        total_steps: Of the run.
        waiting_for: The action that the driver waits for, for people.
        state: starting, running, pausing, paused, finished, stopped or failed.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: bool = False,
        overwrite: bool = False,
        changed: Iterable[str] = (),
        tell: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.config = config
        self._show = tell
        self._log = DriverLog()
        self.step = 0
        self.waiting_for = "Ray and the actors"
        self.state = "starting"
        store = config.tiers.nvme_dir
        self.run = RunDirectory(output_path(config.training.output_dir), None if store is None else output_path(store))
        self._pending: Hyper | None = None
        self._saving: int | None = None
        self._saved = -1
        self._store_death: tuple[str, bool] | None = None  # in what, since the save began; whether it stalled there
        self._interrupted = 0  # saves in a row, by deaths of the store
        self._save_next = False
        self._go = threading.Event()
        self._go.set()
        self._recent: deque[dict[str, Any]] = deque(maxlen=20)
        self._control: ControlServer | None = None
        self._cluster: Cluster | None = None
        self._pipeline: Pipeline
        self._trackers: Trackers
        self._records: StepRecords
        self._arena: int | None = None
        self._training = self._stop = False
        self._metrics: RunMetrics | None = None
        debris = self.run.claim(resume=resume, overwrite=overwrite)
        try:
            for path in debris if resume else ():
                if path.suffix == ".partial":
                    self.tell(f"{path.stem[1:]} was not complete when the run ended: ignored and removed")
            checkpoint = self._find_checkpoint(set(changed)) if resume else None
            self._prepared: Prepared = prepare(config, self.run, checkpoint, self.step)
            self._data = self._prepared.data
            self.total_steps = self._data.total_steps
            self._learning_rate = learning_rate_schedule(self.config.training, self.total_steps)
            if checkpoint is not None and "data.path" not in changed:
                self._check_data(checkpoint)
            if checkpoint is not None and "model.name_or_path" not in changed:
                self._check_model(checkpoint)
            if resume:
                self.run.cut_after(self.step)
            self._begun = self.step
        except BaseException:
            self.run.release()
            raise
        for note in self._prepared.notes:
            self.tell(note, level=logging.WARNING)
        for line in left_out(self._data.corpus, self._prepared.evaluation):
            self.tell(line)

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``."""
        return self._prepared.device

    @property
    def prepared(self) -> Prepared:
        """What was checked and decided before the start."""
        return self._prepared

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The stream, as planned."""
        return self._prepared.layers

    def tell(self, message: str, *, layer: str | None = None, level: int = logging.INFO) -> None:
        """Says something to the person and to the driver's log. From any thread."""
        self._log.write(message, Place(self.step, layer), level=level)
        self._show(message)

    @property
    def minimum_bytes(self) -> dict[str, int]:
        """Least bytes that a step must move; see `observe.about.MINIMUM_FORMULA`."""
        prepared = self._prepared
        return minimum_bytes(prepared.layers, self._shape.paged, prepared.compute_dtype, self._shape.keep_graph)

    def step_batch(self, step: int) -> StepBatch:
        """What a step trains on, from 1."""
        return self._data.step_batch(step)

    # --- what people call -----------------------------------------------------------------------------------------

    def steps(self) -> Iterator[dict[str, Any]]:
        """Trains; yields the metrics record of each optimizer step, and saves a checkpoint after the last.

        Raises:
            TrainingError: The run cannot go on; the newest checkpoint is whole.
        """
        unevaluated = self._lacks_evaluation()
        if self.step >= self.total_steps and unevaluated is None:
            self.tell(f"already complete: {self.step} of {self.total_steps} steps")
            return
        try:
            self._start()
            self._training = True
            if unevaluated is not None:
                unevaluated |= self._evaluate(stoppable=True)
                self.run.cut_after(self.step - 1)
                self.run.append(unevaluated)
                self._trackers.publish(unevaluated, evaluated_later=True)
            while self.step < self.total_steps and not self._stop:
                if not self._go.is_set():
                    self._wait_for_resume()
                    continue
                record = self._take_step(self._data.step_batch(self.step + 1))
                if self._evaluation_is_due():
                    record.update(self._evaluate(stoppable=True))
                self.run.append(record)
                self._recent.append(record)
                self._trackers.publish(record)
                if self._metrics is not None:
                    self._metrics.publish(record)
                every = self.config.training.save_steps
                due = self._save_next or bool(every and self.step % every == 0)
                if due and self.step < self.total_steps:
                    self._save_next = False
                    self._begin_save()
                yield record
            if self.step > self._begun or not self._stop:  # stopped before its first step: there is nothing to save
                self.save_checkpoint()
            if self._records.call_s is not None:
                remember_call(self.run.store, self.device, self._records.call_s)
        except Exception as error:
            if isinstance(error, OSError):
                error = self._unwritable(error)
            with contextlib.suppress(OSError):  # the disk may be what has failed
                self._log.write("failed", Place(self.step), level=logging.ERROR, error=error)
                self._enter("failed", cause=str(error) or type(error).__name__)
            raise error
        finally:
            self._training = False
        self._enter("finished" if self.step >= self.total_steps else "stopped")

    def request_stop(self) -> bool:
        """Ends `steps` after the present step and its checkpoint, without an evaluation. From any thread.

        Returns:
            False when `steps` is not under way: there is nothing to complete.
        """
        self._stop = True
        self._go.set()
        return self._training

    def pause(self) -> None:
        """Holds `steps` after the present step, until `resume` or `request_stop`. From any thread."""
        self._go.clear()

    def resume(self) -> None:
        """Goes on after `pause`. From any thread."""
        self._go.set()

    def restart(self, actor: str) -> int:
        """Ends an actor's process; returns the pid of the one that takes its place. From any thread.

        A step in progress is repeated; state in RAM survives.

        Args:
            actor: ``nvme_store``, ``cpu_optimizer`` or ``gpu_worker``.

        Raises:
            TrainingError: There is no such actor, or it has not been started.
        """
        if self._cluster is None or actor not in self._cluster.pids:
            raise TrainingError(f"no actor {actor} is running; there are {', '.join(Tier)}, once the run has started")
        self.tell(f"{actor} is ended on request")
        return self._cluster.restart(Tier(actor))

    def change(self, key: str, value: Any) -> None:
        """Changes ``learning_rate``, which the scheduler scales, from the next step on. From any thread.

        Checkpoints carry the new value: a resumed run must be given it, as any other change.

        Raises:
            ConfigError: Another key, or no learning rate.
        """
        if key.removeprefix("training.") != "learning_rate":
            raise ConfigError(f"{key} cannot change while a run trains; learning_rate can")
        self.config = with_override(self.config, f"training.learning_rate={value}")
        self._learning_rate = learning_rate_schedule(self.config.training, self.total_steps)
        replace_text(self.run.path / "config.yaml", self.config.to_yaml())
        self.tell(f"learning_rate {self.config.training.learning_rate:g} from the next step on")

    def status(self) -> dict[str, Any]:
        """What the run is doing now; see INTERFACE. From any thread."""
        started = self._cluster is not None
        pausing = self.state in ("starting", "running") and not self._go.is_set()
        return live_status(
            run=str(self.run.path),
            state="pausing" if pausing else self.state,
            step=self.step,
            max_steps=self.total_steps,
            pids=dict(self._cluster.pids) if self._cluster is not None else {},
            restarts=dict(self._cluster.restarts) if self._cluster is not None else {},
            in_flight=self._pipeline.in_flight() if started and hasattr(self, "_pipeline") else [],
            layer_names=[spec.name for spec in self.layers],
            records=self._recent,
            planned_bytes=self._prepared.plan.peak_bytes,
            stored_bytes=self.run.stored_bytes(),
        )

    def inspect(self, layer: str, tensor: str | None = None) -> dict[str, Any]:
        """Statistics of a layer's masters and moments as they are now. From any thread.

        Args:
            layer: Name, or position in the stream.
            tensor: Only this one.

        Raises:
            InvalidInput: There is no such layer or tensor.
            TrainingError: The actors have not been started.
        """
        spec = find_layer(self.layers, layer)
        if self._cluster is None or self.state == "starting":
            raise TrainingError("the run is starting: its layers are not there yet")
        tier = Tier.STORE if spec.index in self._shape.paged else Tier.OPTIMIZER
        facts: dict[str, Any] = self._cluster.ask(tier, "inspect", spec.index, tensor)
        return facts

    def save_checkpoint(self) -> Path:
        """Completes the present step and saves it, unless that is done already; returns the checkpoint's directory.

        Raises:
            TrainingError: The run has failed: what it holds may be half of a step.
        """
        if self.state == "failed":
            raise TrainingError(f"{self.run.path}: the run has failed; resume it from its newest checkpoint")
        self._start()
        if self._saved != self.step:
            self._begin_save()
            self._flush_save()
        return self.run.path / f"checkpoint-{self.step}"

    def save_pretrained(self, out: str | Path, dtype: str | None = None) -> Path:
        """The model as it is now, as a Hugging Face directory; ``dtype`` None: the model configuration's."""
        return export(str(self.save_checkpoint()), str(out), dtype)

    def evaluate(self) -> dict[str, float]:
        """Loss and perplexity of ``data.eval_path`` with the weights as they are now.

        Raises:
            ConfigError: There is no ``data.eval_path``.
        """
        return self._evaluate(stoppable=False)

    def _evaluate(self, *, stoppable: bool) -> dict[str, float]:
        """`evaluate`; nothing when ``stoppable`` and the run is to stop: `--resume` makes up for it."""
        corpus = self._prepared.evaluation
        if corpus is None:
            raise ConfigError("data.eval_path is not set: there is nothing to evaluate on")
        self._start()
        if self._pending is not None:
            self._run(build_flush(self._shape, pending=True), None)
        total, count = 0.0, 0
        schedule = build_step(self._shape, pending=False, train=False)
        for batch in evaluation_batches(
            corpus, self.config.training.per_device_train_batch_size, self._data.pad_token_id
        ):
            if stoppable and self._stop:
                self.tell(f"evaluation of step {self.step} left out: the run stops; it comes first when resumed")
                return {}
            records = self._run(schedule, batch, train=False)
            total += next(record.receipt.info for record in records if record.action.op is Op.EVALUATE)
            count += batch.target_tokens
        loss = total / count
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}

    def shutdown(self) -> None:
        """Ends the actors, gives back memory and directory. Harmless when repeated."""
        if self._control is not None:
            self._control.close()
            self._control = None
            self._trackers.close()
            if self.state in ("starting", "running", "paused"):
                with contextlib.suppress(OSError):
                    self._enter("stopped")
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None
        if self._arena is not None:
            os.close(self._arena)
            self._arena = None
        self._log.close()
        self.run.release()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # --- starting ---------------------------------------------------------------------------------------------------

    def _find_checkpoint(self, allowed: set[str]) -> Path | None:
        warn = partial(self.tell, level=logging.WARNING)
        found = newest_complete(self.run.path, deep=True, on_problem=warn)
        if found is None:
            self.tell(f"no complete checkpoint in {self.run.path}: starting from the beginning")
            return None
        path, state = found.path, read_trainer_state(found.path)
        self.step = self._saved = int(state["step"])
        limit = self.config.training.max_steps
        trained = Config.from_mapping(state["config"], source=str(path))
        changed = [change for change in differences(trained, self.config) if change[0] not in allowed]
        if changed and not (limit and limit <= self.step):
            listed = "; ".join(f"{key} was {old!r} and is {new!r}" for key, old, new in changed)
            raise RunDirectoryError(
                f"{path} was trained with another configuration: {listed}. Give the old values, or name each change "
                f"that is meant, as in --set {changed[0][0]}={changed[0][2]}"
            )
        self.tell(f"resuming from {path} (step {self.step})")
        return path

    def _check_data(self, checkpoint: Path) -> None:
        """The same path may hold other data by now, and so other samples in the steps to come."""
        trained, found = read_trainer_state(checkpoint).get("data_xxh3_64"), self._prepared.data.corpus.table.checksum
        if trained is not None and trained != found:
            path = self.config.data.path
            raise RunDirectoryError(
                f"{checkpoint} was trained on other data: the tokens of data.path {path} have checksum {found}, "
                f"expected {trained}. Restore the file, or say that the change is meant with --set data.path={path}"
            )

    def _check_model(self, checkpoint: Path) -> None:
        """The same path may hold another model by now, of the same shapes."""
        changed = model_differences(checkpoint, self._prepared.model, self._prepared.save_spec)
        if changed:
            path = self.config.model.name_or_path
            listed = "; ".join(f"{key} was {old!r} and is {new!r}" for key, old, new in changed)
            raise RunDirectoryError(
                f"{checkpoint} was trained with another configuration of model.name_or_path {path}: {listed}. Restore "
                f"its config.json, or say that the change is meant with --set model.name_or_path={path}"
            )

    def _start(self) -> None:
        """Starts the actors and brings every layer to its tier."""
        if self._cluster is not None:
            return
        prepared, plan = self._prepared, self._prepared.plan
        self._trackers = Trackers(self.config, self.run.path, step=self.step)
        replace_text(self.run.path / "config.yaml", self.config.to_yaml())
        replace_text(self.run.path / "plan.json", json.dumps(plan.to_json(), indent=2))
        write_about(self.run.path, prepared, step=self.step, total_steps=self.total_steps)
        self._log.open(self.run.path / LOGS)
        self._enter("starting")
        self._control = ControlServer(self.run.path, self._commands())
        # Anonymous memory that the optimizer maps through this process: it outlives the optimizer and leaves no trace.
        self._arena = os.memfd_create("masters-and-moments")
        os.ftruncate(self._arena, arena_bytes(prepared.layers, plan.shape.resident))
        builders = tier_builders(
            self.config,
            prepared,
            output_dir=self.run.path,
            store_dir=self.run.store,
            arena_path=f"/proc/{os.getpid()}/fd/{self._arena}",
        )
        threads = {Tier.STORE: 1, Tier.OPTIMIZER: plan.optimizer_threads, Tier.WORKER: plan.worker_threads}
        gpus = {Tier.WORKER: 0.0 if prepared.device == "cpu" else 1.0}
        self._cluster = Cluster(
            address=self.config.ray.address,
            object_store_bytes=plan.object_store_bytes,
            dashboard=self.config.ray.dashboard,
            on_note=lambda source, note: self.tell(f"{source}: {note}", level=logging.WARNING),
        )
        deadline_s = self.config.tiers.deadline_s
        specs = {tier: TierSpec(builders[tier], threads[tier], gpus.get(tier, 0.0)) for tier in Tier}
        self._cluster.start(self.run.path, specs, self.run.path / LOGS)
        self._metrics = RunMetrics(self.run.name, plan.to_json(), total_steps=self.total_steps)
        self._pipeline = Pipeline(
            self._cluster,
            tuple(spec.name for spec in prepared.layers),
            value_bytes(prepared.layers, prepared.compute_dtype, self._shape.part_numel),
            deadline_s=deadline_s,
            on_wait=self._note_wait,
            on_death=self._note_death,
        )
        self._records = StepRecords(
            self._pipeline,
            self._cluster.memory(),
            arena_bytes=arena_bytes(prepared.layers, plan.shape.resident),
            on_cpu=prepared.device == "cpu",
        )
        self._run(build_import(self._shape), None)
        for note in self._cluster.ask(Tier.WORKER, "finish_import"):
            self.tell(note)
        self._enter("running")

    def _unwritable(self, error: OSError) -> StoreError:
        """A failure of the driver's own files: records, state, trace."""
        free = shutil.disk_usage(self.run.path).free
        return StoreError(
            f"{error.filename or self.run.path}: {error.strerror or error} (step {self.step}, {free} bytes free); "
            "make room or look at the drive, then resume from the newest checkpoint"
        )

    def _enter(self, state: str, **facts: Any) -> None:
        self.state = state
        self._log.write(f"{state}, process {os.getpid()}" if state == "starting" else state, Place(self.step))
        restarts = {} if self._cluster is None else {str(tier): count for tier, count in self._cluster.restarts.items()}
        self.run.write_state(state, max_steps=self.total_steps, restarts=restarts, **facts)

    def _commands(self) -> dict[str, Callable[..., Any]]:
        """What other processes may ask of this one."""
        return {
            "status": self.status,
            "inspect": self.inspect,
            "pause": self.pause,
            "resume": self.resume,
            "stop": self.request_stop,
            "restart": self.restart,
            "set": self.change,
        }

    def _wait_for_resume(self) -> None:
        """Nothing is left half done while a run is held, be it for days."""
        if self._saving is not None:
            self._flush_save()
        self._enter("paused")
        self.tell(f"paused at step {self.step}")
        while not (self._stop or self._go.is_set()):
            self._go.wait(1.0)  # not for ever: a pause may come right after a stop
        self._enter("running")

    @property
    def _shape(self) -> Any:
        return self._prepared.plan.shape

    # --- one step ---------------------------------------------------------------------------------------------------

    def _take_step(self, batch: StepBatch) -> dict[str, Any]:
        started_s = time.time()
        training = self.config.training
        hyper = Hyper(batch.step, self._learning_rate(batch.step))
        saving = self._saving is not None
        schedule = build_step(self._shape, pending=self._pending is not None, save=saving)
        try:
            records = self._run(schedule, batch, eager=hyper)
        except NonFiniteError as error:
            raise self._not_finite(batch, hyper, str(error)) from None
        if saving and not self._finish_save(again=self._shape.deferred):
            # The store died with half a checkpoint. Updates that wait for the next forward leave the state to be saved
            # as it was; others have changed it, and the step after this one is saved instead.
            if self._shape.deferred:
                self._begin_save()
                self._flush_save()
            else:
                self._save_next = True
        infos = [record.receipt.info for record in records if isinstance(record.receipt.info, GradInfo)]
        loss = next(info.loss for info in infos if info.loss is not None)
        grad_norm = math.sqrt(math.fsum(info.square_sum for info in infos))
        if not math.isfinite(grad_norm) or not math.isfinite(loss):
            raise self._not_finite(batch, hyper, f"loss {loss}, gradient norm {grad_norm}")
        if self._shape.deferred:
            # As torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
            scale = min(float(training.max_grad_norm or 0.0) / (grad_norm + 1e-6), 1.0)
            self._pending = Hyper(hyper.step, hyper.learning_rate, scale)
        self.step = batch.step
        write_trace(self.run.path / "trace.json", records, self.layers, step=self.step)
        return self._records.make(
            batch, records, learning_rate=hyper.learning_rate, loss=loss, grad_norm=grad_norm, started_s=started_s
        )

    def _not_finite(self, batch: StepBatch, hyper: Hyper, what: str) -> NonFiniteError:
        return NonFiniteError(
            f"step {batch.step}: {what}: the step was not taken (samples {list(batch.samples[:8])}"
            f"{'...' if len(batch.samples) > 8 else ''}, learning rate {hyper.learning_rate:g}). Lower the learning "
            "rate or look at those rows, and resume from the newest checkpoint",
            context={"step": batch.step},
        )

    def _run(
        self, schedule: Schedule, batch: StepBatch | None, *, eager: Hyper | None = None, train: bool = True
    ) -> list[Record]:
        """Runs a schedule; the pending updates are done when it has any."""
        weights_step = self.step

        def arguments(action: Action) -> tuple[Any, ...]:
            layer, op = action.layer, action.op
            if op in UPDATES:
                hyper = self._pending or eager
                assert hyper is not None
                return layer, hyper
            if op is Op.BEGIN:
                return batch, train
            if op is Op.SAVE:
                return layer, self._saving
            span = self.layers[layer].part(action.part, self._shape.part_numel)
            if op is Op.READ_MASTER:  # weights in float32 are masters, and travel as a whole
                return layer, weights_step, span if self._shape.cast else None
            if op in (Op.READ, Op.IMPORT):
                return layer, span
            return (layer,)

        records = self._pipeline.run(schedule, arguments, step=self.step if batch is None else batch.step)
        if any(action.op in UPDATES for action in schedule):
            self._pending = None
        self._records.saw(records)
        return records

    def _evaluation_is_due(self) -> bool:
        every = self.config.training.eval_steps
        return every is not None and (self.step % every == 0 or self.step == self.total_steps)

    def _lacks_evaluation(self) -> dict[str, Any] | None:
        """The record of the step that a run is resumed from, when it was stopped before that step's evaluation."""
        record = next(reversed(self.run.read_metrics()), None)
        lacks = record is not None and record["step"] == self.step and "eval_loss" not in record
        return record if lacks and self._evaluation_is_due() else None

    def _begin_save(self) -> None:
        self._saving = self.step
        self._ask_store("begin_save", self.step, self._prepared.save_spec)
        self._store_death = None

    def _flush_save(self) -> None:
        """Completes the checkpoint that has begun without a step around it."""
        while True:
            self._run(build_flush(self._shape, pending=self._pending is not None, save=True), None)
            if self._finish_save(again=True):
                return
            self._begin_save()

    def _finish_save(self, *, again: bool) -> bool:
        """Whether the checkpoint is complete; a store that was restarted has lost what it had of it.

        Args:
            again: Whether the same checkpoint can be written once more.

        Raises:
            TrainingError: That has happened `MAX_ATTEMPTS` times in a row.
        """
        assert self._saving is not None
        number, self._saving = self._saving, None
        state = {
            "step": number,
            "epoch": number / self._data.steps_per_epoch,
            "total_steps": self.total_steps,
            "data_xxh3_64": self._data.corpus.table.checksum,
            "config": self.config.model_dump(mode="json"),
        }
        path = self._ask_store("finish_save", number, state)
        if path is None:
            self._note_interruption(number, again=again)
            return False
        self._saved = number
        self._interrupted = 0
        self.tell(f"saved {path}")
        return True

    def _note_interruption(self, number: int, *, again: bool) -> None:
        what, stalled = self._store_death or ("finish_save", False)
        self._interrupted += 1
        if self._interrupted >= MAX_ATTEMPTS:
            raise self._pipeline.lost(Tier.STORE, f"{what} for checkpoint-{number}", stalled=stalled)
        self.tell(
            f"checkpoint-{number} was interrupted when the store died in {what}: "
            + ("it is written again" if again else "one of the next step takes its place"),
            level=logging.WARNING,
        )

    def _ask_store(self, method: str, *arguments: Any) -> Any:
        """Asks the store between schedules; when it says nothing for so long it is replaced, and asked once more."""
        assert self._cluster is not None
        deadline_s = self.config.tiers.deadline_s
        try:
            return self._cluster.ask(Tier.STORE, method, *arguments, deadline_s=deadline_s)
        except StalledError as stall:
            self.tell(f"{stall}: it was killed and restarts")
            self._store_death = method, True
            self._cluster.kill(Tier.STORE)
            return self._cluster.ask(Tier.STORE, method, *arguments, deadline_s=deadline_s)

    # --- what happens meanwhile -------------------------------------------------------------------------------------

    def _note_wait(self, action: Action) -> None:
        self.waiting_for = f"{action.tier}: {self._pipeline.describe(action)}"

    def _note_death(self, action: Action, stalled: bool) -> None:
        self._records.died(action.tier)
        if action.tier is Tier.STORE:
            self._store_death = self._pipeline.describe(action), stalled
        what = f"did not finish within {self.config.tiers.deadline_s:.0f} s and was killed" if stalled else "died"
        self.tell(
            f"{action.tier} {what} in {self._pipeline.describe(action)} (step {self.step + 1}); it restarts, and the "
            "step is repeated",
            layer=self._pipeline.layer_names[action.layer],
            level=logging.WARNING,
        )
