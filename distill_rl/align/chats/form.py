"""The form in which a chat template reads tool calls and lists of text parts, found by rendering small chats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message under which data sets keep what an assistant thinks before it answers."""

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
    parts: bool
    """Whether it writes a content that is a list of text parts."""


_FORMS: WeakKeyDictionary[Any, tuple[str, TemplateForm]] = WeakKeyDictionary()


def in_template_form(tokenizer: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form that the tokenizer's chat template reads; the same list if they are in it.

    Data sets keep the arguments of tool calls as objects or as JSON text. A template that puts an object into its own
    JSON would write such text quoted twice, and one that joins texts fails on an object or writes Python's form of it.
    Text parts are joined for a template that does not read lists: as those that do, without anything between them.
    """
    has_calls = any(message.get("tool_calls") for message in messages)
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    if not has_calls and not has_parts:
        return messages
    form = template_form(tokenizer)
    if has_parts and not form.parts:
        messages = [
            {**message, "content": text_of(message)} if isinstance(message.get("content"), list) else message
            for message in messages
        ]
    if has_calls and form.arguments != "as given":
        messages = [
            {**message, "tool_calls": [_with_arguments(call, form.arguments) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]
    return messages


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
    template = repr(tokenizer.chat_template)
    known = _FORMS.get(tokenizer)
    if known is None or known[0] != template:
        known = template, TemplateForm(_arguments(tokenizer), _reads_parts(tokenizer))
        _FORMS[tokenizer] = known
    return known[1]


def _arguments(tokenizer: Any) -> Literal["as given", "object", "text"]:
    """How the template reads the arguments of a tool call; "as given" also if it writes neither form."""
    value = {"probe": _MARK}
    text = json.dumps(value, ensure_ascii=False)
    of_object, of_text = _render_call(tokenizer, value), _render_call(tokenizer, text)
    reads_object = _MARK in of_object and "{'probe'" not in of_object
    reads_text = text in of_text
    if reads_object == reads_text:
        return "as given"
    return "object" if reads_object else "text"


def _render_call(tokenizer: Any, arguments: Any) -> str:
    """A chat with one tool call, rendered; empty if the template fails on it.

    With a tool's result and an answer behind the call, if the template asks for them.
    """
    call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": "1"}
    for messages in (chat, [*chat, result, {"role": "assistant", "content": "1"}]):
        try:
            return tokenizer.apply_chat_template(messages, tools=[_TOOL], tokenize=False)
        except Exception:  # a template can raise anything
            continue
    return ""


def _reads_parts(tokenizer: Any) -> bool:
    """Whether the template writes a content of one text part as it writes the text."""
    texts = []
    for content in (_MARK, [{"type": "text", "text": _MARK}]):
        try:
            texts.append(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
        except Exception:  # a template can raise anything
            return False
    return texts[0] == texts[1]


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
