"""Chats → text rendered by the tokenizer's chat template, the turns in it that are trained on, and what a template leaves out."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from os.path import commonprefix
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from distill_rl.align.chats import (
    REASONING_KEYS,
    SWITCHES,
    CharSpan,
    Message,
    any_of,
    in_form,
    message_spans,
    quoted_spans,
    render,
    text_of,
)
from distill_rl.data.reading.layouts import SHAREGPT_ROLES, template_options
from distill_rl.errors import DataError, WorkerError
from distill_rl.system.template_budget import FIXED_DATE, LIMITED, within_budget

_THOUGHT = "<think> in content"
_TRAINED_ON = frozenset({"content", "tool_calls", "function_call", _THOUGHT, *REASONING_KEYS})
"""Keys that hold what a model reads or writes; others, such as names and ids, describe a message."""
_NOT_WRITTEN = frozenset({"role", *SWITCHES})
"""Keys that are not for the template."""
_PATIENCE = 16
"""A key that was not written in this many messages is taken to be ignored in all, which saves rendering them; one that was
rewritten in as many, to be written in all."""
_USUAL_ROLES = {**SHAREGPT_ROLES, "developer": "system", "function": "tool"}
"""Role of other tools → the one that most templates know."""

_CALL = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {}}}

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
P = ParamSpec("P")
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


def _if_refused(result: Any) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """The same function, with this result where the template fails on a chat, or text is not found: a template can raise anything."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def tried(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except Exception:
                return result

        return tried

    return decorate


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
    stops_in_text: bool = False,
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
        document: with "row", "messages" and perhaps tools and variables (`RowLayout.document`).
        whose: the tokenizer, for error messages.
        stops: what the stop tokens are written as, for a template that ends a turn by the next role's token (`with_stops`).
        stops_in_text: whether the text of a stop inside a message is that stop, and ends a turn.
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
            rule = "the chat template renders an assistant turn the same way in any conversation, or marks it with {% generation %}"
            remedy = "use data.loss_on=all or a template with {% generation %} blocks"
            raise DataError(f"row {row}", rule, "a template that rewrites earlier turns", remedy)
        turns = found
    without_quotes = whole if stops_in_text else _without_quotes(write, messages, whole, stops)
    closing = closing_stop(write, messages, without_quotes, stops)
    whole += closing
    turns = with_stops(without_quotes + closing, turns, stops)
    if text_only or not (roles or off):
        return Rendered(whole, None, written)
    if wanted and off_turns and len(turns) != len(of_turns):
        rule = "the chat template marks every assistant turn once with {% generation %}, so that one can be taken out"
        raise DataError(f"row {row}", rule, f"{len(turns)} marked stretches for {len(of_turns)} turns")
    if roles:
        spans = turns if "assistant" in roles else []
        if spans and off_turns:
            spans = [turns[k] for k, i in enumerate(of_turns) if i not in off]
        others = {message["role"] for message in messages} & set(roles) - {"assistant"}
        if others:
            spans = spans + _texts_of_roles(write, messages, whole, others, row, off)
        return Rendered(whole, sorted(spans), written)
    without = [turns[k] for k, i in enumerate(of_turns) if i in off]
    for i, texts in enumerate(message_spans(whole, messages, write)):
        without += texts if i in off and i not in of_turns else ()
    return Rendered(whole, _complement(sorted(without), len(whole)), written)


def _is_off(message: Message, place: int, row: int) -> bool:
    """Whether a switch takes a message out of what is trained on."""
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
    starts, stops = [0, *(stop for _, stop in spans)], [*(start for start, _ in spans), length]
    return [(start, stops[i]) for i, start in enumerate(starts) if stops[i] > start]


def _texts_of_roles(
    write: Write, messages: Sequence[Message], whole: str, roles: Collection[str], row: int, off: Collection[int]
) -> list[CharSpan]:
    found: list[CharSpan] = []
    for i, spans in enumerate(message_spans(whole, messages, write)):
        message = messages[i]
        if message["role"] in roles and i not in off:
            written = [(start, stop) for start, stop in spans if stop > start]
            if not written and text_of(message).strip():
                rule = f"the chat template writes the content of a {message['role']} message as it is"
                raise DataError(f"row {row}", rule, "another text", "take the role out of data.loss_roles")
            found += written
    return found


