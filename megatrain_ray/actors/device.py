"""How a layer reaches the device and its gradient leaves it: one interface, a CPU and a CUDA implementation.

On the CPU nothing moves: weights are read where the object store holds them, gradients are handed over where they were
summed. On CUDA three streams work side by side, and each buffer that is used again is guarded by events::

    h2d_stream       pinned block -> device slot        waits for compute_done, records params_ready
    compute stream   forward, backward                  waits for params_ready, records compute_done and grads_ready
    d2h_stream       device gradient -> pinned buffer   waits for grads_ready, records grads_done

Saved layer inputs that wait for backward in host memory travel on the same two side streams.

A thread copies weights from the object store through a few pinned blocks: the thread that launches kernels never waits
for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain_ray.layout import LayerSpec
from megatrain_ray.packed import PackedLayer
from megatrain_ray.tensors import as_tensor

__all__ = ["PINNED_BLOCKS", "PINNED_BLOCK_BYTES", "CpuDevice", "CudaDevice", "Device", "open_device"]

PINNED_BLOCKS, PINNED_BLOCK_BYTES = 4, 32 << 20
"""Through which weights travel to the device: one is filled while others are on the link."""


class Device(Protocol):
    """What `GpuWorker` needs of a device. ``Any`` tickets belong to the implementation."""

    name: torch.device

    def load(self, params: PackedLayer) -> Any:
        """Starts to bring compute weights onto the device; returns a ticket."""

    def weights(self, ticket: Any) -> Tensor:
        """The flat weights [numel] in the compute dtype; kernels launched from now on find them there."""

    def release(self, ticket: Any) -> None:
        """Kernels launched so far are the last to use the weights."""

    def gradient(self, spec: LayerSpec) -> Tensor:
        """A flat fp32 buffer for a layer's gradient; its padding is zero, its other contents are undefined."""

    def offload(self, gradient: Tensor, spec: LayerSpec) -> Any:
        """Starts to bring a gradient to the host; returns a ticket. The buffer belongs to the device again."""

    def collect(self, ticket: Any) -> NDArray[np.uint8]:
        """Waits for an offload. The bytes are valid until the next call of any method here."""

    def stash(self, hidden: Tensor) -> Any:
        """Takes a saved layer input to where it waits for backward; returns a ticket."""

    def fetch(self, ticket: Any) -> None:
        """Starts to bring a stashed input back."""

    def unstash(self, ticket: Any) -> Tensor:
        """The stashed input; kernels launched from now on find it there. The ticket is used up."""

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """A small array, which may be read-only, on the device."""

    def settle(self) -> None:
        """Waits until nothing is under way: an interrupted step's tickets may be dropped after that."""

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """Counts the enclosed work as the device's."""

    def take_busy_s(self) -> float:
        """Seconds that the device has worked since the last call."""

    def peak_bytes(self) -> int:
        """Most device memory allocated so far; 0 where it is the process's own memory."""


_Extents = tuple[tuple[int, int], ...]


def open_device(name: str, *, num_slots: int = 2, offload_inputs: bool = False) -> Device:
    """The device of this name: ``cpu``, ``cuda`` or ``cuda:N``.

    Args:
        name: Of the device.
        num_slots: Device buffers for the weights of layers of one size.
        offload_inputs: Saved layer inputs wait for backward in host memory.
    """
    return CpuDevice() if name == "cpu" else CudaDevice(name, num_slots=num_slots, offload_inputs=offload_inputs)


TRIM_EVERY = 16
"""Layers after which the C library gives freed memory back to the system.

Ray's small allocations live on between a layer's large ones, and the holes that this leaves add up over layers. Taking
the pages again costs some 2% of a step; trimming more often costs more.
"""

_C_LIBRARY = ctypes.CDLL(None)


class CpuDevice:
    """Host memory as the device."""

    def __init__(self) -> None:
        self.name = torch.device("cpu")
        self._free: dict[_Extents, list[Tensor]] = defaultdict(list)
        self._busy_s = 0.0
        self._released = 0

    def load(self, params: PackedLayer) -> Tensor:
        return as_tensor(params.data, getattr(torch, params.dtype))

    def weights(self, ticket: Tensor) -> Tensor:
        return ticket

    def release(self, ticket: Tensor) -> None:
        """The caller drops its reference, and with it the object store's buffer is free."""
        self._released += 1
        if self._released % TRIM_EVERY == 0:
            _C_LIBRARY.malloc_trim(0)

    def gradient(self, spec: LayerSpec) -> Tensor:
        free = self._free[spec.extents]
        return free.pop() if free else torch.zeros(spec.numel)

    def offload(self, gradient: Tensor, spec: LayerSpec) -> tuple[Tensor, _Extents]:
        return gradient, spec.extents

    def collect(self, ticket: tuple[Tensor, _Extents]) -> NDArray[np.uint8]:
        gradient, extents = ticket
        self._free[extents].append(gradient)
        return gradient.view(torch.uint8).numpy()

    def stash(self, hidden: Tensor) -> Tensor:
        # In pages of its own: it lives from forward to backward, and in the heap would be in the way of what is freed.
        memory = mmap.mmap(-1, hidden.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=hidden.dtype).view(hidden.shape).copy_(hidden)

    def fetch(self, ticket: Tensor) -> None:
        """It is there."""

    def unstash(self, ticket: Tensor) -> Tensor:
        return ticket

    def tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy())  # what Ray hands out is read-only

    def settle(self) -> None:
        """Every call here ends with its work done."""

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._busy_s += time.perf_counter() - started_s

    def take_busy_s(self) -> float:
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def peak_bytes(self) -> int:
        return 0


