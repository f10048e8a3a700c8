"""The checkpoints in a run's directory: which there are, which are complete, which may go (no torch, no ray)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(0|[1-9]\d*)")
_DEBRIS = re.compile(r"\.checkpoint-\d+\.(partial|removed)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory ``checkpoint-STEP``.

    Attributes:
        step: From its name.
        path: The directory.
        problem: Why it cannot be used; None when it is complete.
    """

    step: int
    path: Path
    problem: str | None


def checkpoint_path(output_dir: str | Path, step: int) -> Path:
    """Where the checkpoint of a step belongs."""
    return Path(output_dir) / f"checkpoint-{step}"


def list_checkpoints(output_dir: str | Path) -> list[Checkpoint]:
    """All checkpoints of a run, ordered by their number; folders with other names are not looked at."""
    root = Path(output_dir)
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        name = _NAME.fullmatch(path.name)
        if name and path.is_dir():
            found.append(Checkpoint(int(name[1]), path, find_problem(path)))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_complete(
    output_dir: str | Path, *, deep: bool = False, on_problem: Callable[[str], None] = lambda problem: None
) -> Checkpoint | None:
    """The checkpoint to resume from.

    Args:
        output_dir: Of the run.
        deep: Whether to compare checksums too, which reads everything.
        on_problem: Called with what is wrong with each one that cannot be used.
    """
    newest = None
    for checkpoint in reversed(list_checkpoints(output_dir)):
        problem = checkpoint.problem
        if problem is None and newest is None:
            problem = find_problem(checkpoint.path, deep=True) if deep else None
            newest = checkpoint if problem is None else None
        if problem is not None:
            on_problem(f"{problem}; {checkpoint.path.name} is not used")
    return newest


def find_problem(path: Path, *, deep: bool = False) -> str | None:
    """What is wrong with a checkpoint, by its manifest.

    Args:
        path: Of the checkpoint.
        deep: Whether to compare checksums too.
    """
    try:
        manifest: Any = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        records = {name: (int(record["bytes"]), str(record["xxh3_64"])) for name, record in manifest["files"].items()}
    except FileNotFoundError:
        return f"{path}: has no {MANIFEST}: it was never completed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path / MANIFEST}: cannot be read: {error!r}"
    for name, (size, checksum) in records.items():
        file = path / name
        if not file.is_file():
            return f"{file}: is missing"
        if file.stat().st_size != size:
            return f"{file}: has {file.stat().st_size} bytes, expected {size}"
        if deep and _checksum(file) != checksum:
            return f"{file}: its checksum is not that of the manifest: the file is corrupt"
    return None


def prune_checkpoints(output_dir: str | Path, keep: int) -> list[Path]:
    """Removes the oldest complete checkpoints beyond the newest ``keep`` (at least one stays).

    Returns:
        What was removed.
    """
    complete = [checkpoint.path for checkpoint in list_checkpoints(output_dir) if checkpoint.problem is None]
    removed = complete[: -max(keep, 1)]
    for path in removed:
        remove_tree(path)
    return removed


def remove_debris(output_dir: str | Path) -> list[Path]:
    """Removes what an interrupted save or removal left behind; returns what that was."""
    root = Path(output_dir)
    debris = [path for path in root.iterdir() if _DEBRIS.fullmatch(path.name)] if root.is_dir() else []
    for path in debris:
        shutil.rmtree(path, ignore_errors=True)
    return debris


def hide(path: Path) -> Path:
    """Renames a checkpoint, if it exists, so that no reader takes it for one; returns the new name."""
    hidden = path.with_name(f".{path.name}.removed")
    if path.is_dir():
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
    return hidden


def remove_tree(path: Path) -> None:
    """Removes a directory if it exists; a checkpoint is hidden first, so that a kill leaves no half of it behind."""
    shutil.rmtree(hide(path) if _NAME.fullmatch(path.name) else path, ignore_errors=True)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
    return digest.hexdigest()