def _assistant_turns(tokenizer: Any, write: Write, messages: Sequence[Message], whole: str) -> list[CharSpan] | None:
    """The spans of all assistant turns in the rendered chat, as `render_document` says; None if they cannot be found."""
    template = tokenizer.chat_template  # or several
    texts = template.values() if isinstance(template, dict) else [template]
    if any(map(_GENERATION_BLOCK.search, texts)) and (blocks := _generation_blocks(write, messages)):
        return [_without_header(write, whole, block) for block in blocks]
    spans = _spans_by_prefix(write, messages, whole)
    return spans if spans is not None else _spans_by_exchange(write, messages, whole)


def _generation_blocks(write: Write, messages: Sequence[Message]) -> list[CharSpan]:
    """Where the {% generation %} blocks of the chat template stand in the rendered chat."""
    # By Transformers' own count of characters: its mask of tokens takes a token for a character that a tokenizer leaves
    # out.
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


@_if_refused(None)
def _spans_by_prefix(write: Write, messages: Sequence[Message], whole: str) -> list[CharSpan] | None:
    """The span of each assistant turn in `whole`, by rendering the chat up to the turn and through it."""
    # None if the template rewrites earlier turns, or refuses a part of the chat.
    spans: list[CharSpan] = []
    ends, end_of_chat = _ends_of_turn(write), _if_refused("")(_end_of_chat)(write)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        through = whole if index + 1 == len(messages) else write(messages[: index + 1])
        place = _place_of_turn(write, messages[:index], through)
        start, last = place.start_in(write, whole), place.start_in(write, through)
        if start is None or last is None:
            return None
        turn = _turn_in(whole[start:], through[last:].removesuffix(end_of_chat), text_of(message).strip(), ends)
        if turn is None:
            return None
        spans.append((start, start + len(turn)))
    return spans


@dataclass(frozen=True, slots=True)
class _TurnPlace:
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


def _place_of_turn(write: Write, before: Sequence[Message], through: str) -> _TurnPlace:
    """The place of the turn behind these messages; `through` is the rendered text up to the end of the turn."""
    # transformers cannot render an empty chat, so before a first turn its header is searched for; ValueError if it is not there.
    if before:
        written, prompt = write(before), write(before, add_generation_prompt=True)
        base = len(_common(written, prompt))
        return _TurnPlace(prompt[:base], prompt[base:], written[base:])
    place, header = _first_place(write), _header(write)
    if not header:
        raise ValueError("no header")
    return _TurnPlace(through[: through.index(header)], place.opening, place.end)


@_once
def _first_place(write: Write) -> _TurnPlace:
    return _place_of_turn(write, [_QUESTION], "")


@_once
def _header(write: Write) -> str:
    # The header of an assistant's turn: what the generation prompt has in common with a turn of one character, at the
    # end of a chat and before another question, but for the thought that both may open.
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
    """The assistant's turn that `rest` starts with, up to its end-of-turn token; None if it does not start with it."""
    # Some templates write more before the content of the last turn than of earlier ones (a block of thought), and end
    # it in another way; so the turn is the longest end of the last one that `rest` starts with, and that has the
    # content, or the content without its block of thought.
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


@_if_refused(None)
def _spans_by_exchange(write: Write, messages: Sequence[Message], whole: str) -> list[CharSpan] | None:
    """The span of each assistant turn in `whole`, by rendering the chat with another turn in its place."""
    # Its texts occur nowhere else, so the turn is what differs, apart from the beginning that both turns share and from
    # the end-of-turn token. None if other turns change with it, or the template refuses the chat or writes another
    # content than the message's.
    opening, header = _first_place(write).opening, _header(write)
    ends = [end for end in _ends_of_turn(write) if end]
    mark = {"role": "assistant", "content": _MARK}
    spans: list[CharSpan] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        others = (k for k in range(i + 1, len(messages)) if messages[k]["role"] not in ("tool", "assistant"))
        behind = next(others, len(messages))
        begun = write([*messages[:i], mark, *messages[behind:]])
        same = len(commonprefix([whole, begun]))  # noqa: RUF071 (character by character is intended)
        earlier = spans[-1][1] if spans else 0
        # Without a prompt, white space before an answer is what the model says.
        start, base = same if header else len(whole[:same].rstrip()), whole.rfind(header, earlier, same)
        if header and base >= 0:
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
@_if_refused(("", ""))
def _ends_of_turn(write: Write) -> tuple[str, str]:
    # What the template writes behind an assistant's turn: at the end of a chat, and before a user's turn; empty if it
    # does not take such chats.
    # They differ if it ends the last turn by another token, or writes the end of the whole chat. White space behind an
    # end-of-turn token is not part of it, unless nothing else ends the turn.
    turn = {"role": "assistant", "content": _MARK}
    last = _last_end(write, turn)
    middle, alone = write([_QUESTION, turn, _QUESTION]).partition(_MARK)[2], write([_QUESTION])
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


