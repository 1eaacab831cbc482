"""Chats: rendering with a side's own template, the form that a template reads, and finding the messages' texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from distill_rl.system.template_budget import FIXED_DATE, within_budget

# The form in which a chat template reads contents and tool calls, found by rendering small chats.

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message under which data sets keep what an assistant thinks before it answers."""

SWITCHES = ("weight", "train", "loss", "train_on_turn", "mask")
"""Keys by which data sets take a turn out of what is trained on."""

Message = Mapping[str, Any]
CharSpan = tuple[int, int]
Render = Callable[[list[dict[str, Any]]], str]

_MARK = "\ue000"
_PARAMETERS = {"type": "object", "properties": {"probe": {"type": "string", "description": ""}}, "required": []}
_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": _PARAMETERS}}


@dataclass(frozen=True, slots=True)
class TemplateForm:
    arguments: Literal["as given", "object", "text"]
    """How the template reads the arguments of a tool call: as an object, as its JSON text, or either way."""
    content: Literal["text", "parts", "either"]
    """How it reads a content: as a text, as a list of text parts, or either way."""
    null: bool
    """Whether it reads a content that is null as one that is empty, and does not write a word for it."""


_FORMS: WeakKeyDictionary[Any, tuple[Any, TemplateForm]] = WeakKeyDictionary()


def in_form(tokenizer: Any, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in the form that the tokenizer's chat template reads.

    Data sets keep the arguments of tool calls as objects or as JSON text. A template that puts an object into its own
    JSON would write such text quoted twice, and one that joins texts fails on an object or writes Python's form of it.
    Text parts are joined for a template that does not read lists: as those that do, without anything between them. For one
    that reads nothing else, a text becomes a list of one part. A content that is null is "" for a template that fails on
    null, or writes it as a word.
    """
    form = template_form(tokenizer)
    return [_in_form(dict(message), form) for message in messages]


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
    """A chat with one tool call, rendered; None if the template fails on it."""
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
            write = partial(tokenizer.apply_chat_template, messages, **options)
            return within_budget(tokenizer, messages, options, write)
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


# Chats: rendering with a side's own template, and finding the messages' texts in the result.


@dataclass(frozen=True, slots=True)
class Chat:
    """A row of chats."""

    messages: Sequence[Message]
    options: Mapping[str, Any] = field(default_factory=dict)
    """What a chat template gets besides the messages, such as `tools`."""


def render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Any:
    """The text that the tokenizer's chat template makes of the messages, which are not modified.

    The template gets every key of the messages. Arguments of tool calls, and contents that are lists of text parts, are
    first brought into a form that it reads (`in_form`). Templates that print today's date get a fixed one
    (2024-07-26), so that results do not depend on the day.

    Args:
        options: for the tokenizer's `apply_chat_template`, above the defaults, such as `tools`; with `tokenize=True`
            the result is what that method then returns.

    Raises:
        ValueError: a tokenizer without a chat template.
        DataError: a template that takes too much time or memory (`within_budget`).
        jinja2.TemplateError: a chat that the template rejects. A template can also raise any other exception.
    """
    if not getattr(tokenizer, "chat_template", None):
        rule = f"messages need a tokenizer with a chat template, {type(tokenizer).__name__} has none"
        raise ValueError(f"{rule}; give it one, or use text")
    options = {"strftime_now": FIXED_DATE, "tokenize": False, **options}
    chat = in_form(tokenizer, messages)
    return within_budget(tokenizer, chat, options, lambda: tokenizer.apply_chat_template(chat, **options))


def content_spans(rendered: str, messages: Sequence[Message], render: Render | None = None) -> tuple[CharSpan, ...]:
    """Where the messages' texts stand in a rendered chat, in order; the spans of `message_spans`, one after another."""
    return tuple(span for spans in message_spans(rendered, messages, render) for span in spans)


def message_spans(
    rendered: str, messages: Sequence[Message], render: Render | None = None
) -> tuple[tuple[CharSpan, ...], ...]:
    """Where each message's texts stand in a rendered chat, in order and without overlap.

    A message has one span for its content and, if it has them, one before it for each text of reasoning and two behind
    it for each tool call (name, arguments). Their number depends on the message only, so that two templates give
    equally many.

    With `render`, the chat is rendered a second time with unique markers as contents. The text around the markers is
    what the template writes, so the contents of the original lie between the same pieces of text; a content of "user"
    is not mistaken for a header. Without `render`, or where that fails, each content is searched for from the end of the
    content before it. Reasoning and tool calls are searched for between the contents.

    Args:
        rendered: the chat template's text for these messages.
        render: messages → text with the same template; None: only the search is used.
    Returns:
        (start, stop) in characters of `rendered`; an empty span for a text that is empty or that the template does not
            write.
    """
    contents = [text_of(message) for message in messages]
    by_markers = _spans_by_markers(rendered, messages, contents, render) if render else None
    spans = by_markers if by_markers is not None else _spans_by_search(rendered, contents)
    cursor, result = 0, []
    for i, message in enumerate(messages):
        next_content = next((start for start, stop in spans[i + 1 :] if stop > start), len(rendered))
        result.append(_texts_of(rendered, message, spans[i], cursor, next_content))
        cursor = result[-1][-1][1]
    return tuple(result)


def _texts_of(rendered: str, message: Message, content: CharSpan, cursor: int, stop: int) -> tuple[CharSpan, ...]:
    """The spans of one message's texts: reasoning, content, and name and arguments of each tool call."""
    spans: list[CharSpan] = []
    limit = content[0] if content[1] > content[0] else stop
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            spans.append(_find(rendered, _forms(message[key]), cursor, limit))
            cursor = spans[-1][1]
    spans.append(content if content[1] > content[0] else (cursor, cursor))
    cursor = spans[-1][1]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = _find(rendered, _argument_forms(function.get("arguments")), cursor, stop)
        before = arguments[0] if arguments[1] > arguments[0] else stop
        name = str(function.get("name") or "")
        # The last occurrence: the template's own words come before the name.
        place = rendered.rfind(name, cursor, before) if name else -1
        spans.append((place, place + len(name)) if place >= 0 else (cursor, cursor))
        spans.append(arguments if arguments[1] > arguments[0] else (spans[-1][1], spans[-1][1]))
        cursor = spans[-1][1]
    return tuple(spans)


def _find(rendered: str, forms: Sequence[str], start: int, stop: int) -> CharSpan:
    """The first occurrence of the first of these forms between two places; an empty span at `start` if there is none."""
    for form in filter(None, forms):
        place = rendered.find(form, start, stop)
        if place >= 0:
            return place, place + len(form)
    return start, start


def _forms(content: str) -> list[str]:
    return list(dict.fromkeys((content, content.strip(), content.lstrip(), content.rstrip())))


def _argument_forms(arguments: Any) -> list[str]:
    """The forms in which a template may write a call's arguments, which are an object or its JSON text."""
    texts = [arguments] if isinstance(arguments, str) else []
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        texts.append(json.dumps(value, ensure_ascii=False))
    except (ValueError, TypeError):
        pass
    return texts if arguments else []


def _spans_by_search(rendered: str, contents: list[str], cursor: int = 0) -> tuple[CharSpan, ...]:
    """The character span of each content, searched for in order from a place, each behind the end of the one before it."""
    # A content that is empty or does not occur gets an empty span at that place.
    spans = []
    for content in contents:
        written = next((form for form in _forms(content) if form and rendered.find(form, cursor) >= 0), "")
        start = rendered.find(written, cursor) if written else cursor
        cursor = start + len(written)
        spans.append((start, cursor))
    return tuple(spans)


def _spans_by_markers(
    rendered: str, messages: Sequence[Message], contents: list[str], render: Render
) -> tuple[CharSpan, ...] | None:
    """The contents' spans, by rendering the chat again with unique markers in place of the contents."""
    # What surrounds the markers is the template's own text. A content that is empty, or that the template leaves out,
    # gets an empty span behind the one before it. From the first one on around which the rendered chat does not have
    # the same text, contents are searched for. None if the template fails on the markers.
    markers = [f"\ue000{i}\ue001" for i in range(len(messages))]
    # An empty content stays: some templates write more around one that is not empty.
    marked = [{**m, "content": marker} if text else dict(m) for m, marker, text in zip(messages, markers, contents)]
    try:
        rest = render(marked)
    except Exception:  # some templates reject unknown contents; the search remains
        return None
    written, template_parts = [], []
    for i, marker in enumerate(markers):
        before, hit, after = rest.partition(marker)
        if hit:
            template_parts.append(before)
            written.append(i)
            rest = after
    template_parts.append(rest)

    spans: dict[int, CharSpan] = {}
    cursor = 0
    for i, before, after in zip(written, template_parts, template_parts[1:]):
        start = cursor + len(before)
        thoughtless = contents[i].rpartition("</think>")[2]  # some templates cut the thought of earlier turns
        forms = dict.fromkeys([*_forms(contents[i]), *_forms(thoughtless)])
        fitting = [form for form in forms if rendered.startswith(form + after, start)]
        if i == written[-1]:
            # What reaches the end of the chat comes first; a stop may be written behind it.
            fitting.sort(key=lambda form: start + len(form + after) != len(rendered))
        is_behind = rendered.startswith(before, cursor)
        if not is_behind or not fitting:
            later = [text if k in written else "" for k, text in enumerate(contents) if k >= i]
            spans |= dict(enumerate(_spans_by_search(rendered, later, start if is_behind else cursor), i))
            break
        cursor = start + len(fitting[0])
        spans[i] = start, cursor

    # A content that the template leaves out gets an empty span behind the content before it.
    end, all_spans = 0, []
    for i in range(len(messages)):
        start, end = spans.get(i, (end, end))
        all_spans.append((start, end))
    return tuple(all_spans)
