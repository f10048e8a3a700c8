"""Looks at a model directory once, at the start, for all that a later checkpoint or export will carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from megatrain_ray.checkpoint.conversion import plan_saving
from megatrain_ray.checkpoint.save_spec import Constant, SaveSpec
from megatrain_ray.checkpoint.weights import DTYPE_NAMES
from megatrain_ray.errors import ModelError
from megatrain_ray.model import StreamModel

CARRIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "*.py",
    "generation_config.json",
)
"""Files of a model directory that travel with the weights."""


def describe_saving(
    model: StreamModel,
    model_dir: str,
    *,
    model_dtype: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> SaveSpec:
    """Collects what checkpoints and exports of a model consist of besides values.

    Args:
        model: Built from the directory's configuration, its constants loaded.
        model_dir: Where configuration, tokenizer and generation settings come from.
        model_dtype: Of the weights, where ``config.json`` names none.
        chat_template: Replaces the tokenizer's.
        trust_remote_code: Whether code in the directory may run.

    Returns:
        The spec; its ``warnings`` are for the user.

    Raises:
        ModelError: A file cannot be read, or the architecture cannot be saved layer by layer.
    """
    assert model.constants_loaded, "open the weights first: they hold the model's constants"
    directory = Path(model_dir)
    try:
        files = {
            path.name: path.read_bytes() for pattern in CARRIED for path in directory.glob(pattern) if path.is_file()
        }
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}: cannot be read: {error}") from error
    if chat_template is not None:
        files = _with_chat_template(files, chat_template)
    saved, constants = plan_saving(model)
    named_dtype = config.pop("torch_dtype", None)
    named_dtype = config.pop("dtype", None) or named_dtype
    config["architectures"] = [type(model.module).__name__]
    return SaveSpec(
        layers=model.layers,
        saved=saved,
        constants={name: _constant(model.constants[source]) for name, source in constants.items()},
        config=config,
        model_dtype=named_dtype or model_dtype or "float32",
        files=files,
        trust_remote_code=trust_remote_code,
        warnings=_check_generation_config(directory) if "generation_config.json" in files else (),
    )


def _constant(value: Tensor) -> Constant:
    dtype = {**DTYPE_NAMES, torch.int64: "I64", torch.bool: "BOOL"}[value.dtype]
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return Constant(dtype, tuple(value.shape), data)


def _with_chat_template(files: dict[str, bytes], chat_template: str) -> dict[str, bytes]:
    files = {name: content for name, content in files.items() if not name.startswith("chat_template")}
    files["chat_template.jinja"] = chat_template.encode()
    if "tokenizer_config.json" in files:
        content = json.loads(files["tokenizer_config.json"])
        content.pop("chat_template", None)
        files["tokenizer_config.json"] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _check_generation_config(directory: Path) -> tuple[str, ...]:
    """Whether transformers objects to these settings (then its ``save_pretrained`` may refuse); carried either way."""
    try:
        GenerationConfig.from_pretrained(str(directory)).validate(strict=True)
    except Exception as error:  # of a broken file too
        reason = " ".join(str(error).split()) or type(error).__name__
        return (f"{directory / 'generation_config.json'}: carried unchanged, but transformers objects to it: {reason}",)
    return ()
