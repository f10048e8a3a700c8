"""Formats: what the fields mean, and which rows are errors, left out, or fine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from megatrain_ray.data.formats import Conversation, Unusable, conversation, detect_format, text_of, token_row
from megatrain_ray.data.rows import Row, open_sources
from megatrain_ray.errors import DataError

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def row(**fields: Any) -> Row:
    return Row(6, "data.jsonl:7", fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"input_ids": [1]}, "tokens"),
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"conversations": [USER, ANSWER]}, "messages"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, "sharegpt"),
        ({"conversations": []}, "sharegpt"),
        ({"messages": [], "text": "x"}, "messages"),
        ({"instruction": "a", "output": "b", "text": "the two together"}, "alpaca"),
        ({"prompt": "a", "completion": "b"}, "alpaca"),
        ({"text": "a", "url": "b"}, "text"),
    ],
)
def test_detection(fields: dict[str, Any], expected: str) -> None:
    assert detect_format(row(**fields)) == expected


def test_unknown_fields_are_listed() -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:7: cannot tell the format from the fields 'question', 'label'"):
        detect_format(row(question="a", label=1))


@pytest.mark.parametrize(("value", "got"), [(None, "null"), ("[]", '"[]" (text)')])
def test_messages_that_are_no_list_are_named(value: Any, got: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"data.jsonl:7: field 'messages' must be a list, got {got}")):
        detect_format(row(messages=value, id=3))


def test_alpaca() -> None:
    found = conversation(
        row(system="be nice", history=[["a", "b"]], instruction="Add.", input="1 2", output="3", extra=None), "alpaca"
    )
    assert [(message["role"], message["content"]) for message in found.messages] == [
        ("system", "be nice"), ("user", "a"), ("assistant", "b"), ("user", "Add.\n1 2"), ("assistant", "3"),
    ]  # fmt: skip
    empty = conversation(row(system=None, history=None, instruction="Add.", input=None, output=""), "alpaca")
    assert empty.messages == [{"role": "user", "content": "Add."}, {"role": "assistant", "content": ""}]


def test_sharegpt_with_tools() -> None:
    call = {"name": "weather", "arguments": {"place": "Rome"}}
    calls = [call, {**call, "id": "2"}]
    turns = [
        ("system", "s"),
        ("human", "h"),
        ("function_call", json.dumps(calls)),
        ("observation", "sun"),
        ("gpt", "g"),
    ]
    found = conversation(
        row(conversations=[{"from": role, "value": value} for role, value in turns], tools='[{"name": "weather"}]'),
        "sharegpt",
    )
    assert found == Conversation(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "h"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": call},
                    {"id": "2", "type": "function", "function": call},
                ],
            },
            {"role": "tool", "content": "sun"},
            {"role": "assistant", "content": "g"},
        ],
        [{"type": "function", "function": {"name": "weather"}}],
    )


def test_messages_as_services_write_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    found = conversation(
        row(
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [call], "weight": 0},
                {"role": "tool", "content": "sun", "tool_call_id": "1"},
                {"role": "assistant", "content": [{"type": "reasoning", "value": "hm"}, {"type": "text", "text": "c"}]},
            ],
            tools=[{"type": "function", "function": {"name": "weather"}}],
        ),
        "messages",
    )
    function = {"name": "weather", "arguments": {"place": "Rome"}}
    assert found.messages == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
            "trained": False,
        },
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize("text", ["call weather", '{"place": "Rome"}', "[]", "3", "[" * 100_000])
def test_a_call_that_is_no_json_call_stays_text(text: str) -> None:
    turns = [{"from": "human", "value": "h"}, {"from": "function_call", "value": text}]
    assert conversation(row(conversations=turns), "sharegpt").messages[1] == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ([USER], "no assistant turn"),
        ([USER, {"role": "narrator", "content": "x"}, ANSWER], 'unknown role "narrator"'),
        ([USER, {"role": ["user"], "content": "x"}, ANSWER], 'unknown role ["user"]'),
        ([USER, {"role": "\ud83d", "content": "x"}, ANSWER], 'unknown role "\\ud83d"'),
        ([USER, {"content": "x"}, ANSWER], "messages[1] has no role"),
        ([USER, {"role": None, "content": "x"}, ANSWER], "messages[1] has no role"),
        ([{"role": "user", "content": [{"type": "image"}]}, ANSWER], 'contents of type "image"'),
        ([{"role": "user", "content": [{"type": ["text"]}]}, ANSWER], 'contents of type ["text"]'),
    ],
)
def test_conversations_that_are_left_out(messages: list[Any], reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        conversation(row(messages=messages), "messages")
    assert str(caught.value) == reason


def test_odd_orders_of_turns_are_kept() -> None:
    for messages in ([ANSWER, USER, ANSWER], [USER, USER, ANSWER], [USER, ANSWER, ANSWER], [USER, ANSWER, USER]):
        assert conversation(row(messages=messages), "messages").messages == messages


@pytest.mark.parametrize(
    ("value", "got"),
    [(None, "null"), (42, "42 (a number)"), ({"a": 1}, '{"a": 1} (an object)'), (["a"], '["a"] (a list)'),
     (True, "true (a truth value)")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("form", "field", "make"),
    [
        ("alpaca", "output", lambda value: {"instruction": "a", "output": value}),
        ("alpaca", "instruction", lambda value: {"instruction": value, "output": "b"}),
        ("sharegpt", "conversations[1].value",
         lambda value: {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": value}]}),
        ("messages", "messages[1].content", lambda value: {"messages": [USER, {**ANSWER, "content": value}]}),
        ("text", "text", lambda value: {"text": value}),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_are_errors(form: str, field: str, make: Any, value: Any, got: str) -> None:
    kind = "text"
    if "[1]" in field and isinstance(value, list):  # contents may be given in parts
        field, kind, got = f"{field}[0]", "an object", '"a" (text)'
    with pytest.raises(DataError) as caught:
        text_of(row(**make(value))) if form == "text" else conversation(row(**make(value)), form)
    assert str(caught.value) == f"data.jsonl:7: field '{field}' must be {kind}, got {got}"


@pytest.mark.parametrize(
    ("form", "fields", "expected"),
    [
        ("alpaca", {"instruction": "a"}, "field 'output' is missing"),
        ("alpaca", {"output": "a"}, "field 'instruction' is missing"),
        ("alpaca", {"instruction": "a", "output": "b", "input": 3}, "field 'input' must be text, got 3"),
        ("alpaca", {"instruction": "a", "output": "b", "history": [["x"]]}, "field 'history[0]' must be a pair"),
        ("messages", {"text": "a"}, "field 'messages' (or 'conversations') is missing or null"),
        ("messages", {"messages": None}, "field 'messages' (or 'conversations') is missing or null"),
        ("messages", {"messages": {"role": "user"}}, "field 'messages' must be a list"),
        ("messages", {"messages": ["hi"]}, "field 'messages[0]' must be an object"),
        ("messages", {"messages": [USER, ANSWER], "tools": "[{"}, "field 'tools' is not valid JSON"),
        ("messages", {"messages": [USER, ANSWER], "tools": [3]}, "field 'tools[0]' must be an object"),
        ("messages", {"messages": [USER, {**ANSWER, "weight": 0.5}]}, "field 'messages[1].weight' must be 0 or 1"),
        (
            "messages",
            {"messages": [USER, {**ANSWER, "tool_calls": [{}]}]},
            "'messages[1].tool_calls[0]' must be an obj",
        ),
        (
            "messages",
            {"messages": [USER, {**ANSWER, "tool_calls": [{"name": "x", "id": 7}]}]},
            "field 'messages[1].tool_calls[0].id' must be text, got 7 (a number)",
        ),
        ("messages", {"messages": [USER, ANSWER], "tools": "[" * 100_000}, "field 'tools' is not valid JSON"),
    ],
)
def test_other_wrong_fields(form: str, fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as caught:
        conversation(row(**fields), form)
    assert str(caught.value).startswith("data.jsonl:7: ")
    assert expected in str(caught.value)


def test_tokens() -> None:
    assert token_row(row(input_ids=[1, 2])) == ([1, 2], None)
    assert token_row(row(input_ids=[1, 2], labels=None)) == ([1, 2], None)
    assert token_row(row(input_ids=[1, 2], labels=[-100, 9])) == ([1, 2], [-100, 9])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "field 'input_ids' must be a list of whole numbers, got null"),
        ({"input_ids": "12"}, "field 'input_ids' must be a list of whole numbers, got \"12\" (text)"),
        ({"input_ids": [1, None]}, "field 'input_ids[1]' must be a whole number, got null"),
        ({"input_ids": [1, 2.0]}, "field 'input_ids[1]' must be a whole number, got 2.0"),
        ({"input_ids": [True]}, "field 'input_ids[0]' must be a whole number, got true"),
        ({"input_ids": [3, -1]}, "field 'input_ids' holds -1; expected token ids from 0"),
        ({"input_ids": [2**70]}, f"field 'input_ids' holds {2**70}"),
        ({"input_ids": [3, -100]}, "field 'input_ids' holds -100"),
        ({"input_ids": [3], "labels": [-1]}, "field 'labels' holds -1; expected token ids from 0 or -100 (no target)"),
        ({"input_ids": [3], "labels": [-101]}, "field 'labels' holds -101"),
        ({"input_ids": [3], "labels": [3, 4]}, "field 'labels' has 2 entries, 'input_ids' has 1"),
    ],
)
def test_wrong_tokens(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as caught:
        token_row(row(**fields))
    assert str(caught.value).startswith("data.jsonl:7: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_many_null_optional_fields_and_then_text(tmp_path: Path, kind: str) -> None:
    rows = [
        {"instruction": f"{index}", "input": None if index < 20_000 else "late", "output": "x"}
        for index in range(20_002)
    ]
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    (source,) = open_sources([str(path)])
    questions = [conversation(row, "alpaca").messages[0]["content"] for row in source.rows()]
    assert questions[19_999:] == ["19999", "20000\nlate", "20001\nlate"]


def test_a_wrong_value_in_parquet_names_row_and_field(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(
        pa.Table.from_pylist([{"instruction": "a", "output": "b"}, {"instruction": "a", "output": None}]), path
    )
    (source,) = open_sources([str(path)])
    with pytest.raises(DataError, match=r"data\.parquet: row 1: field 'output' must be text, got null"):
        [conversation(row, "alpaca") for row in source.rows()]
