"""Where each tensor of a layer lies in the layer's flat buffer (pure: no torch, no ray).

A model is a stream of layers: ``embed`` (what runs before the decoder layers), ``layer-0000`` ... and ``head`` (final
norm and output projection, without weights tied to the embedding). A layer's tensors lie in one flat buffer at the same
*element* offsets in every dtype, so that casting masters to compute weights, clipping and AdamW are single passes over
one-dimensional arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

TENSOR_ALIGN_NUMEL = 64
"""Each tensor starts at a multiple of this many elements: 256 B in fp32, 128 B in bf16, for vectorized kernels."""

LAYER_ALIGN_NUMEL = 1024
"""A layer's length is a multiple of this many elements: 4096 B in fp32, so that sections suit direct I/O."""

PART_NUMEL = 1 << 26
"""The state of larger layers travels in parts of so many elements (768 MiB): buffers do not grow with the layer."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of each dtype that a layer buffer may have, by torch's name of the dtype."""


def align_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter inside a layer's flat buffer.

    Attributes:
        name: Full parameter name in the model, such as ``model.layers.0.mlp.up_proj.weight``.
        shape: Its shape in the model.
        offset: First element, counted in elements from the start of the layer.
        decay: Whether weight decay applies (more than one dimension, and not named a bias).
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    decay: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of the stream.

    Attributes:
        index: Position in the stream: 0 is ``embed``, then the decoder layers, then ``head``.
        name: ``embed``, ``layer-0000`` or ``head``; also the stem of its file in the store.
        tensors: In buffer order: those with weight decay first.
        numel: Length of the flat buffer in elements, padding included.
        decay_numel: Elements ``[0, decay_numel)`` take weight decay, the rest do not. Padding is zero and stays zero.
    """

    index: int
    name: str
    tensors: tuple[TensorSpec, ...]
    numel: int
    decay_numel: int

    @property
    def num_parameters(self) -> int:
        """Parameters without padding."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def is_decoder(self) -> bool:
        """Neither ``embed`` nor ``head``."""
        return self.name not in ("embed", "head")

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """First and last element of each tensor: layers with the same extents have their padding in the same places."""
        return tuple((tensor.offset, tensor.end) for tensor in self.tensors)

    def section_bytes(self, dtype: str) -> int:
        """Bytes of one section (weights, or gradients, or one moment) in ``dtype``."""
        return self.numel * ITEMSIZE[dtype]

    def part(self, index: int, part_numel: int) -> tuple[int, int]:
        """First and last element of a part of the buffer."""
        return index * part_numel, min((index + 1) * part_numel, self.numel)


def takes_weight_decay(name: str, shape: tuple[int, ...]) -> bool:
    """The rule of INTERFACE: more than one dimension, and a name that does not end in ``bias``."""
    return len(shape) > 1 and not name.endswith("bias")


def pack_layer(index: int, name: str, parameters: Iterable[tuple[str, tuple[int, ...]]]) -> LayerSpec:
    """Lays out a layer's parameters.

    Args:
        index: Position in the stream.
        name: ``embed``, ``layer-0000`` or ``head``.
        parameters: Full names and shapes, in any order; tied parameters once.

    Returns:
        The layer's spec. An empty layer (a head whose weights are all tied) has ``numel`` 0.
    """
    decayed: list[tuple[str, tuple[int, ...]]] = []
    plain: list[tuple[str, tuple[int, ...]]] = []
    for tensor_name, shape in parameters:
        (decayed if takes_weight_decay(tensor_name, shape) else plain).append((tensor_name, tuple(shape)))
    tensors: list[TensorSpec] = []
    offset = 0
    decay_numel = 0
    for group, decay in ((decayed, True), (plain, False)):
        for tensor_name, shape in group:
            spec = TensorSpec(tensor_name, shape, offset, decay)
            tensors.append(spec)
            offset = align_up(spec.end, TENSOR_ALIGN_NUMEL)
        if decay:
            decay_numel = offset
    return LayerSpec(index, name, tuple(tensors), align_up(offset, LAYER_ALIGN_NUMEL), decay_numel)


def decoder_layer_name(index: int) -> str:
    """Name of the decoder layer with this index (0 is the first decoder layer)."""
    return f"layer-{index:04d}"
