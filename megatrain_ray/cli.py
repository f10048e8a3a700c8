"""The command line. Exit status: 0 done, 2 bad input (no actor started), 1 failed while running, 130/143 signals."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megatrain_ray.errors import MegatrainError

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
    overrides: Overrides = None,
) -> None:
    """Trains."""
    from megatrain_ray.config import load_config
    from megatrain_ray.trainer import Trainer

    config = load_config(config_path, overrides or ())
    changed = [override.partition("=")[0].strip() for override in overrides or ()]
    with (
        _Signals() as signals,
        Trainer(config, resume=resume, overwrite=overwrite, changed=changed, tell=_tell) as trainer,
    ):
        _tell(f"output: {trainer.run.path}")
        signals.stop = trainer.request_stop
        first = last = None
        with _progress(trainer) as show:
            for record in trainer.steps():
                first, last = first or record, record
                show(record)
        if first and last:
            _tell(
                f"done: step {last['step']} of {trainer.total_steps}, loss {first['loss']:.4f} -> {last['loss']:.4f}, "
                f"checkpoint {trainer.run.path}/checkpoint-{last['step']}"
            )
    if signals.received is not None:
        raise typer.Exit(128 + signals.received)


@app.command()
def plan(
    config_path: ConfigPath,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    overrides: Overrides = None,
) -> None:
    """Predicts the peak memory of each tier and where everything goes; starts nothing, writes nothing."""
    from megatrain_ray.config import load_config
    from megatrain_ray.prepare import prepare
    from megatrain_ray.run_directory import RunDirectory, output_path

    config = load_config(config_path, overrides or ())
    store = config.tiers.nvme_dir
    run = RunDirectory(output_path(config.training.output_dir), None if store is None else output_path(store))
    prepared = prepare(config, run)
    facts = prepared.plan.to_json()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table("tier", "peak", title=f"{sum(spec.num_parameters for spec in prepared.layers):,} parameters")
    for name, size in facts["peak_bytes"].items():
        table.add_row(name, f"{size / 2**20:,.0f} MiB")
    table.add_row("store (disk)", f"{facts['store_bytes'] / 2**20:,.0f} MiB")
    table.add_row("a checkpoint (disk)", f"{facts['checkpoint_bytes'] / 2**20:,.0f} MiB")
    Console().print(table)
    paged = facts["placement"].count("nvme")
    print(f"masters and moments: {len(facts['placement']) - paged} layers in RAM, {paged} in the store")


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


@app.command()
def bench(
    config_path: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Default: a 97M Llama.")] = None,
    placement: Annotated[str, typer.Option(help="ram, nvme or auto; of the default model.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each kind.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measures a step beside in-memory PyTorch and each tier beside its raw limit: ratios from one run."""
    from megatrain_ray import bench as measure
    from megatrain_ray.config import load_config

    with measure.temporary_directory() as directory:
        root = Path(directory)
        config = load_config(config_path) if config_path else measure.default_config(root, placement=placement)
        results = measure.bench_tiers(root, tell=_tell)
        results += measure.bench_step(config, rounds=rounds, tell=_tell)
    if as_json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    table = Table("what", "ours", "peer", "ratio", "against")
    for result in results:
        unit = result.unit
        table.add_row(
            result.what, f"{result.ours:.2f} {unit}", f"{result.peer:.2f} {unit}", f"{result.ratio:.2f}", result.against
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
        self.stop: Any = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.stop is None or self.received is not None or not self.stop():
            raise typer.Exit(128 + number)
        self.received = number
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
