"""Helpers for tests of whole runs."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatrain_ray.trainer import Trainer

PART_NUMEL = 1 << 14
"""The layers of the tiny models are longer: three to five parts."""


def digest(checkpoint: Path) -> dict[str, str]:
    """Hashes of all weights and moments of a checkpoint."""
    files = sorted(checkpoint.glob("*.safetensors"))
    assert files
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def trace(records: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be the same to the last bit, of each step."""
    return [(r["step"], r["loss"], r["grad_norm"], r["learning_rate"], tuple(r["samples"])) for r in records]


def page(trainer: Trainer, layers: set[int], *, spill: bool = True, part_numel: int = PART_NUMEL) -> None:
    """Moves these layers to the store, in parts and whatever the plan said, before the run starts.

    With ``spill`` their gradients too.
    """
    prepared = trainer._prepared
    plan = prepared.plan
    deferred = plan.shape.deferred
    shape = dataclasses.replace(
        plan.shape,
        paged=frozenset(layers),
        part_numel=part_numel,
        spilled_grads=frozenset(layers) if deferred and spill else frozenset(),
    )
    trainer._prepared = dataclasses.replace(prepared, plan=dataclasses.replace(plan, shape=shape))


class Delayed:
    """A tier whose methods take a random while longer."""

    def __init__(self, build: Callable[[], Any], longest_s: float, seed: int) -> None:
        self._tier = build()
        self._longest_s = longest_s
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tier, name)
        delay_s = self._random.uniform(0, self._longest_s)
        if not inspect.iscoroutinefunction(method):

            def late(*arguments: Any) -> Any:
                time.sleep(delay_s)
                return method(*arguments)

            return late

        async def late_async(*arguments: Any) -> Any:
            await asyncio.sleep(delay_s)
            return await method(*arguments)

        return late_async


class Fatal:
    """A store whose process dies while it writes a checkpoint, at the same place so many times.

    Args:
        build: Makes the store.
        deaths: Counts them, a byte each.
        method: ``save``, of layer 2, or ``finish_save``.
        times: Deaths.
    """

    def __init__(self, build: Callable[[], Any], deaths: Path, method: str, times: int) -> None:
        self._tier = build()
        self._deaths, self._method, self._times = deaths, method, times

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tier, name)
        if name != self._method:
            return method

        async def fatal(first: int, *arguments: Any) -> Any:
            written = self._deaths.stat().st_size if self._deaths.exists() else 0
            if self._tier._writers and written < self._times and (name == "finish_save" or first == 2):
                with self._deaths.open("ab") as file:
                    file.write(b"x")
                os.kill(os.getpid(), signal.SIGKILL)
            return await method(first, *arguments)

        return fatal


class Overlapping:
    """A store that writes nothing into a checkpoint before the worker's next forward pass; and that worker.

    Args:
        build: Makes the tier.
        forward: A file that is there once a forward pass has begun since the checkpoint did.
    """

    def __init__(self, build: Callable[[], Any], forward: Path) -> None:
        self._tier = build()
        self._forward = forward

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tier, name)
        if name == "forward":
            self._forward.touch()
        if name == "begin_save":
            self._forward.unlink(missing_ok=True)
        if name != "save":
            return method

        async def save(*arguments: Any) -> Any:
            while not self._forward.exists():
                await asyncio.sleep(0.01)
            return await method(*arguments)

        return save
