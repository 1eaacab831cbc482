"""Chats → text rendered by the tokenizer's chat template, and the turns in it that are trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os.path import commonprefix
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from distill_rl.align.chats import REASONING_KEYS, SWITCHES, CharSpan, Message, in_form, message_spans, render, text_of
from distill_rl.data.batch.turn_ends import closing_stop, with_stops
from distill_rl.data.reading.layouts import template_options
from distill_rl.errors import DataError, WorkerError
from distill_rl.system.template_budget import FIXED_DATE, LIMITED, within_budget

__all__ = ["render", "render_document", "roles_to_train_on"]

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CUT_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_TAG = re.compile(r"[<\[][^<>\[\]\s]*[>\]]")
_OPENED_THOUGHT = re.compile(
    r"(?:(?<=[>\]])\s+)?[<\[]\W?[\w:]*(?:think|thought|reason)\w*\W?[>\]](?:\s*[<\[]\W?/?[\w:]*(?:think|thought|reason)\w*\W?[>\]])?\s*\Z",
    re.IGNORECASE,
)
"""At the end of a header: a thought that is opened, and perhaps ended."""
_MARK = "\ue000"
_QUESTION = {"role": "user", "content": "?"}
T = TypeVar("T")
_KEPT: WeakKeyDictionary[Any, dict[str, dict[str, Any]]] = WeakKeyDictionary()
"""For a tokenizer: template, special tokens and variables → what was found of them (`_once`)."""
_MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class Write:
    """Messages → text with one tokenizer's template and one document's tools and variables."""

    tokenizer: Any
    options: Mapping[str, Any]
    known: dict[str, Any] = field(default_factory=dict)
    """What `_once` keeps"""

    @classmethod
    def of(cls, tokenizer: Any, document: Mapping[str, Any]) -> Write:
        """The one of a document, which shares what is known with others that have the same variables."""
        options = template_options(document)
        kept = _KEPT.setdefault(tokenizer, {})
        key = repr((tokenizer.chat_template, tokenizer.special_tokens_map, _without_tools(options)))
        if key not in kept and len(kept) >= _MOST_KEPT:
            kept.clear()
        return cls(tokenizer, options, kept.setdefault(key, {}))

    def __call__(self, messages: Sequence[Message], **more: Any) -> str:
        return render(self.tokenizer, messages, **self.options, **more)


def _without_tools(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "tools"}


def _once(find: Callable[[Write], T]) -> Callable[[Write], T]:
    """The same function, which looks only once for what a template writes in any chat with the same variables, without tools."""

    def known(write: Write) -> T:
        if find.__name__ not in write.known:
            write.known[find.__name__] = find(replace(write, options=_without_tools(write.options)))
        return write.known[find.__name__]

    return known


class Rendered(NamedTuple):
    """A chat's text, and what is trained on in it."""

    text: str
    spans: list[CharSpan] | None
    """Of characters that are trained on; None: all are."""
    written: str
    """The text as the template writes it, without a stop that is added behind the last turn."""


def roles_to_train_on(loss_on: str, loss_roles: Sequence[str]) -> tuple[str, ...]:
    """The roles whose turns are trained on by `data.loss_on` and `data.loss_roles`; empty: all tokens are."""
    return tuple(loss_roles) or (("assistant",) if loss_on == "assistant" else ())


