"""The worker alone: its memory does not grow with depth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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

print(peak(int(sys.argv[1])))
"""


def test_memory_beyond_saved_inputs_does_not_grow_with_depth() -> None:
    def measure(depth: int) -> int:
        root = Path(__file__).resolve().parent.parent.parent
        done = subprocess.run(
            [sys.executable, "-c", PROBE, str(depth)], cwd=root, capture_output=True, text=True, check=True
        )
        return int(done.stdout.split()[-1])

    shallow, deep = measure(6), measure(48)
    assert shallow > 20 << 20  # the probe sees the step
    assert deep <= 1.05 * shallow, (shallow, deep)
