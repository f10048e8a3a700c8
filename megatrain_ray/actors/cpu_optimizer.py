"""The CPU tier: fp32 masters and AdamW moments, in RAM that outlives the actor or paged through the store.

An update is one pass over memory in chunks that stay in cache. A layer in RAM is updated in place, each chunk copied to
an undo journal first: a killed process leaves a chunk old, or new, or undone by the next process, never a mix. A
layer's version word counts finished steps and, within the step being taken, finished chunks, so that repeating a call
is harmless and goes on where the last one died. A layer from the store is updated out of place.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain_ray.errors import TrainingError
from megatrain_ray.layout import ITEMSIZE, LayerSpec, align_up
from megatrain_ray.observe.layer_facts import describe_state
from megatrain_ray.packed import PARAMS, STATE, PackedLayer
from megatrain_ray.tensors import as_tensor

__all__ = ["AdamWConfig", "CpuOptimizer", "Hyper", "arena_bytes"]

_logger = logging.getLogger(__name__)

CHUNK_NUMEL = 1 << 18
"""Elements per chunk: fp32 arrays of 1 MiB stay in the last-level cache, and are long against Python's overhead."""

_CHUNK_BITS = 24
"""Low bits of a version word: chunks done of the next step. 2**24 chunks are 2**43 elements."""

_JOURNAL_WORDS = 2
"""Words of the journal's header: layer, and one more than its version when the chunk was copied; 0: nothing there."""


