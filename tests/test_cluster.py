"""What cannot start says so, at once."""

from __future__ import annotations

import socket
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatrain_ray import cluster as module
from megatrain_ray.cluster import Cluster, TierSpec
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
        cluster.start(tmp_path / "run", {Tier.STORE: TierSpec(build, 1)}, tmp_path / "logs")
    assert str(caught.value).strip().splitlines()[-1] == cause and "\x1b" not in str(caught.value)
    assert time.monotonic() - started_s < 60


def test_a_gpu_that_ray_does_not_have_or_somebody_holds(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    started_s = time.monotonic()
    with pytest.raises(PlanError, match=r"requires 2 GPU; Ray has 1, and 1 available: .*tiers.device: cpu"):
        cluster.start(tmp_path / "two", {Tier.WORKER: TierSpec(broken, 1, num_gpus=2.0)}, tmp_path / "logs")
    assert time.monotonic() - started_s < 10  # nothing to wait for

    monkeypatch.setattr(module, "GPU_PATIENCE_S", 2.0)
    held = ray.remote(num_gpus=1)(type("Holder", (), {"ready": lambda self: None})).remote()
    ray.get(held.ready.remote())
    with pytest.raises(PlanError, match=r"requires 1 GPU; Ray has 1, and 0 available"):
        cluster.start(tmp_path / "held", {Tier.WORKER: TierSpec(broken, 1, num_gpus=1.0)}, tmp_path / "logs")
    ray.kill(held)
    monkeypatch.setattr(module, "GPU_PATIENCE_S", 60.0)
    with pytest.raises(ActorLostError, match="gpu_worker cannot start"):  # it got the GPU, and no further
        cluster.start(tmp_path / "given back", {Tier.WORKER: TierSpec(broken, 1, num_gpus=1.0)}, tmp_path / "logs")


def test_runs_in_directories_of_one_name_share_a_ray(cluster: Cluster, tmp_path: Path) -> None:
    import ray

    other = Cluster(address=None, object_store_bytes=1, dashboard=False)
    runs = [tmp_path / "mine" / "first", tmp_path / "yours" / "first"]
    try:
        for each, run in zip((cluster, other), runs, strict=True):
            run.mkdir(parents=True)
            each.start(run, {Tier.STORE: TierSpec(dict, 1)}, run / "logs")
        listed = ray.util.list_named_actors(all_namespaces=True)
    finally:
        other.shutdown()
    for run in runs:
        assert {"namespace": str(run), "name": "first/nvme_store"} in listed


@pytest.mark.parametrize(
    ("published", "listens", "warned"),
    [
        ("127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "0.0.0.0", True),  # what Ray publishes is the node's address, whatever the dashboard listens on
        ("[::1]", "::1", False),
        ("[::1]", "::", True),
        ("192.0.2.7", None, True),
        ("https://ray.example", None, True),
    ],
)
def test_a_ray_whose_dashboard_others_can_reach_is_warned_of(
    published: str, listens: str | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard = socket.socket(socket.AF_INET6 if listens and ":" in listens else socket.AF_INET)
    dashboard.bind((listens or "127.0.0.1", 0))
    dashboard.listen()
    url = f"{published}:{dashboard.getsockname()[1]}"
    monkeypatch.setattr(module.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(module.ray, "init", lambda **_: Mock(dashboard_url=url))
    notes: list[tuple[str, str]] = []
    with dashboard:
        Cluster(
            address="auto",
            object_store_bytes=1,
            dashboard=False,
            on_note=lambda source, note: notes.append((source, note)),
        )
    assert [source for source, _ in notes] == ["ray"] * warned
    assert all(url in note and "runs code as you" in note and "--dashboard-host" in note for _, note in notes)
