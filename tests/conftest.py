"""One Ray a session, tiny models on disk, small token files."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # before any test module imports ray
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_CACHE = tempfile.TemporaryDirectory(prefix="megatrain-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name

MakeConfig = Callable[..., Any]


@pytest.fixture(scope="session")
def ray_instance() -> Iterator[None]:
    """Ray for all tests of the session that ask for it."""
    import ray

    ray.init(
        num_cpus=1,
        num_gpus=1,  # on paper: for tests of who gets it
        object_store_memory=400 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory with a tiny pretrained model of a family; sharded."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            from tests.models import FAMILIES, attn_implementation, awkward_llama, plain_model

            config = awkward_llama() if family == "llama-awkward" else FAMILIES[family]()
            for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
                if hasattr(config, name):
                    setattr(config, name, 0.0)
            model: Any = plain_model(config, attn=attn_implementation(family), seed=7, spread=0.02)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family], max_shard_size="60KB")
        return made[family]

    return make


def write_tokens(
    path: Path, lengths: list[int], vocabulary: int, seed: int = 0, *, partial_labels: bool = True
) -> Path:
    """A tokens file with uneven rows, some of whose labels are no targets."""
    random.seed(seed)
    with path.open("w", encoding="utf-8") as file:
        for index, length in enumerate(lengths):
            ids = [random.randrange(3, vocabulary) for _ in range(length)]
            row: dict[str, Any] = {"input_ids": ids}
            if partial_labels and index % 3 == 0:
                row["labels"] = [-100] * (length // 2) + ids[length // 2 :]
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A configuration of a short run on a model directory; keyword arguments are ``section__key``."""
    from megatrain_ray.config import Config

    lengths = [5, 17, 9, 30, 2, 12, 21, 8, 26, 3, 14, 19, 7, 11]

    def make(model: Path, **changes: Any) -> Any:
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        data = tmp_path / "data.jsonl"
        if not data.exists():
            write_tokens(data, lengths, vocabulary)
        values: dict[str, dict[str, Any]] = {
            "model": {"name_or_path": str(model)},
            "data": {"path": str(data), "max_length": 64},
            "training": {
                "output_dir": str(tmp_path / "run"),
                "max_steps": 8,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 3,
                "learning_rate": 1e-3,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2,
                "weight_decay": 0.1,
                "max_grad_norm": 0.5,
                "save_steps": None,
            },
            # Two layers recompute, the others keep their graph: both ways are exercised.
            "tiers": {"device": "cpu", "deadline_s": 60, "recompute": 2},
            "ray": {"dashboard": False},
        }
        for key, value in changes.items():
            section, _, name = key.partition("__")
            values[section][name] = value
        return Config.from_mapping(values)

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))
