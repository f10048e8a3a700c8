"""The command line. Exit status: 0 done, 2 bad input (no actor started), 1 failed while running, 130/143 signals."""

from __future__ import annotations

import gc
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megatrain_ray.errors import MegatrainError, TrainingError

if TYPE_CHECKING:
    from megatrain_ray.trainer import Trainer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console(stderr=True, highlight=False)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Changes one key.")]


@app.callback()
def _program() -> None:
    """Train 100B-class language models at full precision on one GPU."""


@app.command()
def train(
    config_path: ConfigPath,
    resume: Annotated[bool, typer.Option(help="Continue from the newest complete checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that output_dir holds.")] = False,
    quiet: Annotated[bool, typer.Option(help="Prints the closing line and errors only.")] = False,
    overrides: Overrides = None,
) -> None:
    """Trains."""
    from megatrain_ray.config import load_config
    from megatrain_ray.trainer import Trainer

    config = load_config(config_path, overrides or ())
    changed = [override.partition("=")[0].strip() for override in overrides or ()]
    tell = (lambda message: None) if quiet else _tell
    if quiet:
        logging.getLogger("ray").setLevel(logging.ERROR)  # it announces its authentication as a warning
    with (
        _Signals() as signals,
        Trainer(config, resume=resume, overwrite=overwrite, changed=changed, tell=tell) as trainer,
    ):
        tell(f"output: {trainer.run.path}")
        signals.attach(trainer.request_stop)
        first = last = None
        with nullcontext(lambda record: None) if quiet else _progress(trainer) as show:
            for record in trainer.steps():
                first, last = first or record, record
                show(record)
        if first and last:
            ended = "done" if last["step"] == trainer.total_steps else "stopped"
            _tell(
                f"{ended}: step {last['step']} of {trainer.total_steps}, "
                f"loss {first['loss']:.4f} -> {last['loss']:.4f}, "
                f"checkpoint {trainer.run.path}/checkpoint-{last['step']}"
            )
    if signals.received is not None:
        raise typer.Exit(128 + signals.received)


@app.command()
def plan(
    config_path: ConfigPath,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    machine: Annotated[Path | None, typer.Option(metavar="FILE", help="Plan for this machine instead.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure this machine's speeds again.")] = False,
    overrides: Overrides = None,
) -> None:
    """Predicts each tier's peak memory, the step time and what bounds it; starts nothing."""
    gc.disable()  # the libraries make a million objects, none of them garbage: no collection has to look at them
    from megatrain_ray.config import load_config
    from megatrain_ray.observe.plan_table import print_plan
    from megatrain_ray.prepare import plan_elsewhere, plan_here

    gc.freeze()
    gc.enable()
    config = load_config(config_path, overrides or ())
    if machine is not None:
        from megatrain_ray.machine_file import load_machine

        made, layers = plan_elsewhere(config, load_machine(machine))
    else:
        made, layers = plan_here(config, measure=measure, tell=_tell)
    if as_json:
        print(json.dumps(made.to_json(), indent=2))
    else:
        print_plan(made, layers, Console())


@app.command()
def data(
    config_path: ConfigPath,
    samples: Annotated[int, typer.Option(min=0, help="Samples to show.")] = 3,
    overrides: Overrides = None,
) -> None:
    """Shows what a run would train on: rendered samples with their targets, counts, lengths."""
    from megatrain_ray.config import load_config
    from megatrain_ray.data.preview import print_preview
    from megatrain_ray.prepare import prepare_data

    config = load_config(config_path, overrides or ())
    training, evaluation = prepare_data(config)
    print_preview(training, Console(), samples, evaluation)


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="An output_dir.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command()
def status(
    run: RunPath,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option(help="Shows it anew every second until the run ends.")] = False,
) -> None:
    """Shows what a run is doing, or how it ended."""
    from megatrain_ray.observe.status import read_status, render_status

    facts = read_status(run)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    if not watch:
        Console().print(render_status(facts))
        return
    with Live(render_status(facts), console=Console(), auto_refresh=False) as live:
        while facts["state"] in ("starting", "running", "pausing", "paused"):
            time.sleep(1)
            facts = read_status(run)
            live.update(render_status(facts), refresh=True)


@app.command()
def inspect(
    run: RunPath,
    layer: Annotated[str, typer.Argument(help="Name or position: embed, layer-0003, head, 4.")],
    tensor: Annotated[str | None, typer.Option(help="Only this tensor.")] = None,
    as_json: AsJson = False,
) -> None:
    """Shows a layer's masters and moments: of the live run without stopping it, or of the newest checkpoint."""
    from megatrain_ray.observe.inspection import inspect_run, render_inspection

    facts = inspect_run(run, layer, tensor)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    Console().print(render_inspection(facts))


@app.command()
def pause(run: RunPath) -> None:
    """Lets the start or the present step and its checkpoint end, then holds the run; its actors stay."""
    _steer(run, "pause")
    with console.status("the start or the present step ends first"):
        while (facts := _steer(run, "status"))["state"] == "pausing":
            time.sleep(0.2)
    if facts["state"] != "paused":
        raise TrainingError(f"{run}: not paused: the run is {facts['state']}")
    print(f"{run}: paused at step {facts['step']}")


@app.command()
def resume(run: RunPath) -> None:
    """Goes on after `pause`. A run that has ended goes on with `train --resume`."""
    _steer(run, "resume")
    print(f"{run}: running")


@app.command()
def stop(run: RunPath) -> None:
    """Ends a run after the present step and its checkpoint."""
    _steer(run, "stop")
    print(f"{run}: stopping after this step and its checkpoint")


