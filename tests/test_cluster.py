"""What cannot start says so, at once."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray import cluster as module
from megatrain_ray.cluster import NAMESPACE, Cluster, TierSpec
from megatrain_ray.errors import ActorLostError, PlanError
from megatrain_ray.schedule import Tier

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_instance")]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(address=None, object_store_bytes=1, dashboard=False)
    yield cluster
    cluster.shutdown()


def absent_from_the_actor() -> Any:
    """A function of a module that only this process has."""
    ghost: Any = types.ModuleType("ghost")
    exec("def build():\n    return 3\n", ghost.__dict__)
    sys.modules["ghost"] = ghost
    return ghost.build


def broken() -> Any:
    raise ZeroDivisionError("the drive is round")


@pytest.mark.parametrize(
    ("build", "cause"),
    [
        pytest.param(absent_from_the_actor(), "ModuleNotFoundError: No module named 'ghost'", id="import"),
        pytest.param(broken, "ZeroDivisionError: the drive is round", id="constructor"),
    ],
)
def test_an_actor_that_cannot_start_names_the_cause(cluster: Cluster, build: Any, cause: str, tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(ActorLostError, match="nvme_store cannot start") as caught:
        cluster.start(f"cannot-{cause.split()[0]}", {Tier.STORE: TierSpec(build, 1)}, tmp_path / "logs")
    assert str(caught.value).strip().splitlines()[-1] == cause and "\x1b" not in str(caught.value)
    assert time.monotonic() - started_s < 60


def test_a_gpu_that_ray_does_not_have_or_somebody_holds(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    started_s = time.monotonic()
    with pytest.raises(PlanError, match=r"requires 2 GPU; Ray has 1, and 1 available: .*tiers.device: cpu"):
        cluster.start("two", {Tier.WORKER: TierSpec(broken, 1, num_gpus=2.0)}, tmp_path / "logs")
    assert time.monotonic() - started_s < 10  # nothing to wait for

    monkeypatch.setattr(module, "GPU_PATIENCE_S", 2.0)
    holder = ray.remote(num_gpus=1)(type("Holder", (), {"ready": lambda self: None})).options(namespace=NAMESPACE)
    held = holder.remote()
    ray.get(held.ready.remote())
    with pytest.raises(PlanError, match=r"requires 1 GPU; Ray has 1, and 0 available"):
        cluster.start("held", {Tier.WORKER: TierSpec(broken, 1, num_gpus=1.0)}, tmp_path / "logs")
    ray.kill(held)
    monkeypatch.setattr(module, "GPU_PATIENCE_S", 60.0)
    with pytest.raises(ActorLostError, match="gpu_worker cannot start"):  # it got the GPU, and no further
        cluster.start("given back", {Tier.WORKER: TierSpec(broken, 1, num_gpus=1.0)}, tmp_path / "logs")
