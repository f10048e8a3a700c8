"""Checkpoints: Hugging Face model directories with fp32 weights, plus optimizer state and a JSON state. No pickle.

A checkpoint is written one layer at a time into ``.checkpoint-N.partial`` and becomes ``checkpoint-N`` by a rename,
after every file and the directory were flushed; its manifest lists each file with size and checksum. What is not
complete is reported and never chosen.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatrain_ray.errors import ModelError, RunDirectoryError, StoreError
from megatrain_ray.layout import LayerSpec
from megatrain_ray.packed import PackedLayer
from megatrain_ray.safetensors_file import build_header, sync_directory, write_atomically
from megatrain_ray.sources import INDEX, optimizer_file

__all__ = [
    "MANIFEST",
    "STATE_FILE",
    "CheckpointWriter",
    "export",
    "list_checkpoints",
    "newest_complete",
    "problems",
    "read_state",
    "saved_names",
]

MANIFEST = "manifest.json"
STATE_FILE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """Writes checkpoints of one run. Pickles: it travels to the store's process.

    Attributes:
        output_dir: Of the run.
        num_layers: Of the stream.
        names: By parameter: its name in a saved model, when that is all that changes; else empty.
        build: Makes the model on meta, for transformers' own conversion back; used when ``names`` is empty.
        side_files: Text files by name: config.json, generation_config.json and so on.
        copied_files: Tokenizer files to copy.
        keep: Checkpoints to keep; None: all.
        model_dtype: Of the model's configuration: what `export` writes unless told otherwise.
    """

    output_dir: Path
    num_layers: int
    names: Mapping[str, str]
    build: Callable[[], Any]
    side_files: Mapping[str, str]
    copied_files: tuple[Path, ...]
    keep: int | None
    model_dtype: str

    def partial(self, number: int) -> Path:
        return self.output_dir / f".checkpoint-{number}.partial"

    def write_layer(self, number: int, spec: LayerSpec, packed: PackedLayer) -> int:
        """Writes one layer's masters and moments; returns the bytes written. Writing a layer twice is harmless."""
        directory = self.partial(number)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = self._weights(spec, packed)
        written = _write_file(directory, model_file(spec.index, self.num_layers), tensors, packed.step)
        moments = {
            f"{section}.{tensor.name}": _part(packed, section, tensor.offset, tensor.end, tensor.shape)
            for section in packed.sections[1:]
            for tensor in spec.tensors
        }
        return written + _write_file(directory, optimizer_file(spec.index, self.num_layers), moments, packed.step)

    def finish(self, number: int, trainer_state: dict[str, Any]) -> Path:
        """Completes a checkpoint whose layers are all written, and drops those beyond ``keep``."""
        directory, final = self.partial(number), self.output_dir / f"checkpoint-{number}"
        if final.exists() and not directory.exists():
            return final  # repeated after the process died behind the rename
        for name, text in self.side_files.items():
            write_atomically(directory / name, text, durable=True)
        for path in self.copied_files:
            shutil.copyfile(path, directory / path.name)
            _flush(directory / path.name)
        files: dict[str, dict[str, Any]] = {}
        weight_map: dict[str, str] = {}
        for sidecar in sorted(directory.glob(".*.json")):
            described = json.loads(sidecar.read_text(encoding="utf-8"))
            files[described["file"]] = {"bytes": described["bytes"], "xxh3_64": described["xxh3_64"]}
            if described["file"].startswith("model-"):
                weight_map.update(dict.fromkeys(described["tensors"], described["file"]))
        total = sum(files[file]["bytes"] for file in set(weight_map.values()))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_atomically(directory / INDEX, json.dumps(index, indent=2), durable=True)
        state = {**trainer_state, "model_dtype": self.model_dtype}
        write_atomically(directory / STATE_FILE, json.dumps(state, indent=2), durable=True)
        for path in sorted(directory.iterdir()):
            if path.name.startswith("."):
                path.unlink()
            elif path.name not in files:
                files[path.name] = {"bytes": path.stat().st_size, "xxh3_64": _checksum(path)}
        write_atomically(directory / MANIFEST, json.dumps({"files": files}, indent=2), durable=True)
        _remove(final)
        directory.rename(final)
        sync_directory(self.output_dir)
        if self.keep is not None:
            for old in list_checkpoints(self.output_dir)[: -self.keep]:
                _remove(old)
        return final

    def _weights(self, spec: LayerSpec, packed: PackedLayer) -> dict[str, np.ndarray[Any, Any]]:
        masters = {
            tensor.name: _part(packed, "master", tensor.offset, tensor.end, tensor.shape) for tensor in spec.tensors
        }
        if self.names:
            return {self.names[name]: master for name, master in masters.items()}
        import torch
        from transformers.core_model_loading import revert_weight_conversion

        from megatrain_ray.sources import quiet

        state = {name: torch.from_numpy(master.copy()) for name, master in masters.items()}
        with quiet():
            reverted = revert_weight_conversion(self.build(), state)
        return {name: tensor.contiguous().numpy() for name, tensor in reverted.items()}


