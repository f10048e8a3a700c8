"""From text or conversations to entries of the token table, batch by batch; what `datasets` runs in parallel."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.data.batches import IGNORED
from megatrain_ray.data.chat import ChatTemplate
from megatrain_ray.data.formats import Conversation, Unusable
from megatrain_ray.errors import DataError

__all__ = ["ChatEncoder", "TextEncoder", "entry_of"]

Ints = NDArray[np.int64]

_KEPT = ("row", "source", "number")
"""Columns that pass through."""


def entry_of(ids: Ints, labels: Ints | None, problem: str = "") -> dict[str, Any]:
    """One entry of the table; labels None: everything is a target."""
    shifted = ids[1:] if labels is None else labels[1:]
    positions = np.flatnonzero(shifted != IGNORED)
    largest = max(int(ids.max(initial=-1)), -1 if labels is None else int(labels.max(initial=-1)))
    return {
        "input_ids": ids.astype(np.int32),
        "labels": (ids[:0] if labels is None else labels).astype(np.int32),
        "targets": len(positions),
        "first_target": int(positions[0]) + 1 if len(positions) else 0,
        "largest_id": largest,
        "problem": problem,
    }


class TextEncoder:
    """Running text to ids: the tokenizer's own start mark, one end mark after each document."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, batch: dict[str, list[Any]], parallel: bool) -> dict[str, list[Any]]:
        _calm_tokenizers(parallel)
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        entries = []
        for ids, text, problem, first, last in zip(
            self._tokenizer(batch["text"], verbose=False)["input_ids"],
            batch["text"],
            batch["problem"],
            batch["first"],
            batch["last"],
            strict=True,
        ):
            if not text:
                entries.append(entry_of(np.empty(0, np.int64), None, problem or "empty text"))
                continue
            while (bos is not None and ids[:2] == [bos, bos]) or (ids[:1] == [bos] and not first):
                ids = ids[1:]
            if eos is not None and ids[-1:] == [eos] and not last:
                ids = ids[:-1]
            if eos is not None and ids[-1:] != [eos] and last:
                ids = [*ids, eos]
            entries.append(entry_of(np.array(ids, np.int64), None))
        return {**_columns(entries), **{name: batch[name] for name in _KEPT}}


class ChatEncoder:
    """Conversations, as JSON, to ids and labels."""

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} does not say where in the text its tokens stand, so targets of chats "
                "cannot be told; use the model's fast tokenizer (tokenizer.json)"
            )
        self._template = template
        self._tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        starts_with_bos = bos is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [bos]
        self._bos = bos if starts_with_bos else None

    def __call__(self, batch: dict[str, list[Any]], parallel: bool) -> dict[str, list[Any]]:
        _calm_tokenizers(parallel)
        entries = []
        for text, problem in zip(batch["text"], batch["problem"], strict=True):
            if not problem:
                try:
                    entries.append(entry_of(*self._encode(Conversation(**json.loads(text)))))
                    continue
                except Unusable as error:
                    problem = str(error)
            entries.append(entry_of(np.empty(0, np.int64), None, problem))
        return {**_columns(entries), **{name: batch[name] for name in _KEPT}}

    def _encode(self, chat: Conversation) -> tuple[Ints, Ints | None]:
        rendered = self._template.render(chat)
        encoded = self._tokenizer(
            rendered.text,
            add_special_tokens=False,  # the template prints them
            return_offsets_mapping=rendered.targets is not None,
            verbose=False,
        )
        ids = np.array(encoded["input_ids"], np.int64)
        labels = None
        if rendered.targets is not None:
            offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
            wanted = np.zeros(len(ids), bool)
            for start, end in rendered.targets:
                wanted |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
            labels = np.where(wanted, ids, IGNORED)
        extra = self._missing_bos(ids)
        ids = ids[max(0, -extra) :]
        labels = labels if labels is None else labels[max(0, -extra) :]
        if extra > 0:
            ids = np.concatenate([[self._bos], ids])
            labels = labels if labels is None else np.concatenate([[IGNORED], labels])
        return ids, labels

    def _missing_bos(self, ids: Ints) -> int:
        """1 when the one start mark is missing, -n when there are n too many: the model expects exactly one."""
        if self._bos is None:
            return 0
        count = int(np.argmin(np.append(ids == self._bos, False)))
        return 1 - count


def _columns(entries: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [entry[name] for entry in entries] for name in entries[0]}


def _calm_tokenizers(parallel: bool) -> None:
    """One thread a process where there are several processes."""
    if parallel:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
