"""Writes checkpoints and exports, a layer at a time, durably, all or nothing (no ray; no torch for most models)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.checkpoint.directory import MANIFEST, TRAINER_STATE, checkpoint_path, hide, remove_tree
from megatrain_ray.checkpoint.safetensors_file import (
    BLOCK_BYTES,
    FileRecord,
    SafetensorsWriter,
    sync_directory,
    write_durably,
)
from megatrain_ray.checkpoint.save_spec import SaveSpec
from megatrain_ray.errors import ModelError, RunDirectoryError, StoreError
from megatrain_ray.layout import ITEMSIZE, LayerSpec
from megatrain_ray.packed import STATE, PackedLayer

if TYPE_CHECKING:
    from megatrain_ray.model import StreamModel

DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

EXPORT_SHARD_NUMEL = 2_000_000_000
"""Elements in a file of an export: 4 GB in bfloat16, 8 GB in float32."""


class ModelWriter:
    """Writes a model directory: configuration, tokenizer, weights, index.

    Args:
        directory: Exists and is empty.
        spec: What the model consists of.
        dtype: Of the weights in the files.
        max_shard_numel: See `SaveSpec.plan_shards`; with 0, layers may come in any order, else in stream order.
        model: Where transformers must convert values; made when needed if not given.
    """

    def __init__(
        self,
        directory: Path,
        spec: SaveSpec,
        *,
        dtype: str = "float32",
        max_shard_numel: int = 0,
        model: StreamModel | None = None,
    ) -> None:
        self.directory = directory
        self.files: dict[str, FileRecord] = {}
        self._spec = spec
        self._dtype = dtype
        self._model = model
        self._shards = spec.plan_shards("model", max_numel=max_shard_numel, constants=True)
        self._open: dict[str, SafetensorsWriter] = {}
        for name, content in spec.files.items():
            self.files[name] = write_durably(directory / name, content)
        self._write_json("config.json", {**spec.config, "dtype": dtype})

    def write_layer(self, index: int, flat: NDArray[np.float32]) -> None:
        """Writes one layer's weights.

        Args:
            index: Of the layer in the stream.
            flat: fp32, the layer's flat buffer, padding included; not changed.
        """
        if not self._spec.saved[index].tensors:
            return
        name = next(name for name, layers in self._shards.items() if index in layers)
        if index == self._shards[name][0]:
            tensors = {
                tensor: (DTYPE_NAMES[self._dtype], shape)
                for layer in self._shards[name]
                for tensor, shape in self._spec.saved[layer].tensors.items()
            }
            self._open[name] = SafetensorsWriter(self.directory / name, tensors)
        for values in self._values(index, flat):
            self._open[name].write(cast_blocks(values, self._dtype))
        if index == self._shards[name][-1]:
            self.files[name] = self._open.pop(name).close()

    def finish(self) -> None:
        """Writes constants and index, where there are any or several files, and flushes the directory."""
        weight_map = {
            tensor: name
            for name, layers in self._shards.items()
            for layer in layers
            for tensor in self._spec.saved[layer].tensors
        }
        if constants := self._spec.constants:
            name = next(reversed(self._shards))
            file = SafetensorsWriter(
                self.directory / name, {key: (value.dtype, value.shape) for key, value in constants.items()}
            )
            file.write(np.frombuffer(value.data, np.uint8) for value in constants.values())
            self.files[name] = file.close()
            weight_map |= dict.fromkeys(constants, name)
        missing = [name for name in self._shards if name not in self.files]
        assert not missing, f"{self.directory}: layers of {missing} were never written"
        if len(self._shards) > 1:
            total = sum(saved.numel for saved in self._spec.saved)
            metadata = {"total_parameters": total, "total_size": total * ITEMSIZE[self._dtype]}
            self._write_json("model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
        sync_directory(self.directory)

    def abandon(self) -> None:
        """Closes open files."""
        for file in self._open.values():
            file.abandon()

    def _values(self, index: int, flat: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        saved = self._spec.saved[index]
        if saved.parameters is not None:
            tensors = {tensor.name: tensor for tensor in self._spec.layers[index].tensors}
            for parameter in saved.parameters.values():
                yield flat[tensors[parameter].offset : tensors[parameter].end]
            return
        # Only architectures whose weights are converted need torch and transformers in the writing process.
        from megatrain_ray.checkpoint.conversion import convert_for_saving
        from megatrain_ray.model import StreamModel

        if self._model is None:
            self._model = StreamModel.from_config_dir(
                str(self.directory), trust_remote_code=self._spec.trust_remote_code
            )
        yield from convert_for_saving(self._model, index, flat).values()

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        encoded = (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
        self.files[name] = write_durably(self.directory / name, encoded)


class CheckpointWriter:
    """Writes ``output_dir/checkpoint-STEP``: a model directory with fp32 masters, plus the optimizer's state.

    Until `finish` renames it, everything lies in a hidden directory that no reader looks at.

    Args:
        output_dir: Of the run.
        step: Optimizer steps taken.
        spec: What the model consists of.
        model: See `ModelWriter`.

    Raises:
        StoreError: The directory cannot be written, or is too small for a checkpoint.
    """

    def __init__(self, output_dir: str, step: int, spec: SaveSpec, *, model: StreamModel | None = None) -> None:
        self._final = checkpoint_path(output_dir, step)
        self._partial = self._final.with_name(f".{self._final.name}.partial")
        self._step = step
        self._spec = spec
        self._optimizer_shards = {layers[0]: name for name, layers in spec.plan_shards("optimizer").items()}
        with self._all_or_nothing():
            remove_tree(self._partial)
            self._partial.mkdir(parents=True)
            self._check_room()
            self._weights = ModelWriter(self._partial, spec, model=model)

    def write_layer(self, spec: LayerSpec, packed: PackedLayer) -> None:
        """Writes one layer; calls for different layers may overlap.

        Args:
            spec: The layer.
            packed: Its master, and its moments unless they are zero; fp32, not changed.

        Raises:
            StoreError: The disk is full, or failed; the partial checkpoint is gone.
        """
        assert packed.step == self._step, f"{spec.name} is at step {packed.step}, the checkpoint at {self._step}"
        if not spec.tensors:
            return
        with self._all_or_nothing():
            self._weights.write_layer(spec.index, packed.section("master").view(np.float32))
            sections = [section for section in STATE[1:] if section in packed.sections]
            name = self._optimizer_shards[spec.index]
            tensors = {
                f"{section}.{tensor.name}": ("F32", tensor.shape) for section in sections for tensor in spec.tensors
            }
            file = SafetensorsWriter(self._partial / name, tensors, {"step": str(self._step)})
            try:
                for section in sections:
                    values = packed.section(section).view(np.float32)
                    file.write(values[tensor.offset : tensor.end] for tensor in spec.tensors)
                self._weights.files[name] = file.close()
            finally:
                file.abandon()

    def finish(self, trainer_state: Mapping[str, Any]) -> Path:
        """Completes the checkpoint: from here on it is the newest, whatever happens.

        Args:
            trainer_state: Step, sampler position and the like, as JSON; ``step`` and ``model_dtype`` are added.

        Returns:
            Its directory.

        Raises:
            StoreError: As `write_layer`.
        """
        with self._all_or_nothing():
            self._weights.finish()
            state = {**trainer_state, "step": self._step, "model_dtype": self._spec.model_dtype}
            files = dict(self._weights.files)
            files[TRAINER_STATE] = write_durably(self._partial / TRAINER_STATE, _json(state))
            records = {name: {"bytes": each.bytes, "xxh3_64": each.xxh3_64} for name, each in sorted(files.items())}
            write_durably(self._partial / MANIFEST, _json({"version": 1, "step": self._step, "files": records}))
            sync_directory(self._partial)
            older = hide(self._final)
            self._partial.rename(self._final)
            sync_directory(self._final.parent)
            remove_tree(older)
        return self._final

    def abort(self) -> None:
        """Removes what has been written."""
        self._weights.abandon()
        remove_tree(self._partial)

    def _check_room(self) -> None:
        free = shutil.disk_usage(self._partial).free
        needed = sum(len(STATE) * ITEMSIZE["float32"] * saved.numel for saved in self._spec.saved)
        if needed > free:
            raise StoreError(
                f"{self._final}: a checkpoint needs {needed} bytes, the file system has {free} free; make room or "
                "lower training.save_total_limit"
            )

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if hasattr(self, "_weights"):
                self._weights.abandon()
            remove_tree(self._partial)
            if isinstance(error, OSError):
                raise StoreError(f"{self._final}: cannot be written: {error.strerror or error}") from error
            raise


class ExportWriter:
    """Writes a model directory for use elsewhere: few large files, any dtype.

    Everything is written beside ``out`` first, so that an older export there stays whole until the new one is.

    Args:
        out: New, empty, or an older model directory, whose weights are replaced.
        spec: What the model consists of.
        dtype: Of the weights; None: what the model's configuration asked for.
        model: See `ModelWriter`.

    Raises:
        RunDirectoryError: ``out`` holds something else.
    """

    def __init__(self, out: str, spec: SaveSpec, *, dtype: str | None = None, model: StreamModel | None = None) -> None:
        self.dtype = dtype or spec.model_dtype
        if self.dtype not in DTYPE_NAMES:
            raise ModelError(f"cannot export in {self.dtype}; one of {', '.join(DTYPE_NAMES)}")
        self._out = Path(out).absolute()
        _refuse_other_content(self._out)
        self._partial = self._out.with_name(f".{self._out.name}.partial")
        remove_tree(self._partial)
        self._partial.mkdir(parents=True)
        self._weights = ModelWriter(
            self._partial, spec, dtype=self.dtype, max_shard_numel=EXPORT_SHARD_NUMEL, model=model
        )

    def write_layer(self, index: int, flat: NDArray[np.float32]) -> None:
        """Writes one layer's fp32 weights; layers come in stream order."""
        self._weights.write_layer(index, flat)

    def finish(self) -> Path:
        """Moves the new model into place; a model that was there before goes first, its index before its weights."""
        self._weights.finish()
        self._out.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._out.iterdir(), key=lambda path: not path.name.endswith(".index.json")):
            if _is_weights(path):
                path.unlink()
        for path in sorted(self._partial.iterdir(), key=lambda path: path.name.endswith(".index.json")):
            path.replace(self._out / path.name)
        sync_directory(self._out)
        self._partial.rmdir()
        return self._out

    def abort(self) -> None:
        """Removes what has been written; ``out`` is as it was."""
        self._weights.abandon()
        remove_tree(self._partial)


def cast_blocks(values: NDArray[np.float32], dtype: str) -> Iterator[NDArray[Any]]:
    """Blocks of an fp32 array in another dtype, rounded to nearest even; bfloat16 as uint16 bits."""
    values = values.reshape(-1)
    for start in range(0, values.size, BLOCK_BYTES // 4):
        block = values[start : start + BLOCK_BYTES // 4]
        if dtype == "bfloat16":
            bits = block.view(np.uint32)
            rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
            yield np.where(np.isnan(block), np.uint16(0x7FC0), rounded)
        elif dtype == "float16":
            with np.errstate(over="ignore"):
                yield block.astype(np.float16)
        else:
            yield block


def _refuse_other_content(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise RunDirectoryError(f"{out}: exists and is no directory")
    if (out / MANIFEST).exists():
        raise RunDirectoryError(f"{out}: is a checkpoint; export into another directory")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").exists():
        raise RunDirectoryError(f"{out}: is not empty and holds no model; export into a new directory")


def _is_weights(path: Path) -> bool:
    names = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
    return any(path.match(name) for name in names)


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
