"""Which rows each step trains on: a pure function of configuration, seed and step, so resuming needs a number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.config import Config
from megatrain_ray.data.batches import MicroBatch, StepBatch, make_micro_batch, make_packed_micro_batch
from megatrain_ray.data.corpus import Corpus, read_corpus
from megatrain_ray.data.packing import pack

__all__ = ["TrainingData", "build_evaluation_corpus", "build_training_data", "evaluation_batches", "padding_token"]

Ints = NDArray[np.int64]

_GROUPED_MICRO_BATCHES = 64
"""``group_by_length`` sorts within this many micro-batches of the shuffled order, so epochs still differ."""


class TrainingData:
    """A corpus in optimizer steps.

    Args:
        corpus: At least one sequence.
        config: Batch sizes, epochs, packing, seed.
        pad_token_id: What padding holds; it is masked and never a target.
        tokenizer: For the preview.

    Attributes:
        steps_per_epoch: The last one may hold fewer rows.
        total_steps: Of the run.
        row_lengths: Tokens of each row: of a sample, or of several packed ones.
    """

    def __init__(self, corpus: Corpus, config: Config, pad_token_id: int = 0, tokenizer: Any = None) -> None:
        training = config.training
        self.corpus = corpus
        self.pad_token_id = pad_token_id
        self.tokenizer = tokenizer
        self._batch_size = training.per_device_train_batch_size
        self._rows_per_step = self._batch_size * training.gradient_accumulation_steps
        self._shuffle = training.shuffle
        self._group_by_length = training.group_by_length
        self._seed = training.seed
        self._packed = pack(corpus.lengths(), config.data.max_length) if config.data.packing else None
        self.row_lengths = corpus.lengths() if self._packed is None else self._packed.lengths
        self.steps_per_epoch = math.ceil(len(self.row_lengths) / self._rows_per_step)
        epochs = training.num_train_epochs if training.num_train_epochs is not None else 1.0
        self.total_steps = training.max_steps or math.ceil(epochs * self.steps_per_epoch)
        self._cached_order: tuple[int, Ints] = (-1, np.empty(0, np.int64))

    def step_batch(self, step: int) -> StepBatch:
        """The rows of a step, from 1."""
        chosen = self._rows_of(step)
        micro_batches = tuple(
            self._micro_batch(chosen[start : start + self._batch_size])
            for start in range(0, len(chosen), self._batch_size)
        )
        samples = tuple(self.corpus.samples[self.sample_numbers(step)].tolist())
        return StepBatch(step, step / self.steps_per_epoch, micro_batches, samples)

    def sample_numbers(self, step: int) -> list[int]:
        """Numbers within the corpus of the samples of a step, in order."""
        return [sample for row in self._rows_of(step) for sample in self._members(row)]

    @property
    def max_row_tokens(self) -> int:
        """The longest row of any micro-batch."""
        return int(self.row_lengths.max())

    @property
    def packing(self) -> bool:
        return self._packed is not None

    @property
    def group_by_length(self) -> bool:
        return self._group_by_length

    def padding_share(self) -> float:
        """Padding among all tokens that the model computes in the first epoch."""
        return self._padding(self._order(0), self.row_lengths)

    def plain_padding_share(self) -> float:
        """The same without packing and without ``group_by_length``."""
        return self._padding(self._shuffled(0, len(self.corpus)), self.corpus.lengths())

    def _padding(self, order: Ints, lengths: Ints) -> float:
        widths = np.maximum.reduceat(lengths[order], np.arange(0, len(order), self._batch_size))
        computed = int((widths * np.diff([*range(0, len(order), self._batch_size), len(order)])).sum())
        return 1 - int(lengths.sum()) / computed

    def _rows_of(self, step: int) -> list[int]:
        epoch, window = divmod(step - 1, self.steps_per_epoch)
        rows: list[int] = self._order(epoch)[window * self._rows_per_step : (window + 1) * self._rows_per_step].tolist()
        return rows

    def _members(self, row: int) -> list[int]:
        return [row] if self._packed is None else self._packed[row].tolist()

    def _micro_batch(self, rows: list[int]) -> MicroBatch:
        if self._packed is None:
            return make_micro_batch([self.corpus[row] for row in rows], self.pad_token_id)
        packed = [[self.corpus[sample] for sample in self._members(row)] for row in rows]
        return make_packed_micro_batch(packed, self.pad_token_id)

    def _order(self, epoch: int) -> Ints:
        """Rows in the order of training; kept for one epoch."""
        if self._cached_order[0] != epoch:
            order = self._shuffled(epoch, len(self.row_lengths))
            self._cached_order = (epoch, self._grouped(order, epoch) if self._group_by_length else order)
        return self._cached_order[1]

    def _shuffled(self, epoch: int, count: int) -> Ints:
        if not self._shuffle:
            return np.arange(count)
        return np.random.default_rng((self._seed, epoch)).permutation(count)

    def _grouped(self, order: Ints, epoch: int) -> Ints:
        """Rows of similar length side by side, micro-batches in random order; the partial one stays last."""
        group = self._batch_size * _GROUPED_MICRO_BATCHES
        parts = [order[start : start + group] for start in range(0, len(order), group)]
        order = np.concatenate([part[np.argsort(-self.row_lengths[part], kind="stable")] for part in parts])
        whole = len(order) // self._batch_size * self._batch_size
        micro_batches = order[:whole].reshape(-1, self._batch_size)
        if self._shuffle:
            micro_batches = np.random.default_rng((self._seed, epoch, 1)).permutation(micro_batches, axis=0)
        return np.concatenate([micro_batches.reshape(-1), order[whole:]])


def build_training_data(
    config: Config, *, tokenizer: Any, vocabulary_rows: int, cache_dir: str | None = None
) -> TrainingData:
    """``data.path`` in optimizer steps.

    Args:
        config: Of the run.
        tokenizer: Of the model, with the chat template that is to be used; None where the model has none.
        vocabulary_rows: Rows of the model's embedding.
        cache_dir: Of tokens; default: in the cache directory of `datasets`.

    Raises:
        DataError: A row that cannot be used, or none that can.
    """
    corpus = _corpus(config, config.data.paths, tokenizer, vocabulary_rows, cache_dir)
    return TrainingData(corpus, config, padding_token(tokenizer, vocabulary_rows), tokenizer)


def build_evaluation_corpus(
    config: Config, *, tokenizer: Any, vocabulary_rows: int, cache_dir: str | None = None
) -> Corpus | None:
    """``data.eval_path`` as it will be evaluated; None when there is none. Arguments and errors as above."""
    path = config.data.eval_path
    if path is None:
        return None
    return _corpus(config, (path,) if isinstance(path, str) else path, tokenizer, vocabulary_rows, cache_dir)


def _corpus(
    config: Config, paths: tuple[str, ...], tokenizer: Any, vocabulary_rows: int, cache_dir: str | None
) -> Corpus:
    return read_corpus(
        paths,
        config.data.format,
        tokenizer=tokenizer,
        max_length=config.data.max_length,
        vocabulary_rows=vocabulary_rows,
        assistant_only=config.data.assistant_only_loss,
        separate=config.data.packing,
        cache_dir=cache_dir,
    )


def padding_token(tokenizer: Any, vocabulary_rows: int) -> int:
    """What to pad with; 0 where the tokenizer has nothing, or a token that was added without a row in the embedding."""
    pad = getattr(tokenizer, "pad_token_id", None)
    return int(pad) if pad is not None and pad < vocabulary_rows else 0


def evaluation_batches(corpus: Corpus, batch_size: int, pad_token_id: int = 0) -> Iterator[StepBatch]:
    """The corpus in file order, one micro-batch a batch."""
    for start in range(0, len(corpus), batch_size):
        rows = [corpus[index] for index in range(start, min(start + batch_size, len(corpus)))]
        samples = tuple(int(sample) for sample in corpus.samples[start : start + batch_size])
        yield StepBatch(0, 0.0, (make_micro_batch(rows, pad_token_id),), samples)
