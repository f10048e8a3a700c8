"""The transformers model without weights: parameters on the meta device, buffers real, one list of decoder layers.

Everything that touches untyped or version-dependent corners of transformers while *building* a model is here; `model`
runs what this module returns.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatrain_ray.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MAX_CONSTANT_BYTES = 64 << 20
"""Buffers that a checkpoint carries travel to each process whole, so they must be small."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model to compute with, without its weights.

    Attributes:
        module: The causal language model; every parameter is on the meta device, every buffer is real.
        config: Its configuration, a copy of the caller's with what training switches off (cache, router losses).
        decoder_layers: Full module name and module of each decoder layer, in order.
        constants: Names of the buffers that a checkpoint carries (DeepSeek's expert biases); no optimizer changes them.
        warnings: What the user should know, one sentence each.
    """

    module: nn.Module
    config: PreTrainedConfig
    decoder_layers: tuple[tuple[str, nn.Module], ...]
    constants: tuple[str, ...]
    warnings: tuple[str, ...]


def read_model_config(model_dir: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Reads ``config.json`` of a model directory.

    Raises:
        ModelError: It is missing, is no JSON object, or names an architecture that transformers does not know.
    """
    path = Path(model_dir) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: no such file; model.name_or_path must be a model directory with a config.json"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(content).__name__}")
    if quantization := content.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ModelError(f"{path}: the weights are quantized ({method}); training needs the unquantized model")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except Exception as error:  # remote code and strict configuration classes raise anything
        raise ModelError(
            f"{path}: transformers cannot read the configuration of model_type {content.get('model_type')!r} "
            f"(architectures {content.get('architectures')}): {_first_line(error)}"
        ) from error
    return config


def text_config(config: PreTrainedConfig) -> Any:
    """The part of a configuration that describes the language model (itself, when there is only one)."""
    return config.get_text_config(decoder=True)


def build_skeleton(
    config: PreTrainedConfig,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    device: str | torch.device = "cpu",
) -> Skeleton:
    """Builds the model of a configuration without allocating its weights.

    Args:
        config: Copied, not changed.
        dtype: What the compute weights will have; parameters that the library keeps in fp32 stay fp32.
        attn_implementation: As in transformers; one that the model refuses becomes ``eager``, with a warning.
        trust_remote_code: Whether code from the model directory may run.
        device: Where the buffers go.

    Raises:
        ModelError: The model cannot be built, or cannot be cut into decoder layers.
    """
    config = copy.deepcopy(config)
    warnings = _switch_off_extras(config)
    name = config.model_type
    if text_config(config) is not config:
        raise ModelError(
            f"{name} has parts besides its language model (images, sound); only text-only models are supported"
        )
    if attn_implementation not in {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}:
        known = ", ".join(sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}))
        raise ModelError(
            f"model.attn_implementation: {attn_implementation!r} is unknown to transformers; one of {known}"
        )
    try:
        module = _construct(config, dtype, attn_implementation, trust_remote_code)
    except Exception as error:
        if attn_implementation == "eager":
            raise ModelError(f"transformers cannot build a {name} model: {_first_line(error)}") from error
        try:
            module = _construct(config, dtype, "eager", trust_remote_code)
        except Exception as eager_error:
            raise ModelError(f"transformers cannot build a {name} model: {_first_line(eager_error)}") from error
        warnings.append(
            f"{name} refuses the attention implementation {attn_implementation!r}, using eager: {_first_line(error)}"
        )
    _keep_in_fp32(module, DTYPES[dtype])
    constants = _find_constants(module, name)
    for submodule in module.modules():
        for buffer_name, buffer in submodule.named_buffers(recurse=False):
            submodule._buffers[buffer_name] = buffer.to(device)
    decoder_layers = _find_decoder_layers(module, module.config)
    return Skeleton(module.eval(), module.config, decoder_layers, constants, tuple(warnings))


def _switch_off_extras(config: PreTrainedConfig) -> list[str]:
    """Switches off, in place, what would change the loss or the outputs of the model's forward."""
    warnings = []
    for part in {id(part): part for part in (config, text_config(config))}.values():
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False
            warnings.append("output_router_logits is off: the loss is cross entropy, without router auxiliary losses")
        for key in ("use_cache", "output_attentions", "output_hidden_states"):
            if getattr(part, key, False):
                setattr(part, key, False)
    return warnings


def _construct(config: PreTrainedConfig, dtype: str, attn_implementation: str, trust_remote_code: bool) -> Any:
    """Builds on the meta device, then computes the buffers (rotary frequencies, masks), as ``from_pretrained`` does for
    those that no checkpoint holds; ``_is_hf_initialized`` is its mark of what needs no random values."""
    with torch.device("meta"), meta_device_safe_creation_ops():
        module = causal_lm(config, DTYPES[dtype], attn_implementation, trust_remote_code)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = torch.zeros_like(buffer, device="cpu")
    for parameter in module.parameters():
        parameter._is_hf_initialized = True
    module.initialize_weights()
    return module


def causal_lm(
    config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool = False
) -> Any:
    """The library's model of a configuration (copied, since the library writes to it), on the current device."""
    auto_class: Any = AutoModelForCausalLM
    return auto_class.from_config(
        copy.deepcopy(config),
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def _keep_in_fp32(module: Any, dtype: torch.dtype) -> None:
    """Gives the parameters that ``from_pretrained`` would keep in fp32 that dtype (see ``_get_dtype_plan``)."""
    plan: dict[str, torch.dtype] = module._get_dtype_plan(dtype)
    if plan:
        pattern = re.compile("|".join(key.replace("*", ".*") for key in plan))
        for name, parameter in module.named_parameters():
            if pattern.search(name):
                parameter.data = parameter.data.to(torch.float32)


def _find_constants(module: nn.Module, name: str) -> tuple[str, ...]:
    parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    constants = tuple(key for key in module.state_dict() if key not in parameters)
    size = sum(module.get_buffer(key).nbytes for key in constants)
    if size > MAX_CONSTANT_BYTES:
        raise ModelError(
            f"{name} keeps {size} bytes outside its parameters ({constants[0]}, ...); expected a few small values"
        )
    return constants


def _find_decoder_layers(module: nn.Module, config: PreTrainedConfig) -> tuple[tuple[str, nn.Module], ...]:
    """The one list of modules as long as ``num_hidden_layers`` that lies in no other such list."""
    length: int | None = getattr(text_config(config), "num_hidden_layers", None)
    found = [
        (name, part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part) == length
    ]
    outer = [(name, part) for name, part in found if not any(name.startswith(f"{other}.") for other, _ in found)]
    if len(outer) != 1:
        names = ", ".join(name for name, _ in outer) or "none"
        raise ModelError(
            f"{config.model_type} cannot be cut into decoder layers: expected one list of {length} modules "
            f"(num_hidden_layers), found {len(outer)} ({names})"
        )
    prefix, layers = outer[0]
    return tuple((f"{prefix}.{index}", layer) for index, layer in enumerate(layers))


def _first_line(error: BaseException) -> str:
    """The first sentence of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]