class _PinnedBuffer:
    """Host memory that the device reads and writes directly; exactly as large as asked, in whole pages.

    torch's own pinned allocator rounds up to powers of two: up to twice the planned memory.
    """

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, max(nbytes, 1))
        self.p_host = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
        self.pinned = int(torch.cuda.cudart().cudaHostRegister(self.p_host.data_ptr(), len(memory), 0)) == 0
        if not self.pinned:
            warnings.warn(
                f"cannot pin {nbytes} bytes of host memory: copies to the device will be slower", stacklevel=2
            )
        self.copied = torch.cuda.Event()

    def __del__(self) -> None:
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.p_host.data_ptr())


class _Slot:
    """A device buffer for one layer's weights.

    params_ready: recorded by the h2d stream, awaited by the compute stream before a layer's first kernel.
    compute_done: recorded by the compute stream after its last, awaited by the h2d stream before the next copy.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.p_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.params_ready = torch.cuda.Event()
        self.compute_done = torch.cuda.Event()


class _Load:
    """A slot on its way, and the copy that fills it."""

    def __init__(self, slot: _Slot, copy: Future[None], dtype: torch.dtype, nbytes: int) -> None:
        self.slot = slot
        self.copy = copy
        self.dtype = dtype
        self.nbytes = nbytes


class _Offload:
    """A gradient on its way to the host."""

    def __init__(self, gradient: Tensor, spec: LayerSpec, staging: _PinnedBuffer) -> None:
        self.gradient = gradient
        self.extents = spec.extents
        self.again = spec.is_decoder  # the others are needed once a step, one after the other: their memory is shared
        self.staging = staging
        self.grads_done = torch.cuda.Event()


class _Stash:
    """A saved layer input: on the device, or in pinned memory (``staging``) until it is fetched."""

    def __init__(self, hidden: Tensor, staging: _PinnedBuffer | None) -> None:
        self.shape, self.dtype, self.nbytes = hidden.shape, hidden.dtype, hidden.nbytes
        self.hidden = hidden if staging is None else None
        self.staging = staging
        self.fetched = torch.cuda.Event()


class CudaDevice:
    """An NVIDIA GPU."""

    def __init__(self, name: str, *, num_slots: int, offload_inputs: bool = False) -> None:
        self.name = torch.device(name)
        self.num_slots = num_slots
        self.offload_inputs = offload_inputs
        torch.cuda.set_device(self.name)
        self._h2d_stream = torch.cuda.Stream()
        self._d2h_stream = torch.cuda.Stream()
        self._copier = ThreadPoolExecutor(1, "weights-to-pinned")
        self._pinned_blocks = itertools.cycle([_PinnedBuffer(PINNED_BLOCK_BYTES) for _ in range(PINNED_BLOCKS)])
        self._slots: dict[int, deque[_Slot]] = defaultdict(deque)  # by size; the one released first comes first
        self._num_made: Counter[int] = Counter()
        self._gradients: dict[_Extents, list[tuple[Tensor, torch.cuda.Event]]] = defaultdict(list)
        self._staging: list[_PinnedBuffer] = []
        self._intervals: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def load(self, params: PackedLayer) -> _Load:
        nbytes = params.data.nbytes
        slot = self._take_slot(nbytes)
        copy = self._copier.submit(self._copy_to_slot, params, slot)
        return _Load(slot, copy, getattr(torch, params.dtype), nbytes)

    def _take_slot(self, nbytes: int) -> _Slot:
        """A slot whose layer has been computed; a new one while there may be more; else the one that waits longest."""
        free = self._slots[nbytes]
        if free and (free[0].compute_done.query() or self._num_made[nbytes] >= self.num_slots):
            return free.popleft()
        self._num_made[nbytes] += 1
        return _Slot(nbytes, self.name)

    def _copy_to_slot(self, params: PackedLayer, slot: _Slot) -> None:
        p_host = as_tensor(params.data, torch.uint8)
        with torch.cuda.stream(self._h2d_stream):
            self._h2d_stream.wait_event(slot.compute_done)
            for start in range(0, len(p_host), PINNED_BLOCK_BYTES):
                block, piece = next(self._pinned_blocks), p_host[start : start + PINNED_BLOCK_BYTES]
                block.copied.synchronize()  # the device has what it brought last
                block.p_host[: len(piece)].copy_(piece)
                slot.p_device[start : start + len(piece)].copy_(block.p_host[: len(piece)], non_blocking=True)
                block.copied.record()
            slot.params_ready.record()

    def weights(self, ticket: _Load) -> Tensor:
        ticket.copy.result()
        torch.cuda.current_stream().wait_event(ticket.slot.params_ready)
        return ticket.slot.p_device.view(ticket.dtype)

    def release(self, ticket: _Load) -> None:
        ticket.slot.compute_done.record()
        self._slots[ticket.nbytes].append(ticket.slot)

    def gradient(self, spec: LayerSpec) -> Tensor:
        if not self._gradients[spec.extents]:
            return torch.zeros(spec.numel, device=self.name)
        gradient, grads_done = self._gradients[spec.extents].pop()
        torch.cuda.current_stream().wait_event(grads_done)
        return gradient

    def offload(self, gradient: Tensor, spec: LayerSpec) -> _Offload:
        offload = _Offload(gradient, spec, self._take_staging(gradient.nbytes))
        grads_ready = torch.cuda.Event()
        grads_ready.record()
        with torch.cuda.stream(self._d2h_stream):
            self._d2h_stream.wait_event(grads_ready)
            offload.staging.copied.synchronize()
            offload.staging.p_host[: gradient.nbytes].copy_(gradient.view(torch.uint8), non_blocking=True)
            offload.grads_done.record()
        return offload

    def collect(self, ticket: _Offload) -> NDArray[np.uint8]:
        ticket.grads_done.synchronize()
        if ticket.again:
            self._gradients[ticket.extents].append((ticket.gradient, ticket.grads_done))
        self._staging.append(ticket.staging)
        return ticket.staging.p_host[: ticket.gradient.nbytes].numpy()

    def stash(self, hidden: Tensor) -> _Stash:
        if not self.offload_inputs:
            return _Stash(hidden, None)
        stash = _Stash(hidden, self._take_staging(hidden.nbytes))
        ready = torch.cuda.Event()
        ready.record()
        assert stash.staging is not None
        with torch.cuda.stream(self._d2h_stream):
            self._d2h_stream.wait_event(ready)
            self._d2h_stream.wait_event(stash.staging.copied)  # what this buffer held last has left it
            flat = hidden.contiguous().view(-1).view(torch.uint8)
            stash.staging.p_host[: stash.nbytes].copy_(flat, non_blocking=True)
            stash.staging.copied.record()
            hidden.record_stream(self._d2h_stream)
        return stash

    def fetch(self, ticket: _Stash) -> None:
        if ticket.hidden is not None or ticket.staging is None:
            return
        with torch.cuda.stream(self._h2d_stream):
            self._h2d_stream.wait_event(ticket.staging.copied)
            hidden = torch.empty(ticket.shape, dtype=ticket.dtype, device=self.name)
            hidden.view(-1).view(torch.uint8).copy_(ticket.staging.p_host[: ticket.nbytes], non_blocking=True)
            ticket.fetched.record()
            ticket.staging.copied.record()
        ticket.hidden = hidden

    def unstash(self, ticket: _Stash) -> Tensor:
        self.fetch(ticket)
        hidden = ticket.hidden
        assert hidden is not None
        ticket.hidden = None
        if ticket.staging is not None:
            torch.cuda.current_stream().wait_event(ticket.fetched)
            hidden.record_stream(torch.cuda.current_stream())
            self._staging.append(ticket.staging)
            ticket.staging = None
        return hidden

    def _take_staging(self, nbytes: int) -> _PinnedBuffer:
        """The smallest free buffer that is large enough, unless it is much too large."""
        fits = [free for free in self._staging if nbytes <= len(free.p_host) <= 2 * nbytes]
        if not fits:
            return _PinnedBuffer(nbytes)
        staging = min(fits, key=lambda free: len(free.p_host))
        self._staging.remove(staging)
        return staging

    def tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.name, non_blocking=True)

    def settle(self) -> None:
        self._copier.submit(lambda: None).result()
        torch.cuda.synchronize(self.name)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._intervals.append((start, end))

    def take_busy_s(self) -> float:
        done = [interval for interval in self._intervals if interval[1].query()]
        self._intervals = [interval for interval in self._intervals if interval not in done]
        return sum(float(start.elapsed_time(end)) for start, end in done) / 1e3

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.name))
