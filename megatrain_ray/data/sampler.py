"""Which rows each step trains on: a pure function of configuration, seed and step, so resuming needs a number."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.config import Config
from megatrain_ray.data.batches import StepBatch, make_micro_batch
from megatrain_ray.data.corpus import Corpus

__all__ = ["TrainingData", "evaluation_batches"]


class TrainingData:
    """A corpus in optimizer steps.

    Args:
        corpus: At least one sequence.
        config: Batch sizes, epochs, seed.
        pad_token_id: What padding holds; it is masked and never a target.

    Attributes:
        steps_per_epoch: The last one may hold fewer rows.
        total_steps: Of the run.
    """

    def __init__(self, corpus: Corpus, config: Config, pad_token_id: int = 0) -> None:
        training = config.training
        self.corpus = corpus
        self.pad_token_id = pad_token_id
        self._batch_size = training.per_device_train_batch_size
        self._rows_per_step = self._batch_size * training.gradient_accumulation_steps
        self._shuffle = training.shuffle
        self._seed = training.seed
        self.steps_per_epoch = math.ceil(len(corpus) / self._rows_per_step)
        epochs = training.num_train_epochs if training.num_train_epochs is not None else 1.0
        self.total_steps = training.max_steps or math.ceil(epochs * self.steps_per_epoch)

    def step_batch(self, step: int) -> StepBatch:
        """The rows of a step, from 1."""
        epoch, window = divmod(step - 1, self.steps_per_epoch)
        chosen = self._order(epoch)[window * self._rows_per_step : (window + 1) * self._rows_per_step]
        micro_batches = tuple(
            make_micro_batch(
                [self.corpus[index] for index in chosen[start : start + self._batch_size]], self.pad_token_id
            )
            for start in range(0, len(chosen), self._batch_size)
        )
        samples = tuple(self.corpus.samples[index] for index in chosen)
        return StepBatch(step, step / self.steps_per_epoch, micro_batches, samples)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self.corpus))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self.corpus))


def evaluation_batches(corpus: Corpus, batch_size: int, pad_token_id: int = 0) -> Iterator[StepBatch]:
    """The corpus in file order, one micro-batch a batch."""
    for start in range(0, len(corpus), batch_size):
        rows = [corpus[index] for index in range(start, min(start + batch_size, len(corpus)))]
        samples = tuple(corpus.samples[start : start + batch_size])
        yield StepBatch(0, 0.0, (make_micro_batch(rows, pad_token_id),), samples)
