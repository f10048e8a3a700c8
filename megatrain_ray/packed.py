"""`PackedLayer`: the one tensor type that crosses an actor boundary (no torch, no ray).

Ray pickles it with protocol 5: the numpy buffer travels out of band, is copied once into the object store, and is read
from there without a copy, read-only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.layout import ITEMSIZE

PARAMS = ("params",)
GRADS = ("grads",)
MASTER = ("master",)
STATE = ("master", "exp_avg", "exp_avg_sq")
"""The sections of a layer's optimizer state, in the order in which they lie in memory and on disk; all fp32."""


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Sections of one layer's flat buffer, end to end.

    Attributes:
        layer: Index of the layer in the stream.
        step: Optimizer steps that the values have seen (0: as imported); for gradients, the step they belong to.
        dtype: ``float32``, ``bfloat16`` or ``float16``: numpy has no bfloat16, so the bytes are untyped.
        sections: Names of the equally long sections in ``data``.
        data: uint8, one-dimensional, ``len(sections) * numel * itemsize`` bytes. Read-only when it came from Ray.
        start: First element of the layer in the sections: above 0 for a later part of a layer that travels in parts.
    """

    layer: int
    step: int
    dtype: str
    sections: tuple[str, ...]
    data: NDArray[np.uint8]
    start: int = 0

    @property
    def section_bytes(self) -> int:
        return self.data.nbytes // len(self.sections)

    @property
    def numel(self) -> int:
        """Elements of one section."""
        return self.section_bytes // ITEMSIZE[self.dtype]

    @property
    def stop(self) -> int:
        """One more than the last element of the layer in the sections."""
        return self.start + self.numel

    def section(self, name: str) -> NDArray[np.uint8]:
        """A view of one section's bytes."""
        start = self.sections.index(name) * self.section_bytes
        return self.data[start : start + self.section_bytes]