def saved_names(model: Any, layers: tuple[LayerSpec, ...]) -> dict[str, str]:
    """By parameter, its name in a saved model; empty when saving changes more than names (fused experts)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings

    mapping = [
        entry for entry in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(entry, PrefixChange)
    ]
    names = [tensor.name for spec in layers for tensor in spec.tensors]
    if not mapping:
        return {name: name for name in names}
    reverse = [entry.reverse_transform() for entry in mapping[::-1]]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    if len(renamings) < len(reverse):
        return {}
    return {name: apply_renamings(name, renamings) for name in names}


def model_file(index: int, num_layers: int) -> str:
    """Name of the file with a layer's weights in a checkpoint."""
    return f"model-{index + 1:05d}-of-{num_layers:05d}.safetensors"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoint directories in the order of their numbers; other folders are left alone."""
    found = []
    for path in output_dir.iterdir() if output_dir.is_dir() else ():
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def problems(checkpoint: Path, *, deep: bool = False) -> list[str]:
    """What is wrong with a checkpoint: nothing when it is complete.

    Args:
        checkpoint: The directory.
        deep: Read every file and compare checksums, not sizes alone.
    """
    try:
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{checkpoint / MANIFEST}: missing or unreadable ({error})"]
    found = []
    for name, described in files.items():
        path = checkpoint / name
        size = path.stat().st_size if path.exists() else None
        if size != described["bytes"]:
            got = "nothing" if size is None else f"{size} bytes"
            found.append(f"{path}: expected {described['bytes']} bytes, found {got}")
        elif deep and _checksum(path) != described["xxh3_64"]:
            found.append(f"{path}: the checksum differs: the file is damaged")
    return found


def newest_complete(output_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with newer ones and unfinished ones."""
    notes = [f"{path}: an unfinished checkpoint, ignored" for path in sorted(output_dir.glob(".checkpoint-*.partial"))]
    for path in reversed(list_checkpoints(output_dir)):
        found = problems(path, deep=True)
        if not found:
            return path, notes
        notes += [f"{problem}; {path.name} is not used" for problem in found]
    return None, notes


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint.

    Raises:
        RunDirectoryError: It is not readable.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        return state
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{checkpoint / STATE_FILE}: cannot be read: {error}") from error


def export(checkpoint: Path, out: Path, dtype: str | None = None) -> Path:
    """Writes a checkpoint's model as a Hugging Face directory, one file at a time.

    Args:
        checkpoint: A complete checkpoint.
        out: New or empty directory, or one that an earlier export made (replaced as a whole).
        dtype: ``float32``, ``bfloat16`` or ``float16``; None: the dtype of the model's configuration.

    Raises:
        ModelError: ``checkpoint`` is not complete.
        RunDirectoryError: ``out`` holds other files.
    """
    import torch
    from safetensors.torch import load_file, save_file

    found = problems(checkpoint)
    if found:
        raise ModelError(f"{checkpoint} cannot be exported: {found[0]}")
    state = read_state(checkpoint)
    dtype = dtype or state["model_dtype"]
    marker = ".megatrain_export"
    if out.exists() and any(out.iterdir()) and not (out / marker).exists():
        raise RunDirectoryError(f"{out} is not empty and no earlier export: name a new directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    shards = sorted(checkpoint.glob("model-*.safetensors"))
    weight_map: dict[str, str] = {}
    total = 0
    for path in shards:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(path).items()}
        if not tensors:
            continue
        save_file(tensors, partial / path.name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, path.name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(partial / INDEX, json.dumps(index, indent=2))
    ours = {MANIFEST, STATE_FILE, INDEX}
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors" and path.name not in ours:
            shutil.copyfile(path, partial / path.name)
    config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = dtype
    write_atomically(partial / "config.json", json.dumps(config, indent=2))
    (partial / marker).write_text(f"{checkpoint.name}\n", encoding="utf-8")
    _remove(out)
    partial.rename(out)
    return out


def _part(packed: PackedLayer, section: str, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return packed.section(section).view(np.float32)[start:stop].reshape(shape)


def _write_file(directory: Path, name: str, tensors: Mapping[str, np.ndarray[Any, Any]], step: int) -> int:
    """Writes and flushes one safetensors file, and beside it what the manifest will say of it."""
    header = build_header(
        [(tensor_name, "F32", tensor.shape) for tensor_name, tensor in tensors.items()],
        {"format": "pt", "step": str(step)},
    )
    checksum = xxhash.xxh3_64(header)
    size = len(header)
    path = directory / name
    try:
        with path.open("wb", buffering=0) as file:
            _write_all(file, memoryview(header))
            for tensor in tensors.values():
                data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
                _write_all(file, data)
                checksum.update(data)
                size += len(data)
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"{path}: cannot write the checkpoint: {error.strerror}; {shutil.disk_usage(directory).free} bytes are "
            "free. Earlier checkpoints are untouched: free some space and resume",
            context={"path": str(path)},
        ) from error
    described = {"file": name, "bytes": size, "xxh3_64": checksum.hexdigest(), "tensors": list(tensors)}
    write_atomically(directory / f".{name}.json", json.dumps(described))
    return size


def _write_all(file: Any, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += file.write(view[done:])


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove(directory: Path) -> None:
    """Removes a directory so that no half-removed one is ever taken for whole: it loses its name first."""
    if directory.exists():
        doomed = directory.with_name(f".{directory.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        directory.rename(doomed)
        shutil.rmtree(doomed)
