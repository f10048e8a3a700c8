"""Small tokenizers, chat templates, data files and configurations."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from megatrain_ray.config import Config
from megatrain_ray.data.sampler import TrainingData, build_training_data

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
# As Llama-2 and Mistral: no generation prompt, roles have to alternate.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
# As Qwen3: reasoning of all but the last turn is dropped, the last turn always has some.
FORGETFUL = (
    "{% for m in messages %}{% set content = m['content'] %}{% if m['role'] == 'assistant' %}"
    "{% set parts = content.split('</think>') %}{% set answer = parts[-1].lstrip('\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{% set content = '<think>\n' + thought + '\n</think>\n\n' + answer if loop.last else answer %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As GPT-OSS: the last turn ends with another marker.
RETURNING = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
MARKERLESS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# As GLM-4: what ends a turn is the start of the next one.
OPEN_ENDED = (
    "{% for m in messages %}{{ '<|start|>' if m['role'] == 'user' else '<|message|>' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|message|>' }}{% endif %}"
)
# As DeepSeek-V3: arguments are JSON in text; the generation prompt holds more than the header of a turn.
TEXT_ARGUMENTS = (
    "{% for m in messages %}{% if m['tool_calls'] %}{{ '<|start|>call:' }}"
    "{{ m['tool_calls'][0]['function']['arguments'] + '<|end|></s>' }}{% else %}{{ '<|start|>' + m['role'] + ':' }}"
    "{{ m['content'].split('</think>')[-1] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant:<think>\n' }}{% endif %}"
)
NOTHING_SHOWN = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
ALL_TOOLS = (
    "{% if tools %}{{ 'TOOLS' + tools | tojson + '\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}{% for c in m['tool_calls'] or [] %}"
    "{{ 'CALL' + c['function']['name'] + c['function']['arguments'] | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Mistral: calls have ids of nine characters, and answers name them.
IDENTIFIED = (
    "{% for m in messages %}{% if m['tool_calls'] %}{% for c in m['tool_calls'] %}"
    "{% if c['id'] is not defined or c['id'] | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ ' CALL' + c['function']['name'] + ' ' + c['id'] }}{% endfor %}{{ eos_token }}"
    "{% elif m['role'] == 'tool' %}{{ '[RESULT]' + m['tool_call_id'] + ' ' + m['content'] + '[/RESULT]' }}"
    "{% elif m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>")


def byte_tokenizer(
    chat_template: str | None = CHATML, *, eos: str = "<|im_end|>", pad: str = "<pad>", adds_bos: bool = False
) -> Any:
    """One token a byte, so that targets can be checked to the letter; ids below 9 are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token=pad, additional_special_tokens=list(SPECIAL)
    )
    tokenizer.chat_template = chat_template
    return tokenizer


VOCABULARY_ROWS = 512


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def make_config(path: Any, *, data: dict[str, Any] | None = None, **training: Any) -> Config:
    paths = [str(one) for one in path] if isinstance(path, list) else str(path)
    values = {"output_dir": "unused", "num_train_epochs": 1, "shuffle": False, **training}
    return Config.from_mapping(
        {"model": {"name_or_path": "unused"}, "data": {"path": paths, **(data or {})}, "training": values}
    )


def load(
    path: Any,
    tokenizer: Any = None,
    *,
    data: dict[str, Any] | None = None,
    rows: int = VOCABULARY_ROWS,
    **training: Any,
) -> TrainingData:
    """Training data of files, cached beside the first of them."""
    first = path[0] if isinstance(path, list) else path
    return build_training_data(
        make_config(path, data=data, **training),
        tokenizer=tokenizer,
        vocabulary_rows=rows,
        cache_dir=str(Path(first).parent / "cache"),
    )


def chat(*turns: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]


@functools.cache
def shared_tokenizer() -> Any:
    return byte_tokenizer()
