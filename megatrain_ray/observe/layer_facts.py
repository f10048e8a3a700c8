"""Statistics of a layer's masters and moments, a block at a time: nothing is copied (no torch, for the store)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import RunDirectoryError
from megatrain_ray.layout import LayerSpec

__all__ = ["describe_state"]

HISTOGRAM_BINS = 20
_BLOCK_NUMEL = 1 << 15
"""Elements looked at at once: they stay in cache; within a block sums are fp32, over the blocks fp64."""

_SMALL = 1e-20
"""A sum of squares below this may have lost some to fp32's range, as second moments do."""

Values = NDArray[np.float32]


@np.errstate(all="ignore")  # sums that leave fp32's range are taken again
def describe_state(
    spec: LayerSpec, step: int, sections: Mapping[str, Values], tensor: str | None = None
) -> dict[str, Any]:
    """Norm, mean, range of each tensor and its moments, and a histogram; non-finite values are counted and left out.

    Args:
        spec: The layer.
        step: Of its state.
        sections: ``master`` and, if they are there, ``exp_avg`` and ``exp_avg_sq``: flat, as in ``spec``; not changed.
        tensor: Only this one.

    Raises:
        RunDirectoryError: The layer has no such tensor.
    """
    names = [each.name for each in spec.tensors]
    if tensor is not None and tensor not in names:
        raise RunDirectoryError(f"{spec.name} has no tensor {tensor}; it has {', '.join(names)}")
    tensors = []
    for each in spec.tensors:
        if tensor in (None, each.name):
            values = {name: section[each.offset : each.end] for name, section in sections.items()}
            master = _statistics(values.pop("master"))
            facts = {"name": each.name, "shape": list(each.shape), "dtype": "float32", "weight_decay": each.decay}
            facts |= master | {"histogram": _histogram(sections["master"][each.offset : each.end], master)}
            tensors.append(facts | {name: _statistics(moment) for name, moment in values.items()})
    return {"layer": spec.name, "index": spec.index, "step": step, "tensors": tensors}


def _blocks(values: Values) -> Iterator[tuple[Values, float]]:
    """Finite values in blocks, views wherever all are finite, and the sum of each."""
    for start in range(0, values.size, _BLOCK_NUMEL):
        block = values[start : start + _BLOCK_NUMEL]
        total = float(block.sum())
        if not np.isfinite(total):  # a value is not finite, or the sum is beyond fp32
            block = block[np.isfinite(block)]
            total = float(block.sum(dtype=np.float64))
        yield block, total


def _statistics(values: Values) -> dict[str, Any]:
    count, total, squares = 0, 0.0, 0.0
    low, high = float("inf"), float("-inf")
    for block, block_total in _blocks(values):
        if block.size:
            count += block.size
            total += block_total
            square = float(block @ block)
            if not np.isfinite(square) or square < _SMALL:
                square = float(np.square(block, dtype=np.float64).sum())
            squares += square
            low, high = min(low, float(block.min())), max(high, float(block.max()))
    return {
        "norm": squares**0.5,
        "mean": total / max(count, 1),
        "min": low if count else 0.0,
        "max": high if count else 0.0,
        "non_finite": values.size - count,
    }


def _histogram(values: Values, statistics: Mapping[str, Any]) -> dict[str, Any]:
    low, high = statistics["min"], statistics["max"]
    count = values.size - statistics["non_finite"]
    if low == high:
        return {"from": low, "to": high, "counts": [count] if count else []}
    counts = np.zeros(HISTOGRAM_BINS, np.int64)
    for block, _ in _blocks(values):
        bins = ((block - np.float64(low)) * (HISTOGRAM_BINS / (high - low))).astype(np.int64)
        counts += np.bincount(np.minimum(bins, HISTOGRAM_BINS - 1), minlength=HISTOGRAM_BINS)
    return {"from": low, "to": high, "counts": counts.tolist()}
