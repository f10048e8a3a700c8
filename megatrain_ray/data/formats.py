"""What a row means: from the fields of each format to messages, text or token ids.

A value of the wrong type is an error that names row and field. A conversation that is well-formed but cannot be trained
on is left out, and counted with its reason (`Unusable`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatrain_ray.data.batches import IGNORED
from megatrain_ray.data.rows import Row, shorten
from megatrain_ray.errors import DataError

__all__ = ["CHAT_FORMATS", "Conversation", "Unusable", "conversation", "detect_format", "text_of", "token_row"]

Message = dict[str, Any]

_INT32_MAX = 2**31 - 1

_ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""Names in use for the roles; ``call`` is an assistant turn that calls a tool."""


class Unusable(Exception):
    """A row that is left out; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and tools as chat templates take them.

    An assistant message with ``"trained": False`` is context, not a target; no template sees that key.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]


def detect_format(row: Row) -> str:
    """The format of a row, by its fields.

    Raises:
        DataError: No format has these fields.
    """
    fields = row.values
    if "input_ids" in fields:
        return "tokens"
    for field in ("messages", "conversations"):
        entries = fields.get(field)
        if isinstance(entries, list):
            with_from = any(isinstance(entry, dict) and "from" in entry for entry in entries)
            return "sharegpt" if with_from or (field == "conversations" and not entries) else "messages"
    if ("instruction" in fields or "prompt" in fields) and _answer_field(fields) is not None:
        return "alpaca"
    if "text" in fields:
        return "text"
    for field in ("messages", "conversations"):
        if field in fields:
            raise DataError(f"{row.place}: field {field!r} must be a list, got {_kind(fields[field])}")
    raise DataError(
        f"{row.place}: cannot tell the format from the fields {', '.join(map(repr, fields)) or '(none)'}; expected "
        "'input_ids', 'messages', 'conversations', 'instruction' and 'output', or 'text'; or set data.format"
    )


def text_of(row: Row) -> str:
    """Running text of a ``text`` row."""
    return _text(row.values, "text", row.place)


# --- tokens -----------------------------------------------------------------------------------------------------------


def token_row(row: Row) -> tuple[list[int], list[int] | None]:
    """Ids and labels of a ``tokens`` row; labels None: every id is a target."""
    ids = _token_ids(row, "input_ids", 0)
    if row.values.get("labels") is None:
        return ids, None
    labels = _token_ids(row, "labels", IGNORED)
    if len(labels) != len(ids):
        raise DataError(f"{row.place}: field 'labels' has {len(labels)} entries, 'input_ids' has {len(ids)}")
    return ids, labels


def _token_ids(row: Row, field: str, lowest: int) -> list[int]:
    values = row.values.get(field)
    if not isinstance(values, list):
        raise DataError(f"{row.place}: field {field!r} must be a list of whole numbers, got {_kind(values)}")
    for index, value in enumerate(values):
        if type(value) is not int:
            raise DataError(f"{row.place}: field '{field}[{index}]' must be a whole number, got {_kind(value)}")
    if values and (min(values) < lowest or max(values) > _INT32_MAX or (lowest < 0 and _between(values, lowest))):
        bad = next(value for value in values if not (0 <= value <= _INT32_MAX or value == lowest))
        meaning = f" or {IGNORED} (no target)" if lowest < 0 else ""
        raise DataError(f"{row.place}: field {field!r} holds {bad}; expected token ids from 0{meaning}")
    return values


def _between(values: list[int], lowest: int) -> bool:
    return any(lowest < value < 0 for value in values)


# --- chats ------------------------------------------------------------------------------------------------------------


def conversation(row: Row, form: str) -> Conversation:
    """Messages of a row in one of the `CHAT_FORMATS`.

    Raises:
        DataError: A field has the wrong type.
        Unusable: The conversation cannot be trained on.
    """
    result = CHAT_FORMATS[form](row)
    if not result.messages:
        raise Unusable("no messages")
    if not any(message["role"] == "assistant" for message in result.messages):
        raise Unusable("no assistant turn")
    return result


def _alpaca(row: Row) -> Conversation:
    fields = row.values
    messages: list[Message] = []
    _add_system(messages, fields, row.place)
    history = fields.get("history")
    for index, pair in enumerate(_list(history, "history", row.place)):
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{row.place}: field 'history[{index}]' must be a pair of texts, got {shorten(pair)}")
        for role, value in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": _checked(value, f"history[{index}]", row.place)})
    asked = "prompt" if "prompt" in fields and "instruction" not in fields else "instruction"
    question = _text(fields, asked, row.place)
    extra = _text(fields, "input", row.place, optional=True)
    messages.append({"role": "user", "content": "\n".join(filter(None, (question, extra)))})
    messages.append({"role": "assistant", "content": _text(fields, _answer_field(fields) or "output", row.place)})
    return Conversation(messages, _tools(fields, row.place))


def _answer_field(fields: dict[str, Any]) -> str | None:
    return next((name for name in ("output", "response", "completion") if name in fields), None)


def _turns(row: Row) -> Conversation:
    """``messages`` and ``sharegpt``: the same list under other names."""
    fields = row.values
    field = "messages" if fields.get("messages") is not None else "conversations"
    if fields.get(field) is None:
        raise DataError(f"{row.place}: field 'messages' (or 'conversations') is missing or null; it must be a list")
    messages: list[Message] = []
    _add_system(messages, fields, row.place)
    for index, entry in enumerate(_list(fields[field], field, row.place)):
        name = f"{field}[{index}]"
        if not isinstance(entry, dict):
            raise DataError(f"{row.place}: field {name!r} must be an object, got {_kind(entry)}")
        messages.append(_message(entry, name, row.place))
    return Conversation(messages, _tools(fields, row.place))


CHAT_FORMATS: dict[str, Callable[[Row], Conversation]] = {"alpaca": _alpaca, "sharegpt": _turns, "messages": _turns}


def _message(entry: dict[str, Any], name: str, place: str) -> Message:
    given = entry.get("role", entry.get("from"))
    if given is None:
        raise Unusable(f"{name} has no role")
    if not isinstance(given, str) or given not in _ROLES:
        raise Unusable(f"unknown role {shorten(given)}")
    role = _ROLES[given]
    value_field = "content" if "content" in entry or "value" not in entry else "value"
    value = entry.get(value_field)
    where = f"{name}.{value_field}"
    if role == "call":
        return {"role": "assistant", "content": "", **_called(_checked(value, where, place))}
    message: Message = {"role": role, "content": ""}
    calls = _tool_calls(entry.get("tool_calls"), f"{name}.tool_calls", place)
    if isinstance(value, list):
        calls += _join_parts(message, value, where, place)
    elif not (value is None and calls):
        message["content"] = _checked(value, where, place)
    if calls:
        message["tool_calls"] = calls
    for extra in ("reasoning_content", "name", "tool_call_id"):
        if entry.get(extra) is not None:
            message[extra] = _checked(entry[extra], f"{name}.{extra}", place)
    if role == "assistant" and not _trained(entry, name, place):
        message["trained"] = False
    return message


def _trained(entry: dict[str, Any], name: str, place: str) -> bool:
    for field in ("loss_weight", "weight"):
        weight = entry.get(field)
        if weight is not None:
            if isinstance(weight, bool) or weight not in (0, 1):
                raise DataError(f"{place}: field '{name}.{field}' must be 0 or 1, got {shorten(weight)}")
            return bool(weight)
    return True


def _join_parts(message: Message, parts: list[Any], where: str, place: str) -> list[dict[str, Any]]:
    """Contents given in parts; returns the tool calls among them."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, part in enumerate(parts):
        name = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise DataError(f"{place}: field {name!r} must be an object, got {_kind(part)}")
        kind = part.get("type", "text")
        if kind not in ("text", "reasoning", "tool_call"):
            raise Unusable(f"contents of type {shorten(kind)}")
        field = kind if part.get(kind) is not None else "value"
        value = _checked(part.get(field), f"{name}.{field}", place)
        if kind == "text":
            texts.append(value)
        elif kind == "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + value
        else:
            called = _called(value)
            calls += called.get("tool_calls", [])
            texts += [called["content"]] if "content" in called else []
    message["content"] = "".join(texts)
    return calls


