"""Builds the tiers inside their processes. Everything here is called by name from the actors' constructors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain_ray.config import Config
from megatrain_ray.layout import LayerSpec
from megatrain_ray.recipe import ModelRecipe
from megatrain_ray.schedule import Tier

if TYPE_CHECKING:
    from megatrain_ray.prepare import Prepared

__all__ = ["tier_builders"]


def tier_builders(config: Config, prepared: Prepared, store_dir: Path, arena_path: str) -> dict[Tier, Any]:
    """By tier: a function without arguments that makes it, in whatever process calls it."""
    plan, training = prepared.plan, config.training
    return {
        Tier.STORE: partial(
            _store, store_dir, prepared.layers, prepared.source, prepared.writer, config.tiers.direct_io
        ),
        Tier.OPTIMIZER: partial(
            _optimizer,
            prepared.layers,
            (training.adam_beta1, training.adam_beta2),
            training.adam_epsilon,
            training.weight_decay,
            prepared.recipe.dtype,
            plan.resident,
            arena_path,
            plan.optimizer_threads,
        ),
        Tier.WORKER: partial(
            _worker,
            prepared.recipe,
            prepared.device,
            plan.worker_threads,
            training.seed,
            plan.shape.keep_graph,
            plan.loss_chunk_tokens,
            training.label_smoothing_factor,
        ),
    }


def _store(directory: Path, layers: tuple[LayerSpec, ...], source: Any, writer: Any, direct_io: bool) -> Any:
    from megatrain_ray.actors.nvme_store import NvmeStore

    return NvmeStore(directory, layers, source=source, writer=writer, direct_io=direct_io)


def _optimizer(
    layers: tuple[LayerSpec, ...],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    compute_dtype: str,
    resident: tuple[int, ...],
    arena_path: str,
    num_threads: int,
) -> Any:
    from megatrain_ray.actors.cpu_optimizer import AdamWConfig, CpuOptimizer

    return CpuOptimizer(
        layers,
        AdamWConfig(betas, eps, weight_decay),
        compute_dtype=compute_dtype,
        resident=resident,
        arena_path=arena_path,
        num_threads=num_threads,
    )


def _worker(
    recipe: ModelRecipe,
    device_name: str,
    num_threads: int,
    seed: int,
    keep_graph: int,
    loss_chunk_tokens: int,
    label_smoothing: float,
) -> Any:
    import torch

    from megatrain_ray.actors.device import open_device
    from megatrain_ray.actors.gpu_worker import GpuWorker

    torch.set_num_threads(num_threads)
    device = open_device(device_name)
    return GpuWorker(
        recipe.stream(device.name),
        device,
        seed=seed,
        keep_graph=keep_graph,
        loss_chunk_tokens=loss_chunk_tokens,
        label_smoothing=label_smoothing,
    )