# Some templates write nothing behind an answer (GLM): the next turn begins with its role's token, and generation stops there. That
# token is a stop, so it is part of the turn. The last turn of a chat then has no end, so its next role's token is written behind it.


@_if_refused("")
def closing_stop(
    write: Callable[..., str], messages: Sequence[Mapping[str, Any]], whole: str, stops: Collection[str]
) -> str:
    """The stop that ends the last turn of a chat, where the template leaves it to the next role; empty if it ends it itself.

    Args:
        write: messages → text with the template.
        whole: the rendered chat, without stops that messages quote.
        stops: what the stop tokens are written as.
    """
    last = messages[-1]
    if not stops or last["role"] != "assistant" or _ends_in_stop(whole, stops):
        return ""
    # What the template writes behind such a turn before a tool's result, or a user's turn.
    calls = [_CALL] if last.get("tool_calls") else []
    turn = {"role": "assistant", "content": "", "tool_calls": calls} if calls else {"role": "assistant", "content": "."}
    result = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": _MARK}
    chat = [_QUESTION, turn, result if calls else {"role": "user", "content": _MARK}]
    written, text = write(chat[:2]), write(chat)
    return _first_stop(text[len(written) :], stops) if text.startswith(written) else ""


def with_stops(whole: str, turns: Sequence[CharSpan], stops: Collection[str]) -> list[CharSpan]:
    """The assistant turns of a rendered chat, each with the stop token that ends it.

    A turn that ends in a stop already is left as it is, and so is one behind which no stop follows.

    Args:
        turns: their spans.
        stops: what the stop tokens are written as.
    """
    return [
        (start, stop if _ends_in_stop(whole[start:stop], stops) else stop + len(_first_stop(whole[stop:], stops)))
        for start, stop in turns
    ]


def _without_quotes(write: Write, messages: Sequence[Message], whole: str, stops: Collection[str]) -> str:
    """A rendered chat with another character in place of all those of the stops that messages quote, which end no turn."""
    for start, stop in quoted_spans(whole, messages, write, any_of(stops)):
        whole = whole[:start] + _MARK * (stop - start) + whole[stop:]
    return whole


def _first_stop(text: str, stops: Collection[str]) -> str:
    """The stop that a text begins with; empty if it begins with none."""
    return max((stop for stop in stops if text.startswith(stop)), key=len, default="")


def _ends_in_stop(turn: str, stops: Collection[str]) -> bool:
    """Whether a turn, or a whole chat, ends in a stop, but for white space."""
    return any(turn.rstrip().endswith(stop) for stop in stops)


# What a chat template leaves out of a chat: what its text does not contain, and does not change with.