def _called(text: str) -> Message:
    """What a ``function_call`` turn says: tool calls where it is JSON, else its text as it is."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return {"content": text}
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return {"content": text}
    return {"tool_calls": [_call(call, call.get("id")) for call in calls]}


def _call(function: dict[str, Any], call_id: Any) -> dict[str, Any]:
    """In the form that templates take: arguments as an object, not as JSON in text."""
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": call_id, **call} if isinstance(call_id, str) else call


def _tool_calls(value: Any, name: str, place: str) -> list[dict[str, Any]]:
    calls = []
    for index, entry in enumerate(_list(value, name, place)):
        function = entry.get("function", entry) if isinstance(entry, dict) else entry
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{place}: field '{name}[{index}]' must be an object with a name, got {shorten(entry)}")
        call_id = entry.get("id")
        calls.append(_call(function, None if call_id is None else _checked(call_id, f"{name}[{index}].id", place)))
    return calls


def _tools(fields: dict[str, Any], place: str) -> list[dict[str, Any]]:
    tools = []
    for index, given in enumerate(_list(_decoded(fields.get("tools"), "tools", place), "tools", place)):
        tool = _decoded(given, f"tools[{index}]", place)
        if not isinstance(tool, dict):
            raise DataError(f"{place}: field 'tools[{index}]' must be an object, got {_kind(tool)}")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tools


def _decoded(value: Any, field: str, place: str) -> Any:
    """A value that some files hold as JSON in text; empty text is none."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: field {field!r} is not valid JSON: {error}") from error


def _add_system(messages: list[Message], fields: dict[str, Any], place: str) -> None:
    system = _text(fields, "system", place, optional=True)
    if system:
        messages.append({"role": "system", "content": system})


# --- types ------------------------------------------------------------------------------------------------------------


def _text(fields: dict[str, Any], field: str, place: str, *, optional: bool = False) -> str:
    value = fields.get(field)
    if value is None and optional:
        return ""
    if field not in fields:
        raise DataError(f"{place}: field {field!r} is missing; it must be text")
    return _checked(value, field, place)


def _checked(value: Any, field: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: field {field!r} must be text, got {_kind(value)}")
    return value


def _list(value: Any, field: str, place: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(f"{place}: field {field!r} must be a list, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    """A value for a message, with what it is."""
    if value is None:
        return "null"
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return f"{shorten(value)} ({kinds.get(type(value), type(value).__name__)})"
