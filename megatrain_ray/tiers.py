"""Builds the tiers inside their processes, each with only the libraries that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain_ray.config import Config
from megatrain_ray.schedule import Tier
from megatrain_ray.start import StartPoint

if TYPE_CHECKING:
    from megatrain_ray.prepare import Prepared

__all__ = ["tier_builders"]


def tier_builders(
    config: Config, prepared: Prepared, *, output_dir: Path, store_dir: Path, arena_path: str
) -> dict[Tier, Callable[[], Any]]:
    """By tier: a function without arguments that makes it, in whatever process calls it."""
    plan, training = prepared.plan, config.training
    constants = {name: value.cpu().numpy() for name, value in prepared.model.constants.items()}
    return {
        Tier.STORE: partial(
            _store,
            store_dir,
            prepared.layers,
            output_dir=output_dir,
            pool_bytes=plan.read_buffer_bytes,
            keep=training.save_total_limit,
            # Updates as gradients arrive: a replayed step starts from the state before its first attempt.
            generations=1 if plan.shape.deferred else 2,
            direct_io=config.tiers.direct_io,
        ),
        Tier.OPTIMIZER: partial(
            _optimizer,
            prepared.layers,
            (training.adam_beta1, training.adam_beta2),
            training.adam_epsilon,
            training.weight_decay,
            compute_dtype=prepared.compute_dtype,
            resident=plan.shape.resident,
            arena_path=arena_path,
            num_threads=plan.optimizer_threads,
        ),
        Tier.WORKER: partial(
            _worker,
            prepared.start,
            prepared.compute_dtype,
            prepared.device,
            constants,
            plan.worker_threads,
            plan.slots + plan.shape.keep_graph,
            plan.offload_inputs,
            seed=training.seed,
            keep_graph=plan.shape.keep_graph,
            loss_chunk_tokens=plan.loss_chunk_tokens,
            label_smoothing=training.label_smoothing_factor,
            needs_packed_masks=prepared.packed_masks,
            eager_updates=not plan.shape.deferred,
        ),
    }


def _store(*args: Any, **kwargs: Any) -> Any:
    from megatrain_ray.actors.nvme_store import NvmeStore

    return NvmeStore(*args, **kwargs)


def _optimizer(layers: Any, betas: tuple[float, float], eps: float, weight_decay: float, **kwargs: Any) -> Any:
    from megatrain_ray.actors.cpu_optimizer import AdamWConfig, CpuOptimizer

    return CpuOptimizer(layers, AdamWConfig(betas, eps, weight_decay), **kwargs)


def _worker(
    start: StartPoint,
    compute_dtype: str,
    device_name: str,
    constants: Mapping[str, Any],
    num_threads: int,
    num_slots: int,
    offload_inputs: bool,
    **kwargs: Any,
) -> Any:
    # Buffers of many sizes come and go: segments that grow leave no holes between them.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    from megatrain_ray.actors.device import open_device
    from megatrain_ray.actors.gpu_worker import GpuWorker

    torch.set_num_threads(num_threads)
    device = open_device(device_name, num_slots=num_slots, offload_inputs=offload_inputs)
    model = start.recipe.build(compute_dtype, str(device.name))
    model.load_constants({name: torch.from_numpy(value.copy()) for name, value in constants.items()})
    return GpuWorker(model, device, open_source=start.open, **kwargs)
