"""Finds what a chat template leaves out of a chat: what its text does not contain, and does not change with."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from distill_rl.align.chats import REASONING_KEYS, SWITCHES, Message, render, text_of
from distill_rl.data.reading.convert import SHAREGPT_ROLES
from distill_rl.data.reading.layouts import template_options
from distill_rl.errors import DataError
from distill_rl.system.template_budget import LIMITED

_THOUGHT = "<think> in content"
_TRAINED_ON = frozenset({"content", "tool_calls", "function_call", _THOUGHT, *REASONING_KEYS})
"""Keys that hold what a model reads or writes; others, such as names and ids, describe a message."""
_NOT_WRITTEN = frozenset({"role", *SWITCHES})
"""Keys that are not for the template."""
_PATIENCE = 16
"""A key that was not written in this many messages is taken to be ignored in all, which saves rendering them; one that was
rewritten in as many, to be written in all."""
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

    @property
    def column(self) -> str:
        """The key of the messages that holds it."""
        return "content" if self.key == _THOUGHT else self.key

    def __str__(self) -> str:
        if self.role:
            return f"`{self.key}` of {self.role} messages"
        return "the tools" if self.key == "tools" else f"the variable `{self.key}`"


class TemplateCoverage:
    """What one tokenizer's chat template writes of the chats that it renders.

    Every content, thought and tool call is looked for in the text. One that is not found as it is, or as JSON has it, may
    have been rewritten; so the chat is rendered without it, and for a thought, if that makes no difference, up to its message:
    templates leave out the reasoning of earlier turns on purpose. The first message of each kind (role, keys, number of
    calls) is rendered without each of its keys whether they are found or not, because a text can also occur elsewhere. Other
    keys, tools and variables count as written once the text of some chat has changed with them.

    Args:
        whose: the tokenizer, for messages (`the student's tokenizer`).
    """

    def __init__(self, tokenizer: Any, whose: str):
        self.tokenizer, self.whose = tokenizer, whose
        self._written: set[Hashable] = set()
        """Parts; and parts of a kind of message."""
        self._misses: Counter[Hashable] = Counter()
        self._rewritten: Counter[Hashable] = Counter()

    @LIMITED
    def left_out(self, document: Mapping[str, Any], text: str) -> tuple[Part, ...]:
        """The parts of a document that the template leaves out; empty texts and lists do not count.

        Args:
            document: as from `Layout.document`.
            text: the template's output for it.
        """
        messages, options = document["messages"], template_options(document)
        write = partial(render, self.tokenizer, **options)
        missing: dict[Part, None] = {}
        unsure: dict[Part, None] = {}
        for i, message in enumerate(messages):
            keys = [key for key, value in message.items() if key not in _NOT_WRITTEN and not _is_blank(value)]
            kind = message["role"], frozenset(keys), len(message.get("tool_calls") or ())
            for key in keys:
                part = Part(message["role"], key)
                if not part.trained_on:
                    if part not in self._written:
                        unsure[part] = None
                        if self._misses[part] < _PATIENCE:
                            self._record(part, _message_changes(write, messages, i, key, text))
                elif not self._writes(write, messages, i, key, kind, text):
                    missing[part] = None
            if _cuts_thought(write, messages, i, text):
                missing[Part(message["role"], _THOUGHT)] = None
        for key, value in options.items():
            part = Part("", key)
            if part in self._written or _is_blank(value):
                continue
            unsure[part] = None
            if self._misses[part] < _PATIENCE:
                others = {name: other for name, other in options.items() if name != key}
                self._record(
                    part, _differs(lambda: text, partial(render, self.tokenizer, messages, **others)) is not False
                )
        return (*missing, *(part for part in unsure if part not in self._written))

    def _writes(
        self, write: Callable[..., str], messages: Sequence[Message], i: int, key: str, kind: Hashable, text: str
    ) -> bool:
        """Whether the template writes a key of message i that is trained on: a text, or all of its tool calls.

        Args:
            kind: of the message.
        """
        value, known = messages[i][key], (kind, key)
        found = all(_occurs(part, text) for part in _texts_in(value))
        if known in self._written and (found or self._rewritten[known] >= _PATIENCE):
            return True
        if known not in self._written and self._misses[known] >= _PATIENCE:
            return False
        written = _message_changes(write, messages, i, key, text)
        if key == "tool_calls" and isinstance(value, list | tuple):
            written = written and all(_writes_call(write, messages, i, call, text) for call in range(len(value)))
        self._record(known, written)
        self._rewritten[known] += written and not found
        return written

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

    def _record(self, part: Hashable, is_written: bool) -> None:
        """Records whether some text changed with a part."""
        if is_written:
            self._written.add(part)
        else:
            self._misses[part] += 1


def _message_changes(write: Callable[..., str], messages: Sequence[Message], i: int, key: str, text: str) -> bool:
    """Whether the text of a chat changes with a key of message i; for a thought, or what describes a message, also whether
    that of the chat up to the message does.

    True as well if the template refuses every chat without the key, since it must have read it.

    Args:
        text: of the whole chat.
    """
    message = messages[i]
    changed = {name: value for name, value in message.items() if name != key}
    if isinstance(message[key], str) or key == "content":
        changed[key] = _MARK
    _, ends, answer = text_of(message).rpartition("</think>")
    only_last = key not in ("content", "tool_calls", "function_call") or bool(
        key == "content" and ends and not answer.strip()
    )
    return _changes(write, messages, i, changed, text, only_last=only_last)


def _changes(
    write: Callable[..., str],
    messages: Sequence[Message],
    i: int,
    changed: Message,
    text: str,
    *,
    only_last: bool = False,
) -> bool:
    """The same with another message in the place of message i.

    Args:
        only_last: whether a change counts that only a chat up to the message shows.
    """
    before, after = messages[:i], messages[i + 1 :]
    whole = _differs(lambda: text, lambda: write([*before, changed, *after]))
    if not after or whole or (whole is False and not only_last):
        return whole is not False
    alone = _differs(lambda: write([*before, messages[i]]), lambda: write([*before, changed]))
    return bool(alone) or (whole is None and alone is None)


def _writes_call(write: Callable[..., str], messages: Sequence[Message], i: int, call: int, text: str) -> bool:
    """Whether the text changes with one of the tool calls of message i, with its name and with its arguments."""
    calls = messages[i]["tool_calls"]
    without = {**messages[i], "tool_calls": [*calls[:call], *calls[call + 1 :]]}
    if len(calls) > 1 and not _changes(write, messages, i, without, text):
        return False
    function = calls[call].get("function", calls[call]) if isinstance(calls[call], Mapping) else {}
    others: list[Mapping[str, Any]] = []
    if isinstance(function, Mapping) and function.get("name"):
        others.append({**function, "name": _MARK})
    if isinstance(function, Mapping) and function.get("arguments"):
        others += [{**function, "arguments": arguments} for arguments in _with_less(function["arguments"])]
    for other in others:
        whole = {**calls[call], "function": other} if "function" in calls[call] else other
        changed = {**messages[i], "tool_calls": [*calls[:call], whole, *calls[call + 1 :]]}
        if not _changes(write, messages, i, changed, text):
            return False
    return True


def _with_less(arguments: Any) -> Iterator[Any]:
    """Yields the arguments of a call without one of them each, in the form that they have."""
    is_text = isinstance(arguments, str)
    value = _parsed(arguments) if is_text else arguments
    kept = (
        [{key: other for key, other in value.items() if key != left} for left in value]
        if isinstance(value, Mapping)
        else []
    )
    for less in kept or [{}]:
        yield json.dumps(less, ensure_ascii=False) if is_text else less


def _cuts_thought(write: Callable[..., str], messages: Sequence[Message], i: int, text: str) -> bool:
    """Whether the template cuts a thought out of the content of message i, also where the message is the last one."""
    thought, ends, _ = text_of(messages[i]).partition("</think>")
    thought = thought.partition("<think>")[2].strip()
    if not ends or not thought or thought in text:
        return False
    try:
        return thought not in write(messages[: i + 1])
    except Exception:  # a template can raise anything
        return False


def _texts_in(value: Any) -> Iterator[str]:
    """Yields what a reader of a value would look for: texts and numbers; names and arguments of tool calls."""
    if isinstance(value, str):
        before, ends, after = value.partition("</think>")
        yield after if ends and "<think>" in before else value  # a thought is looked for by `_cuts_thought`
    elif isinstance(value, Mapping):
        if "function" in value:
            value = value["function"]
        for key, item in value.items() if isinstance(value, Mapping) else ():
            if key == "arguments" and isinstance(item, str):
                yield from _texts_in(_parsed(item))
            elif key not in ("id", "type", "index"):
                yield from _texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _occurs(part: str, text: str) -> bool:
    """Whether a text contains another one, but for white space around it, or as JSON writes it."""
    part = part.strip()
    return part in text or any(json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))


def _differs(first: Callable[[], str], second: Callable[[], str]) -> bool | None:
    """Whether two texts differ; None if a template refuses one of the chats."""
    try:
        return first() != second()
    except Exception:  # a template can raise anything
        return None


def _is_blank(value: Any) -> bool:
    """Whether a value says nothing: null, false, an empty list, or text of white space."""
    return not (value.strip() if isinstance(value, str) else value)
