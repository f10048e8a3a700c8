"""What `megatrain-ray inspect` shows of a layer's masters and moments: shapes, norms, ranges, a histogram."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatrain_ray.control import NotLiveError, ask
from megatrain_ray.errors import RunDirectoryError
from megatrain_ray.layout import LayerSpec
from megatrain_ray.observe.layer_facts import describe_state
from megatrain_ray.packed import STATE

__all__ = ["find_layer", "inspect_run", "render_inspection"]


def inspect_run(directory: Path, layer: str, tensor: str | None = None) -> dict[str, Any]:
    """A layer of a live run, from the actors, or else of its newest checkpoint, from the files.

    Raises:
        RunDirectoryError: There is no such run, layer or tensor, or no checkpoint yet.
        ModelError: The checkpoint cannot be read.
    """
    from megatrain_ray.checkpoint.directory import newest_complete
    from megatrain_ray.checkpoint.resume import ResumeSource, read_trainer_state
    from megatrain_ray.model import StreamModel

    try:
        answer: dict[str, Any] = ask(directory, "inspect", layer=layer, tensor=tensor)
        return answer
    except NotLiveError as error:
        checkpoint = newest_complete(directory)
        if checkpoint is None:
            raise RunDirectoryError(f"{error}, and there is no complete checkpoint") from None
    trusted = bool(read_trainer_state(checkpoint.path)["config"]["model"]["trust_remote_code"])
    model = StreamModel.from_config_dir(str(checkpoint.path), trust_remote_code=trusted)
    spec = find_layer(model.layers, layer)
    state = ResumeSource(str(checkpoint.path), model).read_layer(spec)
    sections = {name: state.section(name).view(np.float32) for name in state.sections}
    return describe_state(spec, state.step, sections, tensor) | {"source": str(checkpoint.path)}


def render_inspection(facts: dict[str, Any]) -> RenderableType:
    """For people."""
    table = Table("tensor", "shape", "of", "norm", "mean", "min", "max", "histogram")
    for tensor in facts["tensors"]:
        for section in STATE:
            values = tensor if section == "master" else tensor.get(section)
            if values is not None:
                first = section == "master"
                table.add_row(
                    tensor["name"] if first else "",
                    " x ".join(map(str, tensor["shape"])) if first else "",
                    section,
                    *(f"{values[key]:.4g}" for key in ("norm", "mean", "min", "max")),
                    _bars(tensor["histogram"]["counts"]) if first else "",
                )
                if values["non_finite"]:
                    table.add_row("", "", Text(f"{values['non_finite']} values are not finite", style="red"))
    return Group(f"{facts['layer']} (position {facts['index']}) after step {facts['step']}", table)


def _bars(counts: list[int]) -> str:
    most = max(counts, default=0) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * count // most)] for count in counts)


def find_layer(layers: tuple[LayerSpec, ...], layer: str) -> LayerSpec:
    """A layer by name or position in the stream.

    Raises:
        RunDirectoryError: There is none.
    """
    for spec in layers:
        if layer in (spec.name, str(spec.index)):
            if not spec.tensors:
                raise RunDirectoryError(f"{spec.name} has no tensors of its own: its weights are tied to embed's")
            return spec
    names = [spec.name for spec in layers]
    shown = names if len(names) <= 8 else [*names[:3], "...", *names[-2:]]
    raise RunDirectoryError(f"there is no layer {layer}; there are {', '.join(shown)} (0 to {len(names) - 1})")