@LIMITED
def render_document(
    tokenizer: Any,
    document: Mapping[str, Any],
    *,
    roles: Collection[str] = (),
    whose: str = "the student's tokenizer",
    stops: Collection[str] = (),
    text_only: bool = False,
) -> Rendered:
    """Renders a whole chat, and finds the character spans in it that are trained on.

    The span of an assistant's turn runs from the first character that the model would generate to the last one of the
    end-of-turn token, and so includes reasoning and tool calls. It is found by the first of these that works:

    1. The template's {% generation %} blocks, if it has any.
    2. Rendering the chat up to the turn and through it, for a template that writes a turn the same way whatever follows.
    3. Rendering the chat with another turn in its place: what stays the same around it is not the turn.

    Spans of other roles are those of their texts, without what the template writes around them. A turn that a switch takes
    out (SWITCHES: 0 or false) has no span.

    Args:
        document: with "row", "messages" and perhaps tools and variables (`Layout.document`).
        whose: the tokenizer, for error messages.
        stops: what the stop tokens are written as, for a template that ends a turn by the next role's token (`with_stops`).
        text_only: whether no spans are asked for, so that none has to be found.

    Raises:
        DataError: no chat template; a chat that the template refuses; turns that cannot be found in the text; a switch that
            is neither on nor off.
    """
    row, messages = document["row"], document["messages"]
    if not tokenizer.chat_template:
        remedy = "give it one, or train on text"
        raise DataError(f"row {row}", f"chat messages need a chat template; {whose} has none", remedy=remedy)
    write = Write.of(tokenizer, document)
    try:
        written = whole = write(messages)
    except (DataError, WorkerError):  # not a matter of this chat
        raise
    except Exception as error:  # a template can raise anything
        raise DataError(f"row {row}", f"a chat that the template of {whose} accepts", str(error)) from error
    off = [] if text_only else [i for i, message in enumerate(messages) if _is_off(message, i, row)]
    of_turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    off_turns = [i for i in of_turns if i in off]
    wanted = not text_only and ("assistant" in roles if roles else bool(off_turns))
    turns: list[CharSpan] = []
    if of_turns and wanted:
        found = _assistant_turns(tokenizer, write, messages, whole)
        if found is None:
            raise DataError(
                f"row {row}",
                "the chat template renders an assistant turn the same way in any conversation, or marks it with {% generation %}",
                "a template that rewrites earlier turns",
                "use data.loss_on=all or a template with {% generation %} blocks",
            )
        turns = found
    whole += closing_stop(write, messages, whole, stops)
    turns = with_stops(whole, turns, stops)
    if text_only or not (roles or off):
        return Rendered(whole, None, written)
    if wanted and off_turns and len(turns) != len(of_turns):
        rule = "the chat template marks every assistant turn once with {% generation %}, so that one can be taken out"
        raise DataError(f"row {row}", rule, f"{len(turns)} marked stretches for {len(of_turns)} turns")
    if roles:
        spans = [span for i, span in zip(of_turns, turns) if i not in off] if off_turns else turns
        spans = spans if "assistant" in roles else []
        others = {message["role"] for message in messages} & set(roles) - {"assistant"}
        if others:
            spans = spans + _texts_of_roles(write, messages, whole, others, row, off)
        return Rendered(whole, sorted(spans), written)
    without = [span for i, span in zip(of_turns, turns) if i in off]
    for i, texts in enumerate(message_spans(whole, messages, write)):
        without += texts if i in off and i not in of_turns else ()
    return Rendered(whole, _complement(sorted(without), len(whole)), written)


def _is_off(message: Message, place: int, row: int) -> bool:
    """Whether a switch takes a message out of what is trained on.

    Raises:
        DataError: a switch that is neither on nor off.
    """
    off = False
    for key in SWITCHES:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            rule = f"`{key}` of message {place} must be 0 or 1, false or true: it says whether the turn is trained on"
            raise DataError(f"row {row}", rule, repr(value), "write 0 or 1, or take the key out of the data")
        off |= not value
    return off


