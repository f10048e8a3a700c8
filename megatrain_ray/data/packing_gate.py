"""How a model has to be called so that packed samples do not see each other; refuses a model where nothing helps.

Most architectures of transformers tell samples apart where ``position_ids`` restart, given neither an attention mask
nor a cache. GPT-OSS leaves ``position_ids`` out when it makes its masks; it takes ready-made ones, by attention type.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatrain_ray.data.batches import make_packed_micro_batch
from megatrain_ray.errors import ModelError

__all__ = ["PackingWay", "check_packing", "packed_masks"]

PackingWay = Literal["position_ids", "masks"]
"""``position_ids``: these are enough. ``masks``: pass `packed_masks` as ``attention_mask`` too."""

TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit: room for another order of sums, no more."""

_ROWS = ((9, 1, 12), (2, 7))
"""Lengths of the samples that are packed for the check; the second row ends with padding."""


def packed_masks(config: Any, position_ids: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Masks for packed rows by type of attention, made by transformers' own functions.

    Args:
        config: Of the model, with its attention implementation.
        position_ids: int64 [B, S], restarting at each sample.
        dtype: Of the hidden states.
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    # Only shape, dtype and device of the hidden states matter.
    hidden = torch.empty((*position_ids.shape, 1), dtype=dtype, device=position_ids.device)
    given: dict[str, Any] = {
        "config": config, "inputs_embeds": hidden, "attention_mask": None, "cache": None, "position_ids": position_ids,
    }  # fmt: skip
    masks = {"full_attention": create_causal_mask(**given)}
    if getattr(config, "sliding_window", None) is not None:
        masks["sliding_attention"] = create_sliding_window_causal_mask(**given)
    return masks


def check_packing(model: Any, *, name: str = "this model") -> PackingWay:
    """Compares the logits of packed samples with those of each sample alone.

    Args:
        model: A small transformers model with weights, on any device; dropout must be off.
        name: For messages.

    Returns:
        How to pack for this model.

    Raises:
        ModelError: In neither way are the logits the same.
    """
    device = next(model.parameters()).device
    vocabulary_rows = int(model.get_input_embeddings().weight.shape[0])
    numbers = np.random.default_rng(0)
    rows = [[numbers.integers(0, vocabulary_rows, length) for length in lengths] for lengths in _ROWS]
    packed = make_packed_micro_batch([[(ids, ids) for ids in row] for row in rows])
    assert packed.position_ids is not None and packed.segment_ids is not None
    position_ids = torch.as_tensor(packed.position_ids, device=device)
    real = torch.as_tensor(packed.segment_ids.reshape(-1) >= 0, device=device)

    def logits(input_ids: Any, **inputs: Any) -> Tensor:
        found: Tensor = model(input_ids=torch.as_tensor(input_ids, device=device), use_cache=False, **inputs).logits
        return found.flatten(0, 1).float()

    def packed_logits(way: PackingWay) -> Tensor:
        inputs: dict[str, Any] = {"position_ids": position_ids}
        if way == "masks":
            inputs["attention_mask"] = packed_masks(model.config, position_ids, model.dtype)
        return logits(packed.input_ids, **inputs)[real]

    findings: list[str] = []
    ways: tuple[PackingWay, ...] = ("position_ids", "masks")
    with torch.no_grad():
        alone = torch.cat([logits(ids[None]) for row in rows for ids in row])
        for way in ways:
            try:
                difference = float((packed_logits(way) - alone).abs().max() / alone.abs().max())
            except Exception as error:  # whatever a foreign model does with arguments that it was not made for
                findings.append(f"with {way}: {type(error).__name__}: {error}")
                continue
            if difference <= TOLERANCE:
                return way
            findings.append(f"with {way}: logits differ by {difference:.1e} of the largest")
    raise ModelError(
        f"{name} lets packed samples see each other ({'; '.join(findings)}); set data.packing: false, or another "
        "model.attn_implementation"
    )