@dataclass(frozen=True, slots=True)
class ChatPart:
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
    def left_out(self, document: Mapping[str, Any], text: str) -> tuple[ChatPart, ...]:
        """The parts of a document that the template leaves out; empty texts and lists do not count.

        Args:
            document: as from `RowLayout.document`.
            text: the template's output for it.
        """
        messages, options = document["messages"], template_options(document)
        chat = RenderedChat(partial(render, self.tokenizer, **options), messages, text)
        missing: dict[ChatPart, None] = {}
        unsure: dict[ChatPart, None] = {}
        for i, message in enumerate(messages):
            keys = [key for key, value in message.items() if key not in _NOT_WRITTEN and not _is_blank(value)]
            kind = message["role"], frozenset(keys), len(message.get("tool_calls") or ())
            for key in keys:
                part = ChatPart(message["role"], key)
                if not part.trained_on:
                    if part not in self._written:
                        unsure[part] = None
                        if self._misses[part] < _PATIENCE:
                            self._record(part, chat.changes_with_key(i, key))
                elif not self._writes(chat, i, key, kind):
                    missing[part] = None
            if chat.cuts_thought(i):
                missing[ChatPart(message["role"], _THOUGHT)] = None
        for key, value in options.items():
            part = ChatPart("", key)
            if part in self._written or _is_blank(value):
                continue
            unsure[part] = None
            if self._misses[part] < _PATIENCE:
                others = {name: other for name, other in options.items() if name != key}
                without = partial(render, self.tokenizer, messages, **others)
                self._record(part, _differs(lambda: text, without) is not False)
        return (*missing, *(part for part in unsure if part not in self._written))

    def _writes(self, chat: RenderedChat, i: int, key: str, kind: Hashable) -> bool:
        """Whether the template writes a key of message i that is trained on: a text, or all of its tool calls."""
        value, known = chat.messages[i][key], (kind, key)
        found = all(_occurs(part, chat.text) for part in _texts_in(value))
        if known in self._written and (found or self._rewritten[known] >= _PATIENCE):
            return True
        if known not in self._written and self._misses[known] >= _PATIENCE:
            return False
        written = chat.changes_with_key(i, key)
        if key == "tool_calls" and isinstance(value, list | tuple):
            written = written and all(chat.writes_call(i, call) for call in range(len(value)))
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

    def remedy(self, part: ChatPart) -> str:
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
        if is_written:
            self._written.add(part)
        else:
            self._misses[part] += 1


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat and its text, to find out what the template writes of it: what the text changes with."""

    write: Callable[..., str]
    """Messages → text with the template"""
    messages: Sequence[Message]
    text: str

    def changes_with_key(self, i: int, key: str) -> bool:
        """Whether the text changes with a key of message i."""
        # For a thought, or what describes a message, also whether that of the chat up to the message does. True as well
        # if the template refuses every chat without the key, since it must have read it.
        message = self.messages[i]
        changed = {name: value for name, value in message.items() if name != key}
        if isinstance(message[key], str) or key == "content":
            changed[key] = _MARK
        _, ends, answer = text_of(message).rpartition("</think>")
        is_thought = key == "content" and bool(ends) and not answer.strip()
        return self._changes(i, changed, only_last=is_thought or key not in ("content", "tool_calls", "function_call"))

    def _changes(self, i: int, changed: Message, *, only_last: bool = False) -> bool:
        """The same with another message in the place of message i."""
        before, after = self.messages[:i], self.messages[i + 1 :]
        whole = _differs(lambda: self.text, lambda: self.write([*before, changed, *after]))
        if not after or whole or (whole is False and not only_last):
            return whole is not False
        alone = _differs(lambda: self.write([*before, self.messages[i]]), lambda: self.write([*before, changed]))
        return bool(alone) or (whole is None and alone is None)

    def writes_call(self, i: int, call: int) -> bool:
        """Whether the text changes with one of the tool calls of message i, with its name and with its arguments."""
        calls = self.messages[i]["tool_calls"]
        before, given, after = calls[:call], calls[call], calls[call + 1 :]
        if len(calls) > 1 and not self._changes(i, {**self.messages[i], "tool_calls": [*before, *after]}):
            return False
        function = given.get("function", given) if isinstance(given, Mapping) else {}
        function = function if isinstance(function, Mapping) else {}
        others = [{**function, "name": _MARK}] if function.get("name") else []
        if function.get("arguments"):
            others += [{**function, "arguments": arguments} for arguments in _with_less(function["arguments"])]
        changed = [{**given, "function": other} if "function" in given else other for other in others]
        return all(self._changes(i, {**self.messages[i], "tool_calls": [*before, other, *after]}) for other in changed)

    @_if_refused(False)
    def cuts_thought(self, i: int) -> bool:
        """Whether the template cuts a thought out of the content of message i, also where the message is the last one."""
        thought = _divided(text_of(self.messages[i]))[0].strip()
        texts = (lambda: self.text), (lambda: self.write(self.messages[: i + 1]))
        return bool(thought) and not any(_occurs(thought, text()) for text in texts)


def _with_less(arguments: Any) -> Iterator[Any]:
    """Yields the arguments of a call without one of them each, in the form that they have."""
    is_text = isinstance(arguments, str)
    value = _parsed(arguments) if is_text else arguments
    keys = value.keys() if isinstance(value, Mapping) else ()
    for less in [{key: value[key] for key in keys if key != left} for left in keys] or [{}]:
        yield json.dumps(less, ensure_ascii=False) if is_text else less


def _divided(content: str) -> tuple[str, str]:
    """The thought in a content, and the rest of it. A model whose prompt opens the thought writes no `<think>`."""
    thought, ends, answer = content.partition("</think>")
    _, begins, inside = thought.partition("<think>")
    return (inside if begins else thought, answer) if ends else ("", content)


def _texts_in(value: Any) -> Iterator[str]:
    """Yields what a reader of a value would look for: texts and numbers; names and arguments of tool calls."""
    if isinstance(value, str):
        yield _divided(value)[1]  # a thought is looked for by `cuts_thought`
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


@_if_refused(None)
def _differs(first: Callable[[], str], second: Callable[[], str]) -> bool | None:
    return first() != second()


def _is_blank(value: Any) -> bool:
    return not (value.strip() if isinstance(value, str) else value)
