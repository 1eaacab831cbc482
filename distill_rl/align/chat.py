"""Chats: rendering with a side's own template, and finding the messages' contents in the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

Message = Mapping[str, Any]
CharSpan = tuple[int, int]
Render = Callable[[list[dict[str, Any]]], str]


def render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Any:
    """The text that the tokenizer's chat template makes of the messages, which are not modified.

    Templates that print today's date get a fixed one (2024-07-26), so that results do not depend on the day.

    Args:
        options: for the tokenizer's `apply_chat_template`, above the defaults; with `tokenize=True` the result is what
            that method then returns.

    Raises:
        ValueError: a tokenizer without a chat template.
        jinja2.TemplateError: a chat that the template rejects.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"messages need a tokenizer with a chat template, {type(tokenizer).__name__} has none; give it one, or use text"
        )
    fixed_date = datetime(2024, 7, 26).strftime
    chat = [dict(message) for message in messages]
    return tokenizer.apply_chat_template(chat, **{"strftime_now": fixed_date, "tokenize": False, **options})


def content_spans(rendered: str, messages: Sequence[Message], render: Render | None = None) -> tuple[CharSpan, ...]:
    """Where each message's content stands in a rendered chat, as it is or stripped; one span per message, in order.

    With `render`, the chat is rendered a second time with unique markers as contents. The text around the markers is
    what the template writes, so the contents of the original lie between the same pieces of text; a content of "user"
    is not mistaken for a header. Without `render`, or if that fails, each content is searched for from the end of the
    content before it.

    Args:
        rendered: the chat template's text for these messages.
        render: messages → text with the same template; None: only the search is used.
    Returns:
        (start, stop) in characters of `rendered`; an empty span for a content that is empty, is not text, or that the
            template does not write.
    """
    contents = [message.get("content") or "" for message in messages]
    contents = [content if isinstance(content, str) else "" for content in contents]
    spans = _spans_by_markers(rendered, messages, contents, render) if render else None
    return spans if spans is not None else _spans_by_search(rendered, contents)


def _forms(content: str) -> list[str]:
    """The forms in which a template may write a content, each once: as it is, stripped, stripped left or right."""
    return list(dict.fromkeys((content, content.strip(), content.lstrip(), content.rstrip())))


def _spans_by_search(rendered: str, contents: list[str]) -> tuple[CharSpan, ...]:
    """The character span of each content, searched for in order, each behind the end of the one before it.

    A content that is empty or does not occur gets an empty span at that place.
    """
    spans, cursor = [], 0
    for content in contents:
        written = next((form for form in _forms(content) if form and rendered.find(form, cursor) >= 0), "")
        start = rendered.find(written, cursor) if written else cursor
        cursor = start + len(written)
        spans.append((start, cursor))
    return tuple(spans)


def _spans_by_markers(
    rendered: str, messages: Sequence[Message], contents: list[str], render: Render
) -> tuple[CharSpan, ...] | None:
    """The contents' spans, by rendering the chat again with unique markers in place of the contents.

    What surrounds the markers is the template's own text. A content that the template leaves out gets an empty span
    behind the one before it. None if the template fails on the markers, or if the rendered chat does not have the same
    text around the contents.
    """
    markers = [f"\ue000{i}\ue001" for i in range(len(messages))]
    try:
        rest = render([{**message, "content": marker} for message, marker in zip(messages, markers)])
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
        if not rendered.startswith(before, cursor):
            return None
        cursor += len(before)
        is_last = i == written[-1]
        form = None
        for candidate in _forms(contents[i]):
            followed = rendered.startswith(candidate + after, cursor)
            if followed and (not is_last or cursor + len(candidate + after) == len(rendered)):
                form = candidate
                break
        if form is None:
            return None
        spans[i] = (cursor, cursor + len(form))
        cursor += len(form)

    # A content that the template leaves out gets an empty span behind the content before it.
    end, all_spans = 0, []
    for i in range(len(messages)):
        start, end = spans.get(i, (end, end))
        all_spans.append((start, end))
    return tuple(all_spans)
