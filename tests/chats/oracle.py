"""What must be learnt from a chat, by the marks in its template and by the words of its messages.

Nothing here uses the code under test. The marks say which characters the model generates; the words say it a second time
for all texts of the messages.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np

from tests.chats.kinds import LEARNT, WORD, Chat, Message, answer, inline, say, thought, user
from tests.chats.templates import CLOSE, OPEN, Template

Reason = Literal["template", "left out", "no stop"]
_THOUGHT = re.compile(r"tht\d+q[a-z]")


@dataclass(frozen=True, slots=True)
class Expected:
    """What must come of a chat: a reason to refuse it, or a text and which of its characters are learnt."""

    refused: Reason | None = None
    text: str = ""
    learnt: tuple[bool, ...] = ()
    """For each character of the text"""
    open: bool = False
    """Whether the last turn lacks the token that ends it, which one of `Template.ends` then follows"""


def expected(tokenizer: Any, template: Template, chat: Chat) -> Expected:
    """What must come of a chat.

    Args:
        tokenizer: one with this template; it names eos for it, and is used for nothing else.
    """
    marked = _write(tokenizer, template, chat)
    if marked is None:
        return Expected("template")
    text, learnt = _read_marks(marked)
    if _lacks(tokenizer, template, chat, text) or _lacks_names(chat, text, learnt):
        return Expected("left out")
    if template.no_stop:
        return Expected("no stop")
    is_open = bool(template.ends) and learnt[-1]
    return Expected(None, text, learnt, is_open)


def contradictions(chat: Chat, text: str, learnt: Sequence[bool]) -> list[str]:
    """The words of a chat's text whose characters are not learnt as the words alone say.

    All occurrences of an assistant's word are learnt, and none of another one. The name of a call also stands where the
    template lists tools or names the call of a result; as many occurrences of it are learnt as calls say it.

    Returns:
        one line for each word.
    """
    found = []
    for match in WORD.finditer(text):
        word, is_learnt = match[0], learnt[match.start() : match.end()]
        if not word.startswith("nam") and set(is_learnt) != {word.startswith(LEARNT)}:
            found.append(f"{word}: {'not ' if word.startswith(LEARNT) else ''}learnt")
    called, names = _names(chat), _learnt_names(text, learnt)
    return found + [f"{name}: learnt {names[name]} times" for name in called if names[name] != called[name]]


def labels(spans: Sequence[tuple[int, int]], learnt: Sequence[bool]) -> np.ndarray:
    """bool [n]: which tokens hold a learnt character.

    Args:
        spans: each token's first and stop place, in the same units as `learnt`.
    """
    return np.asarray([any(learnt[start:stop]) for start, stop in spans], dtype=bool)


def _write(tokenizer: Any, template: Template, chat: Chat) -> str | None:
    """The text with marks that the template makes of a chat; None if it refuses the chat.

    A content of null counts as an empty one where the template fails on it or writes it as a word.
    """
    messages = [_in_form(message, template) for message in chat.messages]
    text = _render(tokenizer, template, messages, chat.tools)
    if any(message["content"] is None for message in messages) and (text is None or "None" in text or "null" in text):
        messages = [{**message, "content": message["content"] or ""} for message in messages]
        text = _render(tokenizer, template, messages, chat.tools)
    return text


def _render(tokenizer: Any, template: Template, messages: list[Message], tools: list[dict[str, Any]]) -> str | None:
    """The text with marks; None if the template raises anything."""
    options = {"tools": tools} if tools else {}
    options |= template.variables
    try:
        return tokenizer.apply_chat_template(
            copy.deepcopy(messages),
            chat_template=template.marked,
            tokenize=False,
            strftime_now=datetime(2024, 7, 26).strftime,
            **options,
        )
    except Exception:  # a template can raise anything
        return None


def _in_form(message: Message, template: Template) -> Message:
    """A message with its arguments and its parts in the form that the template reads."""
    message = copy.deepcopy(message)
    if isinstance(message["content"], list) and not template.parts:
        message["content"] = "".join(part["text"] for part in message["content"])
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if template.arguments == "object" and isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"])
        if template.arguments == "text" and not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return message


def _lacks(tokenizer: Any, template: Template, chat: Chat, text: str) -> bool:
    """Whether a marked word of the chat is missing in its text.

    Thoughts of earlier turns do not count if the template writes such a thought at the end of a chat: it leaves them out
    on purpose.
    """
    missing = set(WORD.findall(json.dumps([chat.messages, chat.tools]))) - set(WORD.findall(text))
    for message in chat.messages[:-1]:
        for key in ("reasoning_content", "thinking", "content"):
            value = message.get(key)
            thoughts = set(_THOUGHT.findall(value)) if isinstance(value, str) else set()
            if thoughts & missing and _writes_thought(tokenizer, template, key):
                missing -= thoughts
    return bool(missing)


def _lacks_names(chat: Chat, text: str, learnt: Sequence[bool]) -> bool:
    """Whether the name of a call is missing among what the model generates."""
    return bool(_names(chat) - _learnt_names(text, learnt))


def _names(chat: Chat) -> Counter[str]:
    """How often the calls of a chat say each tool's name: as the name, and in arguments."""
    calls = (call for message in chat.messages for call in message.get("tool_calls", ()))
    words = (word for call in calls for word in WORD.findall(json.dumps(call["function"])))
    return Counter(word for word in words if word.startswith("nam"))


def _learnt_names(text: str, learnt: Sequence[bool]) -> Counter[str]:
    """How often each tool's name is learnt in a text."""
    words = (match for match in WORD.finditer(text) if match[0].startswith("nam"))
    return Counter(match[0] for match in words if all(learnt[match.start() : match.end()]))


def _writes_thought(tokenizer: Any, template: Template, key: str) -> bool:
    """Whether the template writes the thought of the last answer, under a key or inside the content."""
    last = answer(1, inline(1)) if key == "content" else answer(1, **thought(1, key))
    return say("tht", 1) in (_render(tokenizer, template, [user(1), last], []) or "")


def _read_marks(marked: str) -> tuple[str, tuple[bool, ...]]:
    """A text without its marks, and for each character whether it stood between them.

    Raises:
        ValueError: marks that do not alternate.
    """
    text, learnt, inside = [], [], False
    for character in marked:
        if character in (OPEN, CLOSE):
            if inside == (character == OPEN):
                raise ValueError(f"marks that do not alternate: {marked}")
            inside = not inside
        else:
            text.append(character)
            learnt.append(inside)
    if inside:
        raise ValueError(f"a mark that is not closed: {marked}")
    return "".join(text), tuple(learnt)
