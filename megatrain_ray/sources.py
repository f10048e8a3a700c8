"""Where a run's layers come from: a Hugging Face directory, random initialization, or a checkpoint.

Files are checked from their headers alone, before anything starts. Reading touches only the bytes of one layer. What
transformers converts on loading (fused experts) goes through transformers' own converters, a layer at a time; all else
is read straight into the layer's flat buffer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ModelError
from megatrain_ray.layout import LayerSpec
from megatrain_ray.packed import MASTER, STATE, PackedLayer
from megatrain_ray.safetensors_file import BrokenFile, FileHeader, TensorEntry, read_header

__all__ = [
    "CheckpointSource",
    "LayerSource",
    "PretrainedSource",
    "RandomSource",
    "open_pretrained",
    "quiet",
    "read_floats",
]

_FLOATS = ("F32", "BF16", "F16")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class LayerSource(Protocol):
    """Gives layers, one at a time. Pickles: it travels to the store's process."""

    @property
    def warnings(self) -> list[str]:
        """What reading has noticed so far."""

    def read_layer(self, spec: LayerSpec) -> PackedLayer:
        """Masters in fp32, with moments if the source has them; padding is zero."""


class RandomSource:
    """The library's own initialization, the same for a layer and seed whatever else is initialized.

    Args:
        build: Makes the model on meta.
        seed: Of the random numbers.
    """

    def __init__(self, build: Callable[[], Any], seed: int) -> None:
        self.build = build
        self.seed = seed
        self.warnings: list[str] = []
        self._model: Any = None

    def read_layer(self, spec: LayerSpec) -> PackedLayer:
        import torch

        if self._model is None:
            self._model = self.build()
        flat = torch.zeros(spec.numel)
        digest = hashlib.blake2b(f"{self.seed}/{spec.name}".encode(), digest_size=7).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest, "big"))
            for tensor in spec.tensors:
                home, _, leaf = tensor.name.rpartition(".")
                view = flat[tensor.offset : tensor.end].view(tensor.shape)
                self._model.get_submodule(home)._parameters[leaf] = torch.nn.Parameter(view)
            for name in _modules(spec):
                self._model._init_weights(self._model.get_submodule(name))
            for tensor in spec.tensors:
                home, _, leaf = tensor.name.rpartition(".")
                meta = torch.empty(tensor.shape, device="meta")
                self._model.get_submodule(home)._parameters[leaf] = torch.nn.Parameter(meta)
        return PackedLayer(spec.index, 0, "float32", MASTER, flat.view(torch.uint8).numpy())


def _modules(spec: LayerSpec) -> list[str]:
    """Names of the modules that hold a layer's parameters, and in a decoder layer of those around them; inner first."""
    homes = [tensor.name.split(".")[:-1] for tensor in spec.tensors]
    shared = len(os.path.commonprefix(homes)) if spec.name.startswith("layer-") else None
    names = {
        ".".join(home[:length])
        for home in homes
        for length in range(len(home) if shared is None else shared, len(home) + 1)
    }
    return sorted(names, key=lambda name: (-name.count("."), name))


class PretrainedSource:
    """A directory of safetensors files.

    Args:
        direct: By parameter name: where its bytes are.
        converted: By layer name: checkpoint tensors that transformers' converters turn into the layer's parameters.
        build: Makes the model on meta; only converters need it.
    """

    def __init__(
        self,
        direct: Mapping[str, tuple[Path, TensorEntry]],
        converted: Mapping[str, list[tuple[Path, str]]],
        build: Callable[[], Any],
    ) -> None:
        self.direct = direct
        self.converted = converted
        self.build = build
        self.warnings: list[str] = []
        self._model: Any = None

    def read_layer(self, spec: LayerSpec) -> PackedLayer:
        flat = np.zeros(spec.numel, np.float32)
        if spec.name in self.converted:
            self._convert(spec, flat)
        else:
            for tensor in spec.tensors:
                path, entry = self.direct[tensor.name]
                read_floats(path, entry, flat[tensor.offset : tensor.end])
        for tensor in spec.tensors:
            if not np.isfinite(flat[tensor.offset : tensor.end]).all():
                self.warnings.append(f"{tensor.name}: the checkpoint holds NaN or infinite weights")
        return PackedLayer(spec.index, 0, "float32", MASTER, flat.view(np.uint8))

    def _convert(self, spec: LayerSpec, flat: NDArray[np.float32]) -> None:
        import torch
        from safetensors import safe_open
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        if self._model is None:
            self._model = self.build()
        weights = _conversions(self._model)
        with contextlib.ExitStack() as stack, quiet():
            opened: dict[Path, Any] = {}
            slices = {}
            for path, name in self.converted[spec.name]:
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                slices[name] = opened[path].get_slice(name)
            convert_and_load_state_dict_in_model(
                self._model, slices, LoadStateDictConfig(dtype=torch.float32, weight_mapping=weights)
            )
        for tensor in spec.tensors:
            home, _, leaf = tensor.name.rpartition(".")
            module = self._model.get_submodule(home)
            param = module._parameters[leaf]
            if param.device.type == "meta" or tuple(param.shape) != tensor.shape:
                raise ModelError(f"{tensor.name}: transformers' conversion of the checkpoint did not produce it")
            flat[tensor.offset : tensor.end] = param.detach().float().flatten().numpy()
            module._parameters[leaf] = torch.nn.Parameter(param.detach().to("meta"))


