"""The form in which a chat template reads contents and tool calls, found by rendering small chats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from distill_rl.system.template_budget import within_budget

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message under which data sets keep what an assistant thinks before it answers."""

SWITCHES = ("weight", "train", "loss", "train_on_turn", "mask")
"""Keys by which data sets take a turn out of what is trained on."""

_MARK = "\ue000"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"probe": {"type": "string", "description": ""}},
            "required": [],
        },
    },
}


@dataclass(frozen=True, slots=True)
class TemplateForm:
    arguments: Literal["as given", "object", "text"]
    """How the template reads the arguments of a tool call: as an object, as its JSON text, or either way."""
    content: Literal["text", "parts", "either"]
    """How it reads a content: as a text, as a list of text parts, or either way."""
    null: bool
    """Whether it reads a content that is null as one that is empty, and does not write a word for it."""


_FORMS: WeakKeyDictionary[Any, tuple[Any, TemplateForm]] = WeakKeyDictionary()


def in_template_form(tokenizer: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form that the tokenizer's chat template reads.

    Data sets keep the arguments of tool calls as objects or as JSON text. A template that puts an object into its own
    JSON would write such text quoted twice, and one that joins texts fails on an object or writes Python's form of it.
    Text parts are joined for a template that does not read lists: as those that do, without anything between them. For one
    that reads nothing else, a text becomes a list of one part. A content that is null is "" for a template that fails on
    null, or writes it as a word.
    """
    form = template_form(tokenizer)
    return [_in_form(message, form) for message in messages]


def _in_form(message: dict[str, Any], form: TemplateForm) -> dict[str, Any]:
    content = message.get("content")
    changed: dict[str, Any] = {}
    if content is None and not form.null:
        changed["content"] = content = ""
    if isinstance(content, list) and form.content == "text":
        changed["content"] = text_of(message)
    elif isinstance(content, str) and form.content == "parts":
        changed["content"] = [{"type": "text", "text": content}]
    if message.get("tool_calls") and form.arguments != "as given":
        changed["tool_calls"] = [_with_arguments(call, form.arguments) for call in message["tool_calls"]]
    return message | changed if changed else message


def text_of(message: Mapping[str, Any]) -> str:
    """A message's content as one text: that of its text parts joined; empty for a content that is missing or null."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def texts_of(document: Mapping[str, Any]) -> list[str]:
    """The texts of a row that are not empty: its own, or the contents of its messages."""
    texts = map(text_of, document["messages"]) if "messages" in document else (document["text"],)
    return [text for text in texts if text]


def template_form(tokenizer: Any) -> TemplateForm:
    """The form that the tokenizer's chat template reads; found once for every tokenizer and template."""
    template = tokenizer.chat_template
    known = _FORMS.get(tokenizer)
    if known is None or known[0] != template:
        known = template, TemplateForm(_arguments(tokenizer), _content(tokenizer), _reads_null(tokenizer))
        _FORMS[tokenizer] = known
    return known[1]


def _arguments(tokenizer: Any) -> Literal["as given", "object", "text"]:
    """How the template reads the arguments of a tool call; "as given" also if it writes neither form."""
    value = {"probe": _MARK}
    text = json.dumps(value, ensure_ascii=False)
    of_object, of_text = _render_call(tokenizer, value) or "", _render_call(tokenizer, text) or ""
    reads_object = _MARK in of_object and "{'probe'" not in of_object
    reads_text = text in of_text
    if reads_object == reads_text:
        return "as given"
    return "object" if reads_object else "text"


def _render_call(tokenizer: Any, arguments: Any, content: str | None = "") -> str | None:
    """A chat with one tool call, rendered; None if the template fails on it.

    With a tool's result and an answer behind the call, if the template asks for them.
    """
    call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    result = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": "1"}
    turn: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
    chat = [{"role": "user", "content": "?"}, turn]
    return _rendered(tokenizer, chat, [*chat, result, {"role": "assistant", "content": "1"}])


def _rendered(tokenizer: Any, *chats: list[dict[str, Any]]) -> str | None:
    """The first chat that the template accepts, rendered; None if it accepts none."""
    for messages in chats:
        try:
            options: dict[str, Any] = {"tools": [_TOOL], "tokenize": False}
            return within_budget(
                tokenizer, messages, options, partial(tokenizer.apply_chat_template, messages, **options)
            )
        except Exception:  # a template can raise anything
            continue
    return None


def _content(tokenizer: Any) -> Literal["text", "parts", "either"]:
    """How the template reads a user's content; "text" also if it writes neither form."""
    forms: tuple[Any, Any] = _MARK, [{"type": "text", "text": _MARK}]
    of_text, of_parts = (_rendered(tokenizer, [{"role": "user", "content": form}]) or "" for form in forms)
    if _MARK not in of_text and _MARK in of_parts:
        return "parts"
    return "either" if of_text == of_parts else "text"


def _reads_null(tokenizer: Any) -> bool:
    """Whether the template reads a content that is null beside a tool call as an empty one, and writes no word for it."""
    null, empty = (_render_call(tokenizer, {}, content) for content in (None, ""))
    if null is None and empty is None:  # it does not take calls
        question = {"role": "user", "content": "?"}
        answers: list[dict[str, Any]] = [{"role": "assistant", "content": content} for content in (None, "")]
        null, empty = (_rendered(tokenizer, [question, answer]) for answer in answers)
    if null is None or empty is None:
        return null is not None
    return all(null.count(word) <= empty.count(word) for word in ("None", "null"))


def _with_arguments(call: Any, form: Literal["object", "text"]) -> Any:
    """A tool call with its arguments in one form; itself if they are in it, or are not JSON of an object."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if form == "text" and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif form == "object" and isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            return call
        if not isinstance(value, dict):
            return call
        arguments = value
    else:
        return call
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed
