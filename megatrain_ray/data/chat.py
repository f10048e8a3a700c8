"""Chats as the tokenizer's own template renders them, and which part of the text is a target.

Targets are what the model has to produce: every assistant turn from the end of the generation prompt up to and
including its end marker. Where the template marks them itself (``{% generation %}``), its marks are used, else the
difference of prefixes: the text of the first n messages with a generation prompt, against that of the first n + 1. Some
templates render a turn differently once others follow (they drop earlier reasoning, or end the last turn with another
marker); then the turn is found by rendering the conversation once more with another answer in its place.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatrain_ray.data.formats import Conversation, Message, Unusable
from megatrain_ray.errors import DataError

__all__ = ["BUILT_IN_TEMPLATES", "ChatTemplate", "Rendered", "resolve_chat_template"]

Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANOTHER_ANSWER = "\ue000another answer\ue001"
"""Begins and ends with characters for private use, which no answer shares."""

BUILT_IN_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "alpaca": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}{% elif message['role'] == 'user' %}"
        "{{ '### Instruction:\n' + message['content'] + '\n\n' }}{% else %}{{ message['content'] + '\n\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
    ),
}
"""For base models, which bring no template: ``data.chat_template: alpaca``."""


def resolve_chat_template(given: str) -> str:
    """``data.chat_template``: the name of a built-in template, a file that holds one, or the template itself.

    Raises:
        DataError: It looks like a file, and there is none or it cannot be read.
    """
    if given in BUILT_IN_TEMPLATES:
        return BUILT_IN_TEMPLATES[given]
    if "{" in given or "\n" in given:
        return given
    if not Path(given).is_file():
        raise DataError(
            f"data.chat_template {given!r}: no such file, no template (it has no {{{{ }}}}), and none of the built-in "
            f"ones ({', '.join(BUILT_IN_TEMPLATES)})"
        )
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"data.chat_template {given!r}: not UTF-8 text") from error
    except OSError as error:
        raise DataError(f"data.chat_template {given!r}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: Special tokens included.
        targets: Characters ``[start, end)`` of each target, in order and apart; None: everything is a target.
    """

    text: str
    targets: tuple[Span, ...] | None