class CheckpointSource:
    """A checkpoint of this package: masters from its model files, moments from its optimizer files.

    Args:
        pretrained: Of the checkpoint directory.
        directory: The checkpoint.
        step: Optimizer steps that it has seen.
        num_layers: Length of the stream, as in the files' names.
    """

    def __init__(self, pretrained: PretrainedSource, directory: Path, step: int, num_layers: int) -> None:
        self.pretrained = pretrained
        self.directory = directory
        self.step = step
        self.num_layers = num_layers

    @property
    def warnings(self) -> list[str]:
        return self.pretrained.warnings

    def read_layer(self, spec: LayerSpec) -> PackedLayer:
        master = self.pretrained.read_layer(spec)
        state = np.zeros((len(STATE), spec.numel), np.float32)
        state[0] = master.data.view(np.float32)
        path = self.directory / optimizer_file(spec.index, self.num_layers)
        header = _header(path)
        for row, section in enumerate(STATE[1:], 1):
            for tensor in spec.tensors:
                entry = header.tensors.get(f"{section}.{tensor.name}")
                if entry is None or entry.shape != tensor.shape or entry.dtype != "F32":
                    raise ModelError(f"{path}: {section} of {tensor.name} is missing or has another shape or dtype")
                read_floats(path, entry, state[row, tensor.offset : tensor.end])
        return PackedLayer(spec.index, self.step, "float32", STATE, state.reshape(-1).view(np.uint8))


def optimizer_file(index: int, num_layers: int) -> str:
    """Name of the file with a layer's moments in a checkpoint."""
    return f"optimizer-{index + 1:05d}-of-{num_layers:05d}.safetensors"


def read_floats(path: Path, entry: TensorEntry, target: NDArray[np.float32]) -> None:
    """Reads a tensor of any float dtype into fp32 ``target`` (one-dimensional), a bounded piece at a time."""
    itemsize = (entry.end - entry.start) // max(target.size, 1)
    piece = 4 << 20
    with path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        if entry.dtype == "F32":
            _read_exactly(file, target.view(np.uint8).data, path, entry)
            return
        raw = bytearray(piece * itemsize)
        for start in range(0, target.size, piece):
            part = target[start : start + piece]
            view = memoryview(raw)[: part.size * itemsize]
            _read_exactly(file, view, path, entry)
            if entry.dtype == "BF16":
                part.view(np.uint32)[:] = np.frombuffer(view, np.uint16)
                part.view(np.uint32)[:] <<= 16
            else:
                part[:] = np.frombuffer(view, np.float16)


def _read_exactly(file: Any, view: memoryview, path: Path, entry: TensorEntry) -> None:
    done = 0
    while done < len(view):
        got = file.readinto(view[done:])
        if not got:
            raise ModelError(f"{path}: tensor {entry.name}: the file ended {len(view) - done} bytes early")
        done += got


# --- opening ----------------------------------------------------------------------------------------------------------


