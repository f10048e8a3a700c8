"""What a run will train on, for people: counts, lengths, and samples with their targets coloured."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain_ray.data.batches import IGNORED
from megatrain_ray.data.corpus import Corpus, Dropped, left_out, ranges
from megatrain_ray.data.sampler import TrainingData

__all__ = ["Preview", "Segment", "describe", "print_preview", "segments_of"]

TARGET_STYLE = "bold green"
CONTEXT_STYLE = "dim"

_BINS = 10
_BAR_WIDTH = 40
_SHOWN_CHARS = 4000
"""Of a sample; the middle of a longer one is left out."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What would steer the terminal."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens that are all targets, or none of them."""

    text: str
    target: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """Facts about a data set.

    Attributes:
        form: ``text``, ``chat`` or ``tokens``.
        num_rows: Rows that were read.
        num_samples: What they became.
        truncated: Row indices of samples that were cut to ``max_length``.
        dropped: Rows that were left out, by reason.
        tokens_per_epoch, targets_per_epoch: Of all samples.
        steps_per_epoch, total_steps: Optimizer steps.
        padding_share, plain_padding_share: Padding among the tokens that the model computes, as configured, and without
            packing and grouping by length.
        histogram: (first length, last length, how many) of samples before truncation, of documents for running text.
    """

    form: str
    num_rows: int
    num_samples: int
    truncated: tuple[int, ...]
    dropped: tuple[Dropped, ...]
    tokens_per_epoch: int
    targets_per_epoch: int
    steps_per_epoch: int
    total_steps: int
    padding_share: float
    plain_padding_share: float
    histogram: tuple[tuple[int, int, int], ...]


def describe(data: TrainingData) -> Preview:
    """All facts of the preview but the samples themselves."""
    corpus = data.corpus
    return Preview(
        form=corpus.table.form,
        num_rows=corpus.num_rows,
        num_samples=len(corpus),
        truncated=tuple(corpus.truncated.tolist()),
        dropped=corpus.dropped,
        tokens_per_epoch=int(corpus.lengths().sum()),
        targets_per_epoch=corpus.num_targets,
        steps_per_epoch=data.steps_per_epoch,
        total_steps=data.total_steps,
        padding_share=data.padding_share(),
        plain_padding_share=data.plain_padding_share(),
        histogram=_histogram(corpus),
    )


def segments_of(corpus: Corpus, index: int, tokenizer: Any) -> list[Segment]:
    """A sample as text, cut where targets start and end; as numbers without a tokenizer."""
    ids, labels = corpus[index]
    wanted = labels != IGNORED
    wanted[0] = False
    bounds = [0, *(np.flatnonzero(np.diff(wanted)) + 1).tolist(), len(ids)]
    return [
        Segment(_decode(ids[start:end].tolist(), tokenizer), bool(wanted[start]))
        for start, end in itertools.pairwise(bounds)
    ]


def print_preview(data: TrainingData, console: Console, samples: int = 3, evaluation: Corpus | None = None) -> None:
    """Prints facts, length histogram, and samples in the order of training.

    Args:
        data: Of the run.
        console: Where to.
        samples: How many to show.
        evaluation: Held-out data: counts, and what was left out.
    """
    facts = describe(data)
    console.print(_facts_table(data, facts, evaluation))
    for line in left_out(data.corpus, evaluation, all_rows=True):
        console.print(Text(line, style="yellow"))
    console.print(_histogram_table(facts))
    for index in itertools.islice(_in_order(data), samples):
        console.print(_sample(data, index))


def _in_order(data: TrainingData) -> Iterator[int]:
    for step in range(1, data.steps_per_epoch + 1):
        yield from data.sample_numbers(step)


def _facts_table(data: TrainingData, facts: Preview, evaluation: Corpus | None) -> Table:
    table = Table.grid(padding=(0, 2))
    what = "windows" if facts.form == "text" and not data.packing else "samples"
    add = table.add_row
    add("format", facts.form)
    add("rows", f"{facts.num_rows:,} read, {facts.num_samples:,} {what} kept")
    if facts.truncated:
        add("truncated", _truncated(data.corpus))
    if facts.dropped:
        add("left out", f"{data.corpus.without_targets:,} of {facts.num_rows:,} rows")
    share = facts.targets_per_epoch / facts.tokens_per_epoch
    add(
        "tokens per epoch",
        f"{facts.tokens_per_epoch:,}, of which {facts.targets_per_epoch:,} are targets ({share:.0%})",
    )
    add("steps", f"{facts.steps_per_epoch:,} an epoch, {facts.total_steps:,} in all")
    how = [word for word, on in (("packing", data.packing), ("group_by_length", data.group_by_length)) if on]
    saved = f" ({facts.plain_padding_share:.1%} without {' and '.join(how)})" if how else ""
    add("padding", f"{facts.padding_share:.1%} of all tokens computed{saved}")
    if evaluation is not None:
        left = (
            f"; {evaluation.without_targets:,} of {evaluation.num_rows:,} rows left out" if evaluation.dropped else ""
        )
        cut = f"; truncated: {_truncated(evaluation)}" if len(evaluation.truncated) else ""
        add("held out", f"{len(evaluation):,} samples, {int(evaluation.lengths().sum()):,} tokens{left}{cut}")
    return table


def _truncated(corpus: Corpus) -> str:
    return f"{len(corpus.truncated):,} to {corpus.max_length} tokens (rows {ranges(corpus.truncated)})"


def _histogram(corpus: Corpus) -> tuple[tuple[int, int, int], ...]:
    lengths = corpus.full_lengths()
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // _BINS)
    starts = np.arange(low, high + 1, width)
    counts = np.bincount((lengths - low) // width, minlength=len(starts))
    return tuple(
        (int(start), min(int(start) + width - 1, high), int(count)) for start, count in zip(starts, counts, strict=True)
    )


def _histogram_table(facts: Preview) -> Table:
    what = "document" if facts.form == "text" else "sample, before truncation"
    table = Table(title=f"tokens of a {what}", box=None, title_justify="left", show_header=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(style="cyan")
    most = max(count for _, _, count in facts.histogram)
    for first, last, count in facts.histogram:
        bar = "#" * -(-count * _BAR_WIDTH // most)
        table.add_row(f"{first:,}" if first == last else f"{first:,} - {last:,}", f"{count:,}", bar)
    return table


def _sample(data: TrainingData, index: int) -> Text:
    corpus = data.corpus
    length = int(corpus.lengths()[index])
    what = "window" if corpus.table.form == "text" and not data.packing else "row"
    heading = f"--- {what} {corpus.samples[index]}: {length} tokens; targets are "
    title = Text.assemble((heading, "bold"), ("coloured", TARGET_STYLE), "\n")
    body = Text()
    for segment in segments_of(corpus, index, data.tokenizer):
        body.append(segment.text, style=TARGET_STYLE if segment.target else CONTEXT_STYLE)
    if len(body) > _SHOWN_CHARS:
        half = _SHOWN_CHARS // 2
        body = Text.assemble(body[:half], Text("\n[...]\n", style="bold"), body[-half:])
    return title + body


def _decode(ids: list[int], tokenizer: Any) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids)) + " "
    text = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