class ChatTemplate:
    """Renders conversations for training.

    Args:
        tokenizer: Of the model, with its chat template.
        assistant_only: Whether only assistant turns are targets.

    Raises:
        DataError: There is no template, or it is not valid.
    """

    def __init__(self, tokenizer: Any, *, assistant_only: bool) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template, and the data are chats; set data.chat_template to a Jinja "
                f"template, a file that holds one, or one of {', '.join(BUILT_IN_TEMPLATES)}"
            )
        self._tokenizer = tokenizer
        self._assistant_only = assistant_only
        template = tokenizer.chat_template
        self._source = template if isinstance(template, str) else "\n".join(template.values())
        self._markers = _special_tokens(tokenizer)
        self._header = self._generation_prompt()

    def render(self, conversation: Conversation) -> Rendered:
        """One conversation.

        Raises:
            Unusable: The template refuses it, or shows no assistant turn.
        """
        messages, tools = self._adapt(conversation)
        try:
            text = self._apply(messages, tools)
        except Unusable:
            # Some templates take a call's arguments as JSON in text.
            messages = _arguments_as_text(messages)
            text = self._apply(messages, tools)
        if not self._assistant_only:
            return Rendered(text, None)
        spans = self._marked(messages, tools, text) or self._differences(messages, tools, text)
        if any(start < end for (_, end), (start, _) in itertools.pairwise(spans)):
            raise Unusable("the chat template renders turns into one another, so targets cannot be told")
        trained = [message.get("trained", True) for message in messages if message["role"] == "assistant"]
        if not all(trained):
            if len(trained) != len(spans):
                raise Unusable("the chat template leaves out turns, so weights of turns cannot be told")
            spans = [span for span, wanted in zip(spans, trained, strict=True) if wanted]
        if not spans:
            raise Unusable("no assistant turn that is trained is rendered by the chat template")
        return Rendered(text, tuple(spans))

    # --- rendering ----------------------------------------------------------------------------------------------------

    def _apply(self, messages: list[Message], tools: list[dict[str, Any]], *, prompt: bool = False) -> str:
        shown = [{key: value for key, value in message.items() if key != "trained"} for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    shown, tools=tools or None, tokenize=False, add_generation_prompt=prompt
                )
            )
        except Exception as error:  # templates raise whatever they like, through Jinja
            if _is_broken(error):
                raise DataError(f"the chat template is not valid: {error}") from error
            raise Unusable(f"the chat template refuses it: {_first_line(error)}") from error

    def _maybe(self, messages: list[Message], tools: list[dict[str, Any]], *, prompt: bool = False) -> str | None:
        with contextlib.suppress(Unusable):
            return self._apply(messages, tools, prompt=prompt) if messages else None
        return None

    def _generation_prompt(self) -> str:
        messages = [{"role": "user", "content": "x"}]
        with_prompt, without = self._maybe(messages, [], prompt=True), self._maybe(messages, [])
        if with_prompt is None or without is None or not with_prompt.startswith(without):
            return ""
        return with_prompt[len(without) :]

    def _adapt(self, conversation: Conversation) -> tuple[list[Message], list[dict[str, Any]]]:
        """Puts into words what the template does not know: tools, calls, reasoning."""
        messages = [self._in_words(dict(message)) for message in conversation.messages]
        tools = conversation.tools
        if tools and not self._knows("tools"):
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            words = f"You may call these functions:\n<tools>\n{listed}\n</tools>\n" + _CALL_FORMAT
            if messages[0]["role"] == "system":
                messages[0]["content"] = "\n\n".join(filter(None, (messages[0]["content"], words)))
            else:
                messages.insert(0, {"role": "system", "content": words})
            tools = []
        return messages, tools

    def _in_words(self, message: Message) -> Message:
        if message["role"] == "developer" and not self._knows("developer"):
            message["role"] = "system"
        if "tool_calls" in message and not self._knows("tool_calls"):
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.pop("tool_calls")]
            words = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
            message["content"] = "\n".join(filter(None, (message["content"], words)))
        reasoning = message.get("reasoning_content")
        if reasoning is not None and not self._knows("reasoning_content"):
            del message["reasoning_content"]
            if self._knows("thinking"):
                message["thinking"] = reasoning
            else:
                message["content"] = f"<think>\n{reasoning.strip()}\n</think>\n\n{message['content']}"
        return message

    def _knows(self, name: str) -> bool:
        return re.search(rf"\b{name}\b", self._source) is not None

    # --- targets ------------------------------------------------------------------------------------------------------

    def _marked(self, messages: list[Message], tools: list[dict[str, Any]], text: str) -> list[Span]:
        """What the template marks with ``{% generation %}``; nothing where it marks nothing."""
        if not _GENERATION.search(self._source):
            return []
        from transformers.utils.chat_template_utils import render_jinja_template

        shown = [{key: value for key, value in message.items() if key != "trained"} for message in messages]
        rendered, marks = cast(Any, render_jinja_template)(
            conversations=[shown],
            tools=tools or None,
            chat_template=self._tokenizer.get_chat_template(None, tools or None),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        if rendered[0] != text:
            return []
        return [(start, self._finish(text, start, end)) for start, end in marks[0]]

    def _differences(self, messages: list[Message], tools: list[dict[str, Any]], text: str) -> list[Span]:
        spans: list[Span] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._maybe(messages[:index], tools, prompt=True) or ""
            through = self._maybe(messages[: index + 1], tools) or ""
            if before and through.startswith(before) and through != before and text.startswith(through):
                spans.append((len(before), self._finish(text, len(before), len(through))))
            else:
                span = self._by_another_answer(messages, tools, text, index, spans[-1][1] if spans else 0)
                spans += [span] if span else []
        return spans

    def _by_another_answer(
        self, messages: list[Message], tools: list[dict[str, Any]], text: str, index: int, previous_end: int
    ) -> Span | None:
        """A turn is where the conversation changes when only this turn does. None: the template does not show it."""
        other = [*messages[:index], {"role": "assistant", "content": _ANOTHER_ANSWER}, *messages[index + 1 :]]
        changed = self._maybe(other, tools)
        if changed is None or _ANOTHER_ANSWER not in changed:
            return None
        start = _common_prefix(text, changed)
        same = _common_prefix(text[start:][::-1], changed[start:][::-1])
        end = len(text) - same
        header = text.rfind(self._header, previous_end, start) if self._header else -1
        return (start if header < 0 else header + len(self._header), self._with_next_marker(text, end))

    def _finish(self, text: str, start: int, end: int) -> int:
        """The end of a turn with its marker, and without the space after it, which no model has to produce."""
        marker_end = self._marker_end(text, start, end)
        return self._with_next_marker(text, end) if marker_end is None else marker_end

    def _with_next_marker(self, text: str, end: int) -> int:
        """A special token that follows a turn ends it, unless it starts an assistant's turn."""
        match = self._markers.match(text, end) if self._markers else None
        if match is None or (self._header and self._header.startswith(match[1])):
            return end
        return match.end()

    def _marker_end(self, text: str, start: int, end: int) -> int | None:
        """Where the marker ends with which this part of the text ends, space aside."""
        bare = start + len(text[start:end].rstrip())
        matches = self._markers.finditer(text, start, end) if self._markers else ()
        return bare if any(match.end() == bare for match in matches) else None


_CALL_FORMAT = (
    "To call one, answer with its name and arguments:\n"
    '<tool_call>\n{"name": "function name", "arguments": {"argument name": "value"}}\n</tool_call>'
)


def _special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches, after any space, one of the tokenizer's special tokens."""
    tokens = {str(token) for token in tokenizer.all_special_tokens}
    tokens |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()}
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile(rf"\s*({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def _arguments_as_text(messages: list[Message]) -> list[Message]:
    changed = copy.deepcopy(messages)
    for message in changed:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return changed


def _common_prefix(first: str, second: str) -> int:
    """Characters that two texts share at their start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _is_broken(error: Exception) -> bool:
    import jinja2

    return isinstance(error, jinja2.TemplateSyntaxError)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
