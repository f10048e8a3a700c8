"""The worker alone: its memory does not grow with depth, and where saved inputs wait changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from megatrain_ray.actors.device import CpuDevice, Device, open_device
from megatrain_ray.actors.gpu_worker import GpuWorker
from megatrain_ray.data.batches import StepBatch, make_micro_batch
from megatrain_ray.model import StreamModel
from megatrain_ray.packed import PARAMS, PackedLayer
from megatrain_ray.start import RunSource

PROBE = """
import sys
import numpy as np, torch
from transformers import LlamaConfig
from megatrain_ray.actors.device import CpuDevice
from megatrain_ray.actors.gpu_worker import GpuWorker
from megatrain_ray.data.batches import StepBatch, make_micro_batch
from megatrain_ray.model import StreamModel
from megatrain_ray.packed import PARAMS, PackedLayer

torch.set_num_threads(1)
ROWS, WIDTH = 320, 320

def hwm():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def rss():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

def peak(depth):
    config = LlamaConfig(num_hidden_layers=depth, hidden_size=WIDTH, intermediate_size=1280, num_attention_heads=5,
                         vocab_size=8000, tie_word_embeddings=False)
    model = StreamModel.from_config(config, dtype="float32")
    worker = GpuWorker(model, CpuDevice(), open_source=lambda: None)
    weights = {spec.numel: np.frombuffer(torch.randn(spec.numel).mul(0.02).numpy().tobytes(), np.uint8)
               for spec in model.layers}
    ids = np.arange(ROWS, dtype=np.int64) % 8000
    batch = StepBatch(1, 0.0, (make_micro_batch([(ids, ids)]),), (0,))
    def load(layer):
        data = weights[model.layers[layer].numel]
        worker.load(layer, PackedLayer(layer, 0, "float32", PARAMS, data))

    before = rss()
    open("/proc/self/clear_refs", "w").write("5")
    for step in range(2):
        worker.begin(batch, True)
        for layer in range(depth + 1):
            load(layer)
            worker.forward(layer)
        load(depth + 1)
        worker.head(depth + 1)
        worker.grads(depth + 1)
        for layer in range(depth, -1, -1):
            load(layer)
            worker.backward(layer)
            worker.grads(layer)
    return hwm() - before - depth * ROWS * WIDTH * 4

peak(2)  # libraries and kernels are in memory after that
print(peak(int(sys.argv[1])))
"""
EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # what is freed leaves the process


def test_memory_beyond_saved_inputs_does_not_grow_with_depth() -> None:
    def measure(depth: int) -> int:
        root = Path(__file__).resolve().parent.parent.parent
        done = subprocess.run(
            [sys.executable, "-c", PROBE, str(depth)],
            cwd=root,
            env={**os.environ, **EXACT_MALLOC},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout.split()[-1])

    shallow, deep = measure(6), measure(48)
    assert shallow > 20 << 20  # the probe sees the step
    assert deep <= 1.05 * shallow, (shallow, deep)


class _InputsElsewhere(CpuDevice):
    """Saved inputs leave the device: what comes back is another tensor, and only after it was asked for in time."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[int] = []

    def stash(self, hidden: Tensor) -> Any:
        return [hidden.numpy().copy(), None]

    def fetch(self, ticket: Any) -> None:
        assert ticket[1] is None
        ticket[1] = torch.from_numpy(ticket[0])
        self.fetched.append(id(ticket))

    def unstash(self, ticket: Any) -> Tensor:
        assert isinstance(ticket[1], Tensor), "not fetched when its layer was loaded"
        return ticket[1]


def no_source() -> RunSource:
    raise AssertionError("only an import opens what a run starts from")


def make(device: Device) -> tuple[GpuWorker, StepBatch, Callable[[int], None]]:
    """A worker, a step of three micro-batches, and what loads a layer."""
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        vocab_size=101,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = StreamModel.from_config(config, dtype="float32", device=str(device.name))
    worker = GpuWorker(model, device, open_source=no_source)
    weights = [torch.randn(spec.numel).mul(0.02).view(torch.uint8).numpy() for spec in model.layers]
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 101, size) for size in (9, 17, 4)]
    batch = StepBatch(1, 0.0, tuple(make_micro_batch([(row, row)]) for row in rows), (0, 1, 2))

    def load(layer: int) -> None:
        worker.load(layer, PackedLayer(layer, 0, "float32", PARAMS, weights[layer]))

    return worker, batch, load


def run_steps(device: Device, *, steps: int, interrupt: bool = False) -> list[bytes]:
    """Gradients of all layers, in order; the schedule's order, one layer ahead."""
    worker, batch, load = make(device)
    head = len(worker.model.layers) - 1
    gradients = []
    for step in range(steps):
        worker.begin(batch, True)
        load(0)
        for layer in range(head):
            load(layer + 1)
            worker.forward(layer)
        worker.head(head)
        load(head - 1)
        for layer in range(head - 1, -1, -1):
            if layer:
                load(layer - 1)
            if interrupt and step == 0 and layer == 2:
                break  # somebody died: the step is begun anew
            worker.backward(layer)
            gradients.append(worker.grads(layer)[0].data.tobytes())
        else:
            gradients.append(worker.grads(head)[0].data.tobytes())
    return gradients


def test_inputs_that_wait_elsewhere_change_nothing() -> None:
    device = _InputsElsewhere()
    assert run_steps(device, steps=2) == run_steps(CpuDevice(), steps=2)
    assert len(device.fetched) == 2 * 4 * 3  # steps, layers, micro-batches


def test_an_interrupted_step_leaves_nothing_behind() -> None:
    clean = run_steps(CpuDevice(), steps=1)
    assert run_steps(_InputsElsewhere(), steps=2, interrupt=True)[-len(clean) :] == clean


@pytest.mark.parametrize("failed", [3, 5])
def test_a_layer_whose_weights_did_not_come_ends_the_step(failed: int) -> None:
    """A gradient computed without it would look like any other, and an update in place cannot be taken back."""
    worker, batch, load = make(CpuDevice())
    worker.begin(batch, True)
    for layer in range(6):
        if layer != failed:
            load(layer)
    calls = [*((worker.forward, layer) for layer in range(5)), (worker.head, 5)]
    calls += [(worker.backward, layer) for layer in range(4, -1, -1)]
    for position, (call, layer) in enumerate(calls):
        if call == worker.backward:
            load(layer)
        if position < failed:
            call(layer)
        else:
            with pytest.raises(IndexError if position == failed else AssertionError):
                call(layer)


@pytest.mark.gpu
@pytest.mark.parametrize("interrupt", [False, True])
def test_inputs_in_pinned_memory_change_nothing(interrupt: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    on_device = run_steps(open_device("cuda:0"), steps=3, interrupt=interrupt)
    in_host = run_steps(open_device("cuda:0", offload_inputs=True), steps=3, interrupt=interrupt)
    assert on_device == in_host
