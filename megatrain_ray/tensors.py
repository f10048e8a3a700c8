"""Torch tensors over the flat buffers that cross actors, and their views by name."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain_ray.layout import LayerSpec


def as_tensor(data: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """A one-dimensional tensor over ``data`` (uint8, contiguous), without a copy.

    What Ray hands out is read-only and torch knows no read-only tensors: it would warn at each one. Callers never write
    to what they received.
    """
    if data.flags.writeable or not data.nbytes:
        return torch.from_numpy(data).view(dtype)
    alias = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
    alias.owner = data  # type: ignore[attr-defined]  # keeps the object-store buffer pinned as long as the tensor lives
    return torch.frombuffer(alias, dtype=dtype)


def bind(spec: LayerSpec, flat: Tensor) -> dict[str, Tensor]:
    """Views of a layer's flat buffer, full names to shaped tensors.

    Args:
        spec: The layer.
        flat: One-dimensional, ``spec.numel`` elements, any dtype and device.
    """
    return {tensor.name: flat[tensor.offset : tensor.end].view(tensor.shape) for tensor in spec.tensors}