def _complement(spans: Sequence[CharSpan], length: int) -> list[CharSpan]:
    """What is left of a text without these spans."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2]) if stop > start]


def _texts_of_roles(
    write: Write, messages: Sequence[Message], whole: str, roles: Collection[str], row: int, off: Collection[int]
) -> list[CharSpan]:
    """The spans of the texts of all messages with one of these roles.

    Args:
        off: messages to leave out.

    Raises:
        DataError: a message with text of which the rendered chat has nothing.
    """
    found: list[CharSpan] = []
    for i, (message, spans) in enumerate(zip(messages, message_spans(whole, messages, write))):
        if message["role"] in roles and i not in off:
            written = [(start, stop) for start, stop in spans if stop > start]
            if not written and text_of(message).strip():
                rule = f"the chat template writes the content of a {message['role']} message as it is"
                raise DataError(f"row {row}", rule, "another text", "take the role out of data.loss_roles")
            found += written
    return found


def _assistant_turns(tokenizer: Any, write: Write, messages: Sequence[Message], whole: str) -> list[CharSpan] | None:
    """The spans of all assistant turns in the rendered chat, as `render_document` says; None if they cannot be found."""
    if _has_generation_blocks(tokenizer):
        blocks = _generation_blocks(write, messages)
        if blocks:
            return [_without_header(write, whole, block) for block in blocks]
    spans = _spans_by_prefix(write, messages, whole)
    return spans if spans is not None else _spans_by_exchange(write, messages, whole)


def _generation_blocks(write: Write, messages: Sequence[Message]) -> list[CharSpan]:
    """Where the {% generation %} blocks of the chat template stand in the rendered chat.

    By Transformers' own count of characters: its mask of tokens takes a token for a character that a tokenizer leaves out.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = in_form(write.tokenizer, messages)
    render_blocks = partial(
        render_jinja_template,
        conversations=[chat],
        chat_template=write.tokenizer.get_chat_template(tools=write.options.get("tools")),
        return_assistant_tokens_mask=True,
        **{**write.tokenizer.special_tokens_map, "strftime_now": FIXED_DATE, **write.options},
    )
    made: Any = within_budget(write.tokenizer, chat, write.options, render_blocks)
    return [(start, stop) for start, stop in made[1][0] if stop > start]


def _without_header(write: Write, whole: str, block: CharSpan) -> CharSpan:
    """What the model generates of a {% generation %} block, some of which hold the header, and the white space behind the turn."""
    start, stop = block
    try:
        opening, header, ends = _first_place(write).opening, _header(write), _ends_of_turn(write)
    except Exception:  # a template can raise anything
        return block
    headers = [text for text in (opening, header) if text]
    if any(whole.endswith(text, 0, start) for text in headers):
        headers = []  # one inside the block is what the model says
    given = next((text for text in headers if whole.startswith(text, start)), "")
    turn = whole[start + len(given) : stop]
    if any(end.strip() and turn.rstrip().endswith(end) for end in ends):
        turn = turn.rstrip()
    return start + len(given), start + len(given) + len(turn)


def _spans_by_prefix(write: Write, messages: Sequence[Message], whole: str) -> list[CharSpan] | None:
    """The span of each assistant turn in `whole`, by rendering the chat up to the turn and through it.

    None if the template rewrites earlier turns, or refuses a part of the chat.

    Args:
        whole: the rendered chat.
    """
    spans: list[CharSpan] = []
    try:
        ends, end_of_chat = _ends_of_turn(write), _end_of_chat(write)
    except Exception:  # a template can raise anything
        ends, end_of_chat = ("", ""), ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            through = whole if index + 1 == len(messages) else write(messages[: index + 1])
            place = _place_of_turn(write, messages[:index], through)
            start, last = place.start_in(write, whole), place.start_in(write, through)
        except Exception:  # a template can raise anything on a part of a chat
            return None
        if start is None or last is None:
            return None
        turn = _turn_in(whole[start:], through[last:].removesuffix(end_of_chat), text_of(message).strip(), ends)
        if turn is None:
            return None
        spans.append((start, start + len(turn)))
    return spans


@dataclass(frozen=True, slots=True)
class _Place:
    """What a template writes where an assistant's turn begins."""

    before: str
    """The text of the messages before the turn"""
    opening: str
    """The generation prompt that it writes there"""
    end: str
    """What it writes in its place at the end of a chat, behind the last turn"""

    def start_in(self, write: Write, text: str) -> int | None:
        """Where the turn starts in a text: what the model says, behind what the prompt gives it.

        That is behind the generation prompt, if the turn begins with all of it. A prompt may also open a thought, or write
        an empty one, that this turn does not have: then it is behind the role's header. None if the turn begins with
        neither, or the text before it is another.
        """
        if text.startswith(self.before + self.opening):
            return len(self.before) + len(self.opening)
        header = _header(write)
        return len(self.before) + len(header) if header and text.startswith(self.before + header) else None


def _place_of_turn(write: Write, before: Sequence[Message], through: str) -> _Place:
    """The place of the turn behind these messages; `through` is the rendered text up to the end of the turn."""
    # transformers cannot render an empty chat, so before a first turn its header is searched for; ValueError if it is not there.
    if before:
        written, prompt = write(before), write(before, add_generation_prompt=True)
        base = len(_common(written, prompt))
        return _Place(prompt[:base], prompt[base:], written[base:])
    place, header = _first_place(write), _header(write)
    if not header:
        raise ValueError("no header")
    return _Place(through[: through.index(header)], place.opening, place.end)


@_once
def _first_place(write: Write) -> _Place:
    """The place of an answer to a question."""
    return _place_of_turn(write, [_QUESTION], "")


@_once
def _header(write: Write) -> str:
    """The header of an assistant's turn: what the generation prompt has in common with a turn of one character, at the end
    of a chat and before another question, but for the thought that both may open.
    """
    mark = {"role": "assistant", "content": _MARK}
    place = _first_place(write)
    turns = [write([_QUESTION, mark]), write([_QUESTION, mark, _QUESTION])]
    common = _common(place.opening, *(turn[len(place.before) :] for turn in turns))
    return _OPENED_THOUGHT.sub("", common)


def _common(*texts: str) -> str:
    """The beginning that all texts share. Where it is none of them, it ends before a tag that it would cut (`<think>`, `[/INST]`)."""
    common = commonprefix(texts)  # noqa: RUF071 (character by character is intended)
    return common if common in texts else _CUT_TAG.sub("", common)


def _turn_in(rest: str, last: str, content: str, ends: tuple[str, str]) -> str | None:
    """The assistant's turn that `rest` starts with, up to its end-of-turn token; None if it does not start with it.

    Some templates write more before the content of the last turn than of earlier ones (a block of thought), and end it in
    another way; so the turn is the longest end of the last one that `rest` starts with, and that has the content, or the
    content without its block of thought.

    Args:
        rest: the whole rendered chat from the turn on.
        last: the turn as the template renders it at the end of a chat.
        content: the turn's stripped content.
        ends: as from `_ends_of_turn`.
    """
    contents = [content, content.rpartition("</think>")[2].strip()] if "</think>" in content else [content]
    forms = [last]
    if ends[0] and ends[0] != ends[1] and last.rstrip().endswith(ends[0]):
        forms.append(last.rstrip().removesuffix(ends[0]) + ends[1])
    if all(text not in last for text in contents):
        return next((form.rstrip() for form in forms if rest.startswith(form)), None)
    for form in forms:
        for text in filter(form.__contains__, contents):
            # White space after the end-of-turn token is not part of the turn, unless nothing else ends it.
            is_ended = any(end.strip() and form.rstrip().endswith(end.strip()) for end in ends)
            only_ends = is_ended or (form.strip() != text.strip() and not (text and form.rstrip().endswith(text)))
            turn = form.rstrip() if only_ends else form
            if not turn and not text:
                return ""
            place = turn.find(rest[:1])
            while 0 <= place < len(turn):
                if rest.startswith(turn[place:]) and text in turn[place:]:
                    return turn[place:]
                place = turn.find(rest[:1], place + 1)
    return None