@app.command()
def restart(
    run: RunPath, actor: Annotated[str, typer.Argument(help="nvme_store, cpu_optimizer or gpu_worker.")]
) -> None:
    """Ends an actor's process; a new one takes its place, and the step in progress is repeated."""
    print(f"{run}: {actor} is process {_steer(run, 'restart', actor=actor)} now")


@app.command("set")
def set_(run: RunPath, assignment: Annotated[str, typer.Argument(metavar="KEY=VALUE")]) -> None:
    """Changes learning_rate from the next step on."""
    key, _, value = assignment.partition("=")
    _steer(run, "set", key=key, value=value)
    print(f"{run}: {key} is {value} from the next step on; to resume later give --set training.{key}={value}")


def _steer(run: Path, command: str, **arguments: Any) -> Any:
    """Sends a command to a live run; of another, says how it ended."""
    from megatrain_ray.control import NotLiveError, ask

    try:
        return ask(run, command, **arguments)
    except NotLiveError as error:
        from megatrain_ray.observe.status import read_status

        raise NotLiveError(f"{error}; the run is {read_status(run)['state']}") from None


@app.command()
def bench(
    config_path: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Default: a 97M Llama.")] = None,
    placement: Annotated[str, typer.Option(help="ram, nvme or auto; of the default model.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each kind.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measures a step beside in-memory PyTorch, each tier beside its raw limit, data beside what a step consumes.

    All are ratios from one run. With CONFIG nothing is written to its output_dir.
    """
    from megatrain_ray import bench as measure
    from megatrain_ray.config import load_config

    with measure.temporary_directory() as directory:
        root = Path(directory)
        if config_path:
            plain = ("training.eval_steps=null", "training.save_steps=null", "training.max_steps=10000")
            config = load_config(config_path, (f"training.output_dir={root}/run", *plain))
        else:
            config = measure.default_config(root, placement=placement)
        results = measure.bench_tiers(root, tell=_tell)
        step_s, steps = measure.bench_step(config, rounds=rounds, tell=_tell)
        results += steps + measure.bench_data(config, root / "tokens", step_s=step_s, tell=_tell)
        results += measure.bench_saving(config, rounds=rounds, tell=_tell)
    if as_json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    table = Table("what", "ours", "peer", "ratio", "against")
    for result in results:
        unit = result.unit
        table.add_row(
            result.what,
            f"{result.ours:,.2f} {unit}",
            "" if result.peer is None else f"{result.peer:,.2f} {unit}",
            "" if result.ratio is None else f"{result.ratio:,.2f}",
            result.against,
        )
    Console().print(table)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    out: Annotated[Path, typer.Argument(help="New directory, or an older export.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the model's.")] = None,
) -> None:
    """Writes a checkpoint's model as a Hugging Face directory."""
    from megatrain_ray.checkpoint.resume import export as write

    print(write(str(checkpoint), str(out), dtype))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="An output_dir: of a live, finished or crashed run.")],
    out: Annotated[Path | None, typer.Option(help="The file; default: RUN/report.html.")] = None,
) -> None:
    """Writes one self-contained HTML file about a run, and prints its path."""
    from megatrain_ray.observe.report import write_report

    print(write_report(run, out))


def main() -> None:
    """The console script."""
    try:
        status = app(standalone_mode=False)  # an Exit raised by a command comes back as its status
        _end(status if isinstance(status, int) else 0)
    except MegatrainError as error:
        _end(error.exit_status, str(error))
    except typer.Abort:
        _end(130)
    except KeyboardInterrupt:
        _end(130, "interrupted")
    except Exception as error:
        import click

        if isinstance(error, click.ClickException):
            error.show()
            _end(error.exit_code)
        console.print_exception()
        _end(1, f"{type(error).__name__}: {error}")


def _end(status: int, message: str | None = None) -> None:
    """Leaves; the last line on stderr is the cause."""
    sys.stdout.flush()
    if message is not None:
        print(f"error: {message}" if status not in (130, 143) else message, file=sys.stderr)
    sys.stderr.flush()
    sys.exit(status)


def _tell(message: str) -> None:
    console.print(message, markup=False, soft_wrap=True)


class _Signals:
    """SIGINT and SIGTERM: the first one ends training after the present step and its checkpoint, the second at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._stop: Callable[[], bool] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attach(self, stop: Callable[[], bool]) -> None:
        """``stop`` asks a run to end, and says whether it will complete something first."""
        self._stop = stop
        if self.received is not None:
            stop()

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.received = self.received is not None, number
        if self._stop is None or not self._stop() or again:
            # Python drops what is raised while it runs a finalizer: then the run has been asked to stop all the same.
            raise SystemExit(128 + number)
        _tell("stopping: this step and a checkpoint are completed first; once more to leave at once")


class _Waiting(ProgressColumn):
    """What the step waits for, now."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    def render(self, task: object) -> Text:
        return Text(self._trainer.waiting_for, style="dim")


@contextmanager
def _progress(trainer: Trainer) -> Iterator[Any]:
    """A live line on a terminal, plain lines elsewhere."""

    def describe(record: dict[str, Any]) -> str:
        text = f"loss {record['loss']:.4f}  norm {record['grad_norm']:.3g}  {record['tokens_per_s']:,.0f} tokens/s"
        return f"{text}  eval {record['eval_loss']:.4f}" if "eval_loss" in record else text

    if not console.is_terminal:

        def line(record: dict[str, Any]) -> None:
            if record["step"] % trainer.config.training.logging_steps == 0 or "eval_loss" in record:
                _tell(
                    f"step {record['step']}/{trainer.total_steps}  lr {record['learning_rate']:.3g}  {describe(record)}"
                )

        yield line
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        _Waiting(trainer),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=trainer.total_steps, completed=trainer.step)
        yield lambda record: progress.update(task, completed=record["step"], description=describe(record))
