"""What a run is and where it runs, as ``about.json``: for people who look at it later.

It holds no secrets: nothing of the environment, no user, no host name.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatrain_ray.layout import ITEMSIZE, LayerSpec
from megatrain_ray.packed import STATE
from megatrain_ray.run_directory import replace_text

if TYPE_CHECKING:
    from megatrain_ray.prepare import Prepared

__all__ = ["ABOUT", "MINIMUM_FORMULA", "minimum_bytes", "write_about"]

ABOUT = "about.json"

MINIMUM_FORMULA = {
    "host_to_device": "weights x (2 x all layers - head - layers that keep their graph): once forward, once backward",
    "device_to_host": "4 B x all parameters: one fp32 gradient, whatever is accumulated",
    "nvme_read": "12 B x parameters of the layers in the store: master and two moments, fp32",
    "nvme_write": "12 B x parameters of the layers in the store",
    "copied": "weights and 4 B of gradient x all parameters, 24 B x parameters in the store: each once between tiers",
}
"""What no schedule can go below when the device holds a few layers at a time; a checkpoint comes on top."""


def minimum_bytes(
    layers: Sequence[LayerSpec], paged: frozenset[int], compute_dtype: str, keep_graph: int = 0
) -> dict[str, int]:
    """Bytes that one optimizer step must move, by `MINIMUM_FORMULA`.

    Args:
        layers: The stream.
        paged: Layers whose masters and moments are in the store.
        compute_dtype: Of the weights on the device.
        keep_graph: The last so many decoder layers are not loaded a second time.
    """
    numels = [spec.numel for spec in layers]
    once = numels[-1] + sum(numels[len(numels) - 1 - keep_graph : -1])
    state = len(STATE) * 4 * sum(numels[index] for index in paged)
    return {
        "host_to_device": ITEMSIZE[compute_dtype] * (2 * sum(numels) - once),
        "device_to_host": 4 * sum(numels),
        "nvme_read": state,
        "nvme_write": state,
        "copied": (ITEMSIZE[compute_dtype] + 4) * sum(numels) + 2 * state,
    }


def write_about(run: Path, prepared: Prepared, *, step: int, total_steps: int) -> None:
    """Writes or extends ``about.json``: each start of the run adds one to ``starts``.

    Args:
        run: The run's directory.
        prepared: What is about to start.
        step: Optimizer steps done.
        total_steps: Of the run.
    """
    config: Any = prepared.model.config
    starts: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        starts = list(json.loads((run / ABOUT).read_text(encoding="utf-8"))["starts"])
    shape = prepared.plan.shape
    facts = {
        "starts": [*starts, {"time_s": time.time(), "step": step, "repeated_steps": max(_traced(run) - step, 0)}],
        "total_steps": total_steps,
        "pid": os.getpid(),
        "pid_started_s": psutil.Process().create_time(),
        "model": {
            "architecture": type(prepared.model.module).__name__,
            "model_type": str(getattr(config, "model_type", "")),
            "parameters": sum(spec.num_parameters for spec in prepared.layers),
            "layers": [{"name": spec.name, "parameters": spec.num_parameters} for spec in prepared.layers],
            "compute_dtype": prepared.compute_dtype,
        },
        "device": _device_name(prepared.device),
        "minimum_bytes": minimum_bytes(prepared.layers, shape.paged, prepared.compute_dtype, shape.keep_graph),
        "machine": _machine(),
    }
    replace_text(run / ABOUT, json.dumps(facts, indent=1))


def _traced(run: Path) -> int:
    """The step of the last trace: how far the run had come, whatever was cut from its metrics since."""
    try:
        return int(json.loads((run / "trace.json").read_text(encoding="utf-8"))["otherData"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _device_name(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})"


def _machine() -> dict[str, Any]:
    processor = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    versions = {"python": platform.python_version()}
    for package in ("megatrain-ray", "torch", "transformers", "ray"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "processor": processor or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }
