"""Chats: each side's own template, and where the messages stand in what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

Message = Mapping[str, Any]
CharSpan = tuple[int, int]
Render = Callable[[list[dict[str, Any]]], str]


def render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Any:
    """The chat template's text; templates that print today's date get a fixed one, so that no answer depends on the day.

    Args:
        options: of the tokenizer's `apply_chat_template`.

    Raises:
        ValueError: a tokenizer without a chat template.
        jinja2.TemplateError: a chat that the template refuses.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"messages need a tokenizer with a chat template, {type(tokenizer).__name__} has none; give it one, or use text"
        )
    today = datetime(2024, 7, 26).strftime
    chat = [dict(message) for message in messages]
    return tokenizer.apply_chat_template(chat, **{"strftime_now": today, "tokenize": False, **options})


def content_spans(rendered: str, messages: Sequence[Message], render: Render | None = None) -> tuple[CharSpan, ...]:
    """Where each message's content stands in a rendered chat, as it is or stripped.

    Args:
        render: messages → text by the same template. With it the template's own words are told from the messages'
            (a content of "user" is not looked for in a header); without it each content is taken where it is first
            found behind the one before.
    Returns:
        Character spans in order; an empty one for a content that is empty or that the template does not write.
    """
    contents = [message.get("content") or "" for message in messages]
    contents = [content if isinstance(content, str) else "" for content in contents]
    spans = _by_skeleton(rendered, messages, contents, render) if render else None
    return spans if spans is not None else _by_search(rendered, contents)


def _forms(content: str) -> list[str]:
    return list(dict.fromkeys((content, content.strip(), content.lstrip(), content.rstrip())))


def _by_search(rendered: str, contents: list[str]) -> tuple[CharSpan, ...]:
    spans, cursor = [], 0
    for content in contents:
        found = next((form for form in _forms(content) if form and rendered.find(form, cursor) >= 0), "")
        start = rendered.find(found, cursor) if found else cursor
        cursor = start + len(found)
        spans.append((start, cursor))
    return tuple(spans)


def _by_skeleton(
    rendered: str, messages: Sequence[Message], contents: list[str], render: Render
) -> tuple[CharSpan, ...] | None:
    """The spans between what the template writes around contents that appear in no text; None if that is not it."""
    marks = [f"\ue000{number}\ue001" for number in range(len(messages))]
    try:
        skeleton = render([{**message, "content": mark} for message, mark in zip(messages, marks)])
    except Exception:  # some templates refuse what they do not know; the search by content remains
        return None
    pieces, found = [], []
    for number, mark in enumerate(marks):
        before, hit, rest = skeleton.partition(mark)
        if hit:
            pieces.append(before)
            found.append(number)
            skeleton = rest
    pieces.append(skeleton)
    spans: dict[int, CharSpan] = {}
    cursor = 0
    for number, before, after in zip(found, pieces, pieces[1:]):
        if not rendered.startswith(before, cursor):
            return None
        cursor += len(before)
        last = number == found[-1]
        forms = (form for form in _forms(contents[number]) if rendered.startswith(form + after, cursor))
        form = next((form for form in forms if not last or cursor + len(form + after) == len(rendered)), None)
        if form is None:
            return None
        spans[number] = (cursor, cursor + len(form))
        cursor += len(form)
    place, whole = 0, []
    for number in range(len(messages)):
        start, place = spans.get(number, (place, place))
        whole.append((start, place))
    return tuple(whole)