def _spans_by_exchange(write: Write, messages: Sequence[Message], whole: str) -> list[CharSpan] | None:
    """The span of each assistant turn in `whole`, by rendering the chat with another turn in its place.

    Its texts occur nowhere else, so the turn is what differs, apart from the beginning that both turns share and from the
    end-of-turn token. None if other turns change with it, or the template refuses the chat or writes another content than
    the message's.
    """
    try:
        opening, header = _first_place(write).opening, _header(write)
        ends = [end for end in _ends_of_turn(write) if end]
        mark = {"role": "assistant", "content": _MARK}
        spans: list[CharSpan] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            behind = next(
                (k for k in range(i + 1, len(messages)) if messages[k]["role"] not in ("tool", "assistant")),
                len(messages),
            )
            begun = write([*messages[:i], mark, *messages[behind:]])
            same = len(commonprefix([whole, begun]))  # noqa: RUF071 (character by character is intended)
            earlier = spans[-1][1] if spans else 0
            # Without a prompt, white space before an answer is what the model says.
            start, base = len(whole[:same].rstrip()), whole.rfind(header, earlier, same) if header else -1
            if header:
                start = same
            if base >= 0:
                start = base + len(opening if whole.startswith(opening, base) else header)
            for exchanged in _exchanged(message):
                other = write([*messages[:i], exchanged, *messages[i + 1 :]])
                if _MARK in other:
                    break
            after = other[other.rindex(_MARK) + 1 :]  # ValueError: neither is written
            stop = len(whole) - len(after) + _end_in(after, [_last_end(write, exchanged), *ends])
            turn = whole[start:stop]
            content = text_of(message).rpartition("</think>")[2].strip()
            found = whole.endswith(after) and earlier <= start < stop and content in turn
            thinks = any(message.get(key) for key in REASONING_KEYS)  # which may have a header of its own
            if not found or (header and not thinks and header in turn.replace(content, "")):
                return None
            spans.append((start, stop))
    except Exception:  # a template can raise anything on another chat
        return None
    return spans


def _exchanged(message: Message) -> Iterator[Message]:
    """Yields turns of one character: a call in the place of calls, because templates refuse a result without one, and an answer."""
    if message.get("tool_calls"):
        call, *rest = message["tool_calls"]
        function = call.get("function", call)
        arguments: Any = {_MARK: _MARK}
        if isinstance(function.get("arguments"), str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        changed = {**function, "arguments": arguments}
        marked = {**call, "function": changed} if "function" in call else changed
        yield {"role": "assistant", "content": "", "tool_calls": [marked, *rest]}
    yield {"role": "assistant", "content": _MARK}


@_once
def _ends_of_turn(write: Write) -> tuple[str, str]:
    """What the template writes behind an assistant's turn: at the end of a chat, and before a user's turn; empty if it does not
    take such chats.

    They differ if it ends the last turn by another token, or writes the end of the whole chat. White space behind an
    end-of-turn token is not part of it, unless nothing else ends the turn.
    """
    turn = {"role": "assistant", "content": _MARK}
    try:
        last = _last_end(write, turn)
        middle, alone = write([_QUESTION, turn, _QUESTION]).partition(_MARK)[2], write([_QUESTION])
    except Exception:  # a template can raise anything
        return "", ""
    common = commonprefix([middle[::-1], alone[::-1]])  # noqa: RUF071 (character by character is intended)
    end = len(middle) - len(common)
    # What both share may begin inside the end-of-turn token; or with it, if another message ends in the same way.
    cut = _CUT_TAG.search(middle, 0, end)
    begun = cut.start() if cut else 0
    if (cut or (end == 0 and last.strip())) and (tag := _TAG.match(middle, begun)):
        end = tag.end()
    middle = middle[:end]
    return last, middle.rstrip() or middle


def _last_end(write: Write, turn: Message) -> str:
    """What the template writes behind the last mark in a turn at the end of a chat, up to the end of the turn."""
    text = write([_QUESTION, turn])
    end = text[text.rindex(_MARK) + 1 :].removesuffix(_end_of_chat(write))
    return end.rstrip() or end


def _end_in(after: str, ends: Sequence[str]) -> int:
    """Where the first end of a turn ends in a text; 0 if there is none."""
    places = [(after.find(end), -len(end)) for end in ends if end and end in after]
    place, size = min(places, default=(0, 0))
    return place - size


def _end_of_chat(write: Write) -> str:
    """What the template writes at the end of a chat in place of a generation prompt."""
    return _first_place(write).end


def _has_generation_blocks(tokenizer: Any) -> bool:
    """Whether the template, or one of several, has {% generation %} blocks."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template]
    return any(_GENERATION_BLOCK.search(text) for text in texts)