def open_pretrained(
    directory: Path, layers: tuple[LayerSpec, ...], model: Any, build: Callable[[], Any]
) -> PretrainedSource:
    """Finds every parameter in a directory's files, from their headers alone.

    Args:
        directory: With ``model.safetensors`` or shards and an index.
        layers: The stream that is wanted.
        model: On meta, for its conversions and names.
        build: Makes such a model again, elsewhere.

    Raises:
        ModelError: A file is missing, truncated or no safetensors file; a tensor is missing, misplaced, quantized or
            has another shape than the configuration gives it.
    """
    notes: list[str] = []
    entries = _entries(directory, notes)
    if not entries:
        entries = _convert_bin(directory, notes)
    owner = {tensor.name: spec for spec in layers for tensor in spec.tensors}
    direct: dict[str, tuple[Path, TensorEntry]] = {}
    converted: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    needs_converter: set[str] = set()
    for name, (path, entry) in entries.items():
        target, is_converted = _model_name(name, model)
        spec = owner.get(target)
        if spec is None:
            continue
        if entry.dtype not in _FLOATS:
            raise ModelError(
                f"{path}: tensor {name} has dtype {entry.dtype}; masters are read from {', '.join(_FLOATS)} only: "
                "use the unquantized model"
            )
        converted[spec.name].append((path, name))
        if is_converted:
            needs_converter.add(spec.name)
        elif target not in direct or name == target:
            direct[target] = (path, entry)
    for spec in layers:
        if spec.name in needs_converter:
            continue
        for tensor in spec.tensors:
            if tensor.name not in direct:
                raise ModelError(f"{directory}: no file holds {tensor.name}, which the configuration needs")
            path, entry = direct[tensor.name]
            if entry.shape != tensor.shape:
                raise ModelError(
                    f"{path}: tensor {entry.name} has shape {list(entry.shape)}, the configuration expects "
                    f"{list(tensor.shape)}; config.json belongs to another model"
                )
    source = PretrainedSource(direct, {name: converted[name] for name in needs_converter}, build)
    source.warnings.extend(notes)
    return source


def _entries(directory: Path, notes: list[str]) -> dict[str, tuple[Path, TensorEntry]]:
    """Every tensor of a directory's safetensors files, by its name there."""
    index_path, single = directory / INDEX, directory / SINGLE
    if index_path.exists():
        if single.exists():
            notes.append(f"{single} stands beside {INDEX} and is ignored: the index wins")
        return _indexed(index_path)
    if single.exists():
        return {name: (single, entry) for name, entry in _header(single).tensors.items()}
    return {}


def _indexed(index_path: Path) -> dict[str, tuple[Path, TensorEntry]]:
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8-sig"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index_path}: no readable index with a weight_map: {error}") from error
    root = index_path.parent.absolute()
    headers: dict[str, FileHeader] = {}
    found = {}
    for name, file in pairs:
        path = root / file
        if not Path(os.path.normpath(path)).is_relative_to(root):
            raise ModelError(f"{index_path}: tensor {name} points to {file}, outside of the directory")
        if file not in headers:
            headers[file] = _header(index_path.parent / file)
        entry = headers[file].tensors.get(name)
        if entry is None:
            raise ModelError(f"{index_path}: tensor {name} is said to be in {file}, which does not hold it")
        found[name] = (index_path.parent / file, entry)
    return found


def _header(path: Path) -> FileHeader:
    try:
        return read_header(path)
    except BrokenFile as error:
        raise ModelError(f"{error}; fetch the file again") from error


def _convert_bin(directory: Path, notes: list[str]) -> dict[str, tuple[Path, TensorEntry]]:
    """A ``pytorch_model*.bin`` checkpoint, converted shard by shard to safetensors in a cache beside it."""
    shards = sorted(directory.glob("pytorch_model*.bin"))
    if not shards:
        raise ModelError(
            f"{directory}: holds no {SINGLE}, no {INDEX} and no pytorch_model*.bin; with config.json alone, "
            "set model.init: random"
        )
    import torch
    from safetensors.torch import save_file

    found = {}
    for shard in shards:
        target = shard.with_suffix(".converted.safetensors")
        if not target.exists() or target.stat().st_mtime < shard.stat().st_mtime:
            try:
                tensors = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:
                raise ModelError(f"{shard}: torch.load(weights_only=True) refuses it: {error}") from error
            partial = target.with_suffix(".partial")
            save_file(
                {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, partial, {"format": "pt"}
            )
            partial.replace(target)
            notes.append(f"{shard.name} was converted to {target.name}")
        found.update({name: (target, entry) for name, entry in _header(target).tensors.items()})
    return found


def _conversions(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def _model_name(name: str, model: Any) -> tuple[str, bool]:
    """The parameter that a checkpoint tensor belongs to, and whether a converter makes it from several."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    if not hasattr(model, "_megatrain_conversions"):
        mapping = _conversions(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        model._megatrain_conversions = (renamings, converters, dict(model.state_dict()))
    renamings, converters, state = model._megatrain_conversions
    target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
    if target not in state and name in state:
        target, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
    return target, pattern is not None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bar for every layer."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