@dataclass(frozen=True, slots=True)
class AdamWConfig:
    """Constants of ``torch.optim.AdamW``.

    Attributes:
        betas: Decay rates of the first and second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled decay of the tensors that take it.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Hyper:
    """What changes from step to step.

    Attributes:
        step: The step being taken, from 1.
        learning_rate: Its learning rate.
        grad_scale: Factor on the gradient: the clipping coefficient.
    """

    step: int
    learning_rate: float
    grad_scale: float = 1.0


def _header_words(num_layers: int) -> int:
    return align_up((_JOURNAL_WORDS + num_layers) * 8, mmap.PAGESIZE) // 8


def arena_bytes(layers: Sequence[LayerSpec], resident: Sequence[int]) -> int:
    """Size of the shared memory that holds the state of the ``resident`` layers: header, journal, then each layer."""
    state = sum(len(STATE) * layers[index].section_bytes("float32") for index in resident)
    return _header_words(len(layers)) * 8 + len(STATE) * CHUNK_NUMEL * 4 + state


class CpuOptimizer:
    """Owns masters and moments; emits compute weights.

    Args:
        layers: The stream.
        adamw_config: Constants of the optimizer.
        compute_dtype: Of the emitted weights.
        resident: Layers whose state is in RAM.
        arena_path: A file in memory of `arena_bytes` bytes, kept by somebody who outlives this process.
        num_threads: Torch threads of this process.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        adamw_config: AdamWConfig,
        *,
        compute_dtype: str,
        resident: Sequence[int],
        arena_path: str,
        num_threads: int,
    ) -> None:
        torch.set_num_threads(num_threads)
        self.layers = tuple(layers)
        self.adamw_config = adamw_config
        self.compute_dtype = compute_dtype
        self._torch_dtype: torch.dtype = getattr(torch, compute_dtype)
        descriptor = os.open(arena_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._arena = mmap.mmap(descriptor, arena_bytes(layers, resident))
        finally:
            os.close(descriptor)
        words = _header_words(len(layers))
        header: NDArray[np.int64] = np.frombuffer(self._arena, np.int64, words)
        self._journal_header = header[:_JOURNAL_WORDS]
        self._versions = header[_JOURNAL_WORDS : _JOURNAL_WORDS + len(layers)]
        offset = words * 8
        self._journal = torch.frombuffer(
            self._arena, dtype=torch.float32, count=len(STATE) * CHUNK_NUMEL, offset=offset
        )
        self._journal = self._journal.view(len(STATE), CHUNK_NUMEL)
        offset += len(STATE) * CHUNK_NUMEL * 4
        self._state: dict[int, Tensor] = {}
        for index in resident:
            numel = layers[index].numel
            state = torch.frombuffer(self._arena, dtype=torch.float32, count=len(STATE) * numel, offset=offset)
            self._state[index] = state.view(len(STATE), numel)
            offset += len(STATE) * numel * 4
        self._grads_scratch = torch.empty(CHUNK_NUMEL)
        self._buffers: dict[str, NDArray[np.uint8]] = {}
        self._emitted = (0, 0, 0)  # layer, step and elements of the weights in their buffer
        self._undo()

    # --- state in RAM -------------------------------------------------------------------------------------------

    def keep(self, layer: int, state: PackedLayer) -> int:
        """Puts an imported layer into RAM.

        Args:
            layer: Index in the stream.
            state: Section ``master`` alone (moments become zero), or all of `STATE`; of the layer or a part of it.

        Returns:
            The layer's step.
        """
        target = self._state[layer][:, state.start : state.stop]
        self._journal_header[1] = 0
        for row, section in enumerate(STATE):
            if section in state.sections:
                target[row].copy_(as_tensor(state.section(section), torch.float32))
            else:
                target[row].zero_()
        self._versions[layer] = state.step << _CHUNK_BITS
        return state.step

    def snapshot(self, layer: int) -> PackedLayer:
        """Masters and moments of a layer in RAM, as they are after the last finished step."""
        step = self._finished_step(layer)
        # A view: Ray copies it into the object store before this actor runs another call.
        data = self._state[layer].view(-1).view(torch.uint8).numpy()
        return PackedLayer(layer, step, "float32", STATE, data)

    def params(self, layer: int) -> PackedLayer:
        """Compute weights of a layer in RAM."""
        params = self._emit(layer, self._finished_step(layer), self._state[layer][0])
        assert params is not None
        return params

    def cast(self, layer: int, master: PackedLayer) -> PackedLayer | None:
        """Compute weights from a master that the store has read; of a layer in parts the last one returns them all."""
        return self._emit(layer, master.step, as_tensor(master.section("master"), torch.float32), master.start)

    # --- updates ------------------------------------------------------------------------------------------------

    def update(self, layer: int, hyper: Hyper, grads: PackedLayer | None) -> None:
        """One AdamW step of a layer in RAM. ``grads`` may be None when the step was already taken."""
        self._update_in_ram(layer, hyper, grads)

    def update_emit(self, layer: int, hyper: Hyper, grads: PackedLayer | None) -> PackedLayer:
        """`update`, and the new compute weights."""
        self._update_in_ram(layer, hyper, grads)
        return self.params(layer)

    def update_paged(self, layer: int, hyper: Hyper, state: PackedLayer, grads: PackedLayer | None) -> PackedLayer:
        """One AdamW step of a layer in the store, or of a part of it: returns the new state."""
        if state.step == hyper.step:
            return state
        assert state.step == hyper.step - 1, f"layer {layer} is at step {state.step}, asked for {hyper.step}"
        grad = _checked(grads, layer, hyper)[state.start : state.stop]
        old = as_tensor(state.data, torch.float32).view(len(STATE), -1)
        data = self._buffer("state", state.data.nbytes)
        new = as_tensor(data, torch.float32).view(len(STATE), -1)
        for first, last, weight_decay in self._chunks(layer):
            start, stop = max(first, state.start) - state.start, min(last, state.stop) - state.start
            if start < stop:
                new[:, start:stop].copy_(old[:, start:stop])
                self._adamw(new[:, start:stop], grad[start:stop], hyper, weight_decay)
        return PackedLayer(layer, hyper.step, "float32", STATE, data, state.start)

    def update_paged_emit(
        self, layer: int, hyper: Hyper, state: PackedLayer, grads: PackedLayer | None
    ) -> tuple[PackedLayer | None, PackedLayer]:
        """`update_paged`; returns the new compute weights, of a layer in parts with the last one, and the new state."""
        new_state = self.update_paged(layer, hyper, state, grads)
        return self.cast(layer, new_state), new_state

    # --- what people look at --------------------------------------------------------------------------------------

    def status(self) -> Mapping[str, Any]:
        """Bytes of state in RAM and the step of each layer there."""
        return {
            "resident_bytes": sum(state.nbytes for state in self._state.values()),
            "steps": {self.layers[layer].name: int(self._versions[layer]) >> _CHUNK_BITS for layer in self._state},
        }

    def inspect(self, layer: int, tensor: str | None) -> dict[str, Any]:
        """Statistics of a layer in RAM, or of one of its tensors.

        Raises:
            TrainingError: A killed process has left it half updated, and the step has not been repeated yet.
        """
        spec, (step, chunks_done) = self.layers[layer], divmod(int(self._versions[layer]), 1 << _CHUNK_BITS)
        if chunks_done:
            raise TrainingError(f"{spec.name}: the optimizer died in the middle of its update: ask again in a moment")
        return describe_state(spec, step, dict(zip(STATE, self._state[layer].numpy(), strict=True)), tensor)

    # --- internals --------------------------------------------------------------------------------------------------

    def _finished_step(self, layer: int) -> int:
        version = int(self._versions[layer])
        assert version & ((1 << _CHUNK_BITS) - 1) == 0, f"layer {layer} is in the middle of an update"
        return version >> _CHUNK_BITS

    def _update_in_ram(self, layer: int, hyper: Hyper, grads: PackedLayer | None) -> None:
        step, chunks_done = divmod(int(self._versions[layer]), 1 << _CHUNK_BITS)
        if step == hyper.step:
            return
        assert step == hyper.step - 1, f"layer {layer} is at step {step}, asked for {hyper.step}"
        grad = _checked(grads, layer, hyper)
        state = self._state[layer]
        for start, stop, weight_decay in self._chunks(layer)[chunks_done:]:
            self._journal[:, : stop - start].copy_(state[:, start:stop])
            self._journal_header[0] = layer
            self._journal_header[1] = self._versions[layer] + 1  # from here on the journal counts
            self._adamw(state[:, start:stop], grad[start:stop], hyper, weight_decay)
            self._versions[layer] += 1  # from here on it does not
        self._journal_header[1] = 0
        self._versions[layer] = hyper.step << _CHUNK_BITS

    def _undo(self) -> None:
        """Puts back the chunk that a killed process was changing."""
        layer, version = int(self._journal_header[0]), int(self._journal_header[1]) - 1
        if version >= 0 and version == self._versions[layer]:
            start, stop, _ = self._chunks(layer)[version & ((1 << _CHUNK_BITS) - 1)]
            self._state[layer][:, start:stop].copy_(self._journal[:, : stop - start])
            _logger.info("%s: elements %d to %d of an update are undone", self.layers[layer].name, start, stop)

    def _adamw(self, state: Tensor, grad: Tensor, hyper: Hyper, weight_decay: float) -> None:
        """torch.optim.AdamW's fused kernel on one chunk, in place on ``state`` [3, n]; ``grad`` [n] is not changed."""
        master, exp_avg, exp_avg_sq = state
        if hyper.grad_scale != 1.0:
            grad = torch.mul(grad, hyper.grad_scale, out=self._grads_scratch[: grad.numel()])
        # The kernel behind torch.optim.AdamW(fused=True): the functional form around it costs half a chunk's time.
        torch._fused_adamw_(
            [master],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.tensor(float(hyper.step))],
            lr=hyper.learning_rate,
            beta1=self.adamw_config.betas[0],
            beta2=self.adamw_config.betas[1],
            weight_decay=weight_decay,
            eps=self.adamw_config.eps,
            amsgrad=False,
            maximize=False,
        )

    def _chunks(self, layer: int) -> list[tuple[int, int, float]]:
        """(start, stop, weight decay) of each chunk; none straddles the end of the decayed tensors."""
        spec = self.layers[layer]
        groups = ((0, spec.decay_numel, self.adamw_config.weight_decay), (spec.decay_numel, spec.numel, 0.0))
        return [
            (start, min(start + CHUNK_NUMEL, stop), decay)
            for first, stop, decay in groups
            for start in range(first, stop, CHUNK_NUMEL)
        ]

    def _emit(self, layer: int, step: int, master: Tensor, start: int = 0) -> PackedLayer | None:
        """Weights, once the masters of the layer's last element are here, and all before them."""
        numel, stop = self.layers[layer].numel, start + master.numel()
        # The read of one part may die with the store and that of the next not: half of these weights would be old.
        assert start == 0 or self._emitted == (layer, step, start), (
            f"layer {layer}: elements before {start} are missing"
        )
        self._emitted = (layer, step, stop)
        if self._torch_dtype is torch.float32 and master.numel() == numel:
            # A view: Ray makes the copy that leaves this process.
            return PackedLayer(layer, step, "float32", PARAMS, master.view(torch.uint8).numpy())
        out = self._buffer("params", numel * ITEMSIZE[self.compute_dtype])
        as_tensor(out, self._torch_dtype)[start:stop].copy_(master)
        return PackedLayer(layer, step, self.compute_dtype, PARAMS, out) if stop == numel else None

    def _buffer(self, name: str, nbytes: int) -> NDArray[np.uint8]:
        """A reused buffer: Ray has copied the last call's return value before the next call runs."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]


def _checked(grads: PackedLayer | None, layer: int, hyper: Hyper) -> Tensor:
    assert grads is not None and grads.layer == layer and grads.step == hyper.step, "gradient of another layer or step"
    return as_tensor(grads.data, torch.float32)
