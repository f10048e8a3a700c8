"""Chats: what is rendered, and that exactly the assistant's tokens and end markers are targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain_ray.data.batches import IGNORED
from megatrain_ray.data.chat import BUILT_IN_TEMPLATES, ChatTemplate, resolve_chat_template
from megatrain_ray.data.formats import Conversation, Unusable
from megatrain_ray.errors import DataError
from tests.data import makers
from tests.data.makers import CHATML, byte_tokenizer, chat, load, write_jsonl


def spans(template: str, messages: list[dict[str, Any]], tools: Any = (), **tokenizer: Any) -> list[str]:
    """The texts that are targets."""
    rendered = ChatTemplate(byte_tokenizer(template, **tokenizer), assistant_only=True).render(
        Conversation(messages, list(tools))
    )
    assert rendered.targets is not None
    return [rendered.text[start:end] for start, end in rendered.targets]


def targets(tmp_path: Path, tokenizer: Any, messages: list[dict[str, Any]], **data: Any) -> tuple[str, list[str]]:
    """The whole sample and its runs of targets, from token ids."""
    loaded = load(write_jsonl(tmp_path / "data.jsonl", [{"messages": messages}]), tokenizer, data=data)
    ids, labels = loaded.corpus[0]
    wanted = labels != IGNORED
    assert (labels[wanted] == ids[wanted]).all()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(int)))
    runs = [tokenizer.decode(ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return tokenizer.decode(ids), runs


THREE_TURNS = chat(
    "Say it: I like \u00e4pfel.", "I like \u00e4pfel.", "again", "I like \u00e4pfel.", "and?", "Say it: again"
)
ANSWERS = ["I like \u00e4pfel.", "I like \u00e4pfel.", "Say it: again"]


@pytest.mark.parametrize("template", [CHATML, makers.MARKED], ids=["prefixes", "marks"])
def test_targets_are_all_assistant_turns_with_their_end_markers(tmp_path: Path, template: str) -> None:
    tokenizer = byte_tokenizer(template)
    text, runs = targets(tmp_path, tokenizer, THREE_TURNS)
    assert text == tokenizer.apply_chat_template(THREE_TURNS, tokenize=False)
    assert runs == [answer + "<|im_end|>" for answer in ANSWERS]


def test_everything_is_a_target_when_asked(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    text, runs = targets(tmp_path, tokenizer, THREE_TURNS, assistant_only_loss=False)
    assert runs == [text]


def test_padding_with_the_end_token_keeps_the_real_one_a_target(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(pad="<|im_end|>")
    path = write_jsonl(
        tmp_path / "data.jsonl", [{"messages": chat("a", "b")}, {"messages": chat("a", "a long answer")}]
    )
    (batch,) = (
        load(path, tokenizer, per_device_train_batch_size=2, gradient_accumulation_steps=1).step_batch(1).micro_batches
    )
    end = tokenizer.eos_token_id
    assert batch.attention_mask is not None
    length = int(batch.attention_mask[0].sum())
    assert batch.labels[0, length - 2] == end  # the template prints a line break after it
    assert (batch.input_ids[0, length:] == end).all()
    assert (batch.labels[0, length:] == IGNORED).all()
    assert batch.target_tokens == len("b") + 1 + len("a long answer") + 1


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [CHATML, makers.WITH_BOS, "{{ bos_token }}" + makers.WITH_BOS])
def test_exactly_one_start_token(tmp_path: Path, template: str, adds_bos: bool) -> None:
    tokenizer = byte_tokenizer(template, adds_bos=adds_bos)
    text, runs = targets(tmp_path, tokenizer, chat("hi", "hello"))
    expected = 1 if adds_bos else template.count("bos_token")  # a tokenizer that adds none expects what is printed
    assert text.count("<s>") == expected
    assert runs == ["hello<|im_end|>"]


def test_text_has_one_start_token_too(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(adds_bos=True, eos="</s>")
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "<s>one"}, {"text": "two</s>"}])
    ids, _ = load(path, tokenizer).corpus[0]
    assert tokenizer.decode(ids) == "<s>one</s><s>two</s>"


def test_a_template_without_generation_prompt() -> None:
    assert spans(makers.INSTRUCT, chat("a", "b", "c", " d "), eos="</s>") == [" b</s>", " d</s>"]


def test_a_template_that_forgets_earlier_reasoning() -> None:
    messages = chat("a", "<think>\nhm\n</think>\n\nb", "c", "d", "e", "<think>\nso\n</think>\n\nf")
    assert spans(makers.FORGETFUL, messages) == [
        "b<|im_end|>",
        "d<|im_end|>",
        "<think>\nso\n</think>\n\nf<|im_end|>",
    ]
    assert spans(makers.FORGETFUL, chat("a", "a", "a", "a"))[0] == "a<|im_end|>"


def test_a_template_with_another_marker_at_the_end() -> None:
    assert spans(makers.RETURNING, chat("a", "b", "c", "d"), eos="<|return|>") == [
        "<|message|>b<|end|>",
        "<|message|>d<|return|>",
    ]


def test_a_template_without_markers_teaches_its_line_end() -> None:
    assert spans(makers.MARKERLESS, chat("a", "b", "c", "d")) == ["b\n", "d\n"]


def test_a_template_whose_turns_end_where_the_next_starts() -> None:
    assert spans(makers.OPEN_ENDED, chat("a", "b", "c", "d")) == ["b<|start|>", "d"]


def test_a_template_that_takes_arguments_as_text_and_drops_reasoning() -> None:
    call = {key: value for key, value in WITH_TOOLS[1].items() if key != "reasoning_content"}
    messages = [WITH_TOOLS[0], call, WITH_TOOLS[2], {"role": "assistant", "content": "<think>\nhm\n</think>b"}]
    assert spans(makers.TEXT_ARGUMENTS, messages, eos="</s>") == ['call:{"place": "Rome"}<|end|></s>', "b</s>"]


@pytest.mark.parametrize("name", BUILT_IN_TEMPLATES)
def test_built_in_templates(name: str) -> None:
    end = {"chatml": "<|im_end|>", "alpaca": "</s>"}[name]
    assert spans(BUILT_IN_TEMPLATES[name], chat("a", "b", "c", "d"), eos=end) == [f"b{end}", f"d{end}"]


def test_an_assistant_that_starts_and_users_in_a_row() -> None:
    turns = [*chat("", "I start")[1:], *chat("a"), *chat("b", "c")]
    assert spans(CHATML, turns) == ["I start<|im_end|>", "c<|im_end|>"]


def test_an_answer_that_holds_a_marker_or_nothing() -> None:
    assert spans(CHATML, chat("a", "x<|im_end|>y", "c", "")) == ["x<|im_end|>y<|im_end|>", "<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, makers.MARKED])
def test_turns_of_weight_zero_are_context(template: str) -> None:
    messages: list[dict[str, Any]] = chat("a", "b", "c", "d")
    messages[1]["trained"] = False
    assert spans(template, messages) == ["d<|im_end|>"]


def test_what_a_template_refuses_is_left_out_with_its_reason() -> None:
    with pytest.raises(Unusable, match=r"the chat template refuses it: Conversation roles must alternate"):
        spans(makers.INSTRUCT, [*chat("a"), *chat("b", "c")], eos="</s>")


def test_a_template_that_shows_no_answer_is_left_out() -> None:
    with pytest.raises(Unusable, match="no assistant turn that is trained is rendered"):
        spans(makers.NOTHING_SHOWN, chat("a", "b"))


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "weather"}}
WITH_TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "b"},
]


def test_tools_go_to_a_template_that_knows_them() -> None:
    found = spans(makers.ALL_TOOLS, WITH_TOOLS, [TOOL])
    assert found == ['<think>\nhm\n</think>\n\nCALLweather{"place": "Rome"}<|im_end|>', "b<|im_end|>"]


def test_ids_of_calls_reach_the_template(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "abc123def", **CALL}]},
        {"role": "tool", "content": "sun", "tool_call_id": "abc123def"},
        {"role": "assistant", "content": "b"},
    ]
    text, runs = targets(tmp_path, byte_tokenizer(makers.IDENTIFIED, eos="</s>"), messages)
    assert text == "[INST] a [/INST] CALLweather abc123def</s>[RESULT]abc123def sun[/RESULT] b</s>"
    assert runs == [" CALLweather abc123def</s>", " b</s>"]


@pytest.mark.parametrize("system", [False, True])
def test_tools_are_put_into_words_for_other_templates(system: bool) -> None:
    messages = [{"role": "system", "content": "Be nice."}, *WITH_TOOLS] if system else WITH_TOOLS
    rendered = ChatTemplate(byte_tokenizer(), assistant_only=True).render(Conversation(messages, [TOOL]))
    assert rendered.text.startswith("<|im_start|>system\n" + ("Be nice.\n\n" if system else "") + "You may call")
    assert '<tools>\n{"type": "function", "function": {"name": "weather"}}\n</tools>' in rendered.text
    assert rendered.targets is not None
    assert [rendered.text[start:end] for start, end in rendered.targets] == [
        "<think>\nhm\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call><|im_end|>',
        "b<|im_end|>",
    ]
    assert messages[-3]["content"] == "", "the caller's messages stay as they are"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("a", "b")},
        {"instruction": "a", "output": "b"},
        {"conversations": [{"from": "gpt", "value": "b"}]},
    ],
)
def test_chats_need_a_template(tmp_path: Path, row: dict[str, Any]) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [row])
    with pytest.raises(DataError, match=r"the tokenizer has no chat template.*set data\.chat_template"):
        load(path, byte_tokenizer(None))
    with pytest.raises(DataError, match="chats, which need a tokenizer, and the model directory has none"):
        load(path, None)


def test_a_template_that_is_not_valid(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": chat("a", "b")}])
    with pytest.raises(DataError, match="the chat template is not valid"):
        load(path, byte_tokenizer("{% for m in %}"))


def test_where_a_template_may_come_from(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("\ufeff" + CHATML, encoding="utf-8")
    assert resolve_chat_template(str(tmp_path / "chat.jinja")) == CHATML
    assert resolve_chat_template(CHATML) == CHATML
    assert resolve_chat_template("chatml") == BUILT_IN_TEMPLATES["chatml"]
    with pytest.raises(DataError, match=r"'missing\.jinja': no such file.*chatml, alpaca"):
        resolve_chat_template("missing.jinja")
    (tmp_path / "chat.jinja").write_bytes(b"\xff{{ x }}")
    with pytest.raises(DataError, match=r"chat\.jinja': not UTF-8 text"):
        resolve_chat_template(str(tmp_path / "chat.jinja"))
    (tmp_path / "memory.jinja").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"memory\.jinja': cannot be read: Input/output error"):
        resolve_chat_template(str(tmp_path / "memory.jinja"))
