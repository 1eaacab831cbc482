"""Finds what a chat template leaves out of a chat, by rendering it with and without."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from distill_rl.align.chats.form import REASONING_KEYS
from distill_rl.align.chats.rendering import Message, render
from distill_rl.data.reading.convert import SHAREGPT_ROLES
from distill_rl.data.reading.layouts import template_options
from distill_rl.errors import DataError

_TRAINED_ON = frozenset({"content", "tool_calls", "function_call", *REASONING_KEYS})
"""Keys that hold what a model reads or writes; others, such as names and ids, describe a message."""
_PATIENCE = 16
"""A key that was not written in this many messages is taken to be ignored in all, which saves rendering them."""
_MARK = "\ue000"
_USUAL_ROLES = {**SHAREGPT_ROLES, "developer": "system", "function": "tool"}
"""Role of other tools → the one that most templates know."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of chats: a key of the messages of a role, the tools, or a variable of the template."""

    role: str
    """Empty for what does not belong to a message."""
    key: str

    @property
    def trained_on(self) -> bool:
        """Whether the part holds what a model reads or writes."""
        return self.key in _TRAINED_ON if self.role else self.key == "tools"

    def __str__(self) -> str:
        if self.role:
            return f"`{self.key}` of {self.role} messages"
        return "the tools" if self.key == "tools" else f"the variable `{self.key}`"


class TemplateCoverage:
    """What one tokenizer's chat template writes of the chats that it renders.

    A part counts as written if the text of some chat changes with it. The chat is rendered whole and, if that makes no
    difference, up to the message: templates leave out the reasoning of earlier turns on purpose, and only a template
    that does not write a key in a chat's last message ignores it. A part that was written once is not looked at again,
    so the cost is a few more renderings in all, not in every chat.

    Args:
        whose: the tokenizer, for messages (`the student's tokenizer`).
    """

    def __init__(self, tokenizer: Any, whose: str):
        self.tokenizer, self.whose = tokenizer, whose
        self._written: set[Part] = set()
        self._misses: Counter[Part] = Counter()

    def left_out(self, document: Mapping[str, Any], text: str) -> tuple[Part, ...]:
        """The parts of a document that the template leaves out; empty texts and lists do not count.

        Args:
            document: as from `Layout.document`.
            text: the template's output for it.
        """
        messages, options = document["messages"], template_options(document)
        write = partial(render, self.tokenizer)
        seen: dict[Part, None] = {}
        for i, message in enumerate(messages):
            for key, value in message.items():
                part = Part(message["role"], key)
                if key == "role" or part in self._written or _is_blank(value):
                    continue
                seen[part] = None
                if self._misses[part] < _PATIENCE:
                    self._record(part, _message_changes(write, messages, i, key, text, options))
        for key, value in options.items():
            part = Part("", key)
            if part in self._written or _is_blank(value):
                continue
            seen[part] = None
            if self._misses[part] < _PATIENCE:
                others = {name: other for name, other in options.items() if name != key}
                self._record(part, _differs(lambda: text, partial(write, messages, **others)) is not False)
        return tuple(part for part in seen if part not in self._written)

    def check(self, document: Mapping[str, Any], text: str, unrendered: Literal["fail", "warn"]) -> tuple[str, ...]:
        """Words for the parts of a document that the template leaves out (`left_out`).

        Raises:
            DataError: with `unrendered` "fail", one of them is something that a model reads or writes; names the row.
        """
        parts = self.left_out(document, text)
        trained_on = [part for part in parts if part.trained_on]
        if trained_on and unrendered == "fail":
            rule = f"the chat template of {self.whose} writes all of a chat"
            found = f"a template that leaves out {', '.join(map(str, trained_on))}"
            raise DataError(f"row {document['row']}", rule, found, self.remedy(trained_on[0]))
        return tuple(f"{part}, by the chat template of {self.whose}" for part in parts)

    def remedy(self, part: Part) -> str:
        """What the user can do about a part that is left out."""
        template = str(self.tokenizer.chat_template)
        known = [key for key in REASONING_KEYS if re.search(rf"\b{key}\b", template)]
        if part.key in REASONING_KEYS and known and part.key not in known:
            return f"the template reads `{known[0]}`: rename the key, or set data.unrendered=warn"
        usual = _USUAL_ROLES.get(part.role, part.role)
        if part.key == "content" and usual != part.role:
            return f"most templates call this role {usual}: rename it, or set data.unrendered=warn"
        return "use a tokenizer whose template writes it, take it out of the data, or set data.unrendered=warn"

    def _record(self, part: Part, is_written: bool) -> None:
        """Records whether some text changed with a part."""
        if is_written:
            self._written.add(part)
        else:
            self._misses[part] += 1


def _message_changes(
    write: Callable[..., str], messages: Sequence[Message], i: int, key: str, text: str, options: Mapping[str, Any]
) -> bool:
    """Whether the text of a chat, or of the chat up to message i, changes with a key of that message.

    True as well if the template refuses every chat without the key, since it must have read it.

    Args:
        text: of the whole chat.
        options: of the chat, besides its messages.
    """
    message = messages[i]
    changed = {name: value for name, value in message.items() if name != key}
    if isinstance(message[key], str) or key == "content":
        changed[key] = _MARK
    before, after = messages[:i], messages[i + 1 :]
    whole = _differs(lambda: text, lambda: write([*before, changed, *after], **options))
    if whole or not after:
        return whole is not False
    alone = _differs(lambda: write([*before, message], **options), lambda: write([*before, changed], **options))
    return bool(alone) or (whole is None and alone is None)


def _differs(first: Callable[[], str], second: Callable[[], str]) -> bool | None:
    """Whether two texts differ; None if a template refuses one of the chats."""
    try:
        return first() != second()
    except Exception:  # a template can raise anything
        return None


def _is_blank(value: Any) -> bool:
    """Whether a value says nothing: null, false, an empty list, or text of white space."""
    return not (value.strip() if isinstance(value, str) else value)
