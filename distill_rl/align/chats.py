"""Chats: rendering with a side's own template, the form that a template reads, and finding the messages' texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from os.path import commonprefix
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

from distill_rl.align.marks import Marks, TextPlace, bare_forms
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
    """Where the messages' texts stand in a rendered chat; the spans of `message_spans`, one after another."""
    return tuple(span for spans in message_spans(rendered, messages, render) for span in spans)


def message_spans(
    rendered: str, messages: Sequence[Message], render: Render | None = None
) -> tuple[tuple[CharSpan, ...], ...]:
    """Where each message's texts stand in a rendered chat.

    A message has one span for its content and, if it has them, one before it for each text of reasoning and two behind
    it for each tool call (name, arguments).

    Args:
        rendered, messages, render: as for `find_texts`.
    Returns:
        (start, stop) in characters of `rendered`, from the first to the last piece of each text; an empty span for a text
            that is empty, that the template does not write, or whose place is not known.
    """
    end, result = 0, []
    for texts in find_texts(rendered, messages, render).pieces:
        spans = []
        for pieces in texts:
            written = [piece for piece in pieces if piece[1] > piece[0]] or [(end, end)]
            spans.append((min(start for start, _ in written), max(stop for _, stop in written)))
            end = spans[-1][1]
        result.append(tuple(spans))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class FoundTexts:
    """Where the texts of a chat's messages stand in a rendered chat."""

    pieces: tuple[tuple[tuple[CharSpan, ...], ...], ...]
    """For each message, the spans of each text's pieces; empty for a piece that is not written, or not found. The pieces
    depend on the message alone, so that two templates have equally many."""
    complete: bool
    """Whether all that is written was found"""

    @property
    def spans(self) -> tuple[CharSpan, ...]:
        """Those of all pieces, in the order of the messages; an empty one stands behind the one before."""
        end, result = 0, []
        for start, stop in (span for texts in self.pieces for pieces in texts for span in pieces):
            start, end = (start, stop) if stop > start else (end, end)
            result.append((start, end))
        return tuple(result)


def find_texts(rendered: str, messages: Sequence[Message], render: Render | None = None) -> FoundTexts:
    """Where the texts of a chat's messages stand in a rendered chat.

    The chat is rendered a second time with marks in place of the texts (`Marks`), so that a content of "user" is not
    mistaken for a header, and the name of a tool not for an argument. Texts are marked in pieces, each of which a template
    may write at another place or in other words:

    - contents and reasoning: what stands between `<think>` tags, and the tags;
    - arguments of calls: the keys and texts of the object, and what JSON writes between them.

    A piece that is not marked, a tag or what JSON writes, is found where it touches those beside it. Without `render`, or
    from the first mark on around which the rendered chat does not have the same text, only contents are searched for, in
    order; the places of other texts are not known.

    Args:
        rendered: the chat template's text for these messages, perhaps with a stop behind it.
        render: messages → text with the same template; None: only the search is used.
    """
    marks = Marks(rendered)
    marked = [_mark_message(message, marks) for message in messages]
    places: dict[int, TextPlace] = {}
    failed: int | None = 0
    written = set(range(len(marks)))
    if render is not None:
        try:
            again = render([message.marked for message in marked])
        except Exception:  # some templates reject unknown contents; the search remains
            pass
        else:
            written = marks.written(again)
            found, failed = marks.places(again)
            places = dict(reversed(found))  # the first place of each
    if failed is not None:
        _search(rendered, marked, written, places, failed)
    pieces = tuple(_spans_of_message(rendered, message, places) for message in marked)
    return FoundTexts(pieces, failed is None or len(places) == len(marks))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a text."""

    forms: tuple[str, ...]
    """The piece, and how it may also be written"""
    mark: int | None
    """The mark that takes its place; None for one that stays"""
    trimmed: tuple[bool, bool] = (False, False)
    """Whether white space before and behind it belongs to the pieces beside it"""

    def trim(self, rendered: str, place: TextPlace) -> CharSpan:
        """The span of this piece at the place of its mark."""
        text = rendered[place.start : place.stop]
        before, behind = (len(text) - len(bare) for bare in (text.lstrip(), text.rstrip()))
        return place.start + before * self.trimmed[0], place.stop - behind * self.trimmed[1]


_Pieces = list[_Piece]


@dataclass(frozen=True, slots=True)
class _Marked:
    """A message with marks in place of its texts."""

    marked: dict[str, Any]
    content: str
    before: list[_Pieces]
    """Of each text of reasoning"""
    said: _Pieces
    """Of the content"""
    calls: list[tuple[_Pieces, _Pieces]]
    """Of each call's name and arguments"""


_TAGS = re.compile(r"(</?think>(?:\s*</?think>)*)")
_JSON_TEXT = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?')
"""A text in JSON; the second group is not empty for a key"""


def _mark_message(message: Message, marks: Marks) -> _Marked:
    changed = dict(message)
    before, calls = [], []
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            changed[key], pieces = _mark_text(message[key], marks)
            before.append(pieces)
    content, said = message.get("content"), list[_Piece]()
    if isinstance(content, str):
        changed["content"], said = _mark_text(content, marks)
    elif isinstance(content, Sequence):
        changed["content"] = parts = list(content)
        for i, part in enumerate(parts):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                text, pieces = _mark_text(part["text"], marks)
                parts[i] = {**part, "text": text}
                said += pieces
    if message.get("tool_calls"):
        made = [_mark_call(call, marks) for call in message["tool_calls"]]
        changed["tool_calls"], calls = [call for call, *_ in made], [pieces for _, *pieces in made]
    return _Marked(changed, text_of(message), before, said, [(name, arguments) for name, arguments in calls])


def _mark_text(text: str, marks: Marks) -> tuple[str, _Pieces]:
    """A text with marks in place of what is between its tags, and its pieces."""
    # A blank text stays: some templates write more around one that is not blank.
    if not text.strip():
        return text, [_Piece((text,), None)] if text else []
    marked, pieces = "", list[_Piece]()
    parts = _TAGS.split(text)  # what is said, tags, what is said, …
    for i, part in enumerate(parts):
        if i % 2:
            # White space around tags is written by some templates in their own way.
            before, behind = parts[i - 1], parts[i + 1]
            whole = before[len(before.rstrip()) :] + part + behind[: len(behind) - len(behind.lstrip())]
            pieces.append(_Piece(tuple(bare_forms(whole)), None))
        elif part.strip():
            pieces.append(_Piece((part,), len(marks), (i > 0, i + 1 < len(parts))))
            part = marks.put(part)
        marked += part
    return marked, pieces


def _mark_call(call: Any, marks: Marks) -> tuple[Any, _Pieces, _Pieces]:
    """A tool call with marks, and the pieces of its name and of its arguments."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call, [], []
    changed = dict(function)
    name: _Pieces = []
    arguments: _Pieces = []
    if isinstance(function.get("name"), str):
        changed["name"], name = _mark_text(function["name"], marks)
    if function.get("arguments") not in (None, ""):
        changed["arguments"], arguments = _mark_arguments(function["arguments"], marks)
    return ({**call, "function": changed} if "function" in call else changed), name, arguments


def _mark_arguments(arguments: Any, marks: Marks) -> tuple[Any, _Pieces]:
    """The arguments of a call, an object or its JSON text, with marks at its keys and texts, and their pieces."""
    try:
        given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        usual = json.dumps(json.loads(given), ensure_ascii=False)
    except (ValueError, TypeError):
        return _mark_text(arguments, marks) if isinstance(arguments, str) else (arguments, [])
    texts, usual_texts = ([match for match in _JSON_TEXT.finditer(text) if match[1].strip()] for text in (given, usual))
    if len(texts) != len(usual_texts):  # a key that occurs twice
        usual, usual_texts = given, texts
    marked, pieces, end, usual_end = "", [], 0, 0
    for match, other in zip(texts, usual_texts):
        between = given[end : match.start(1)], usual[usual_end : other.start(1)]
        end, usual_end, is_key = match.end(1), other.end(1), match[2] is not None
        pieces += [_Piece(between, None), _Piece((match[1],), len(marks))]
        mark = marks.put(json.loads(f'"{match[1]}"', strict=False), match[1], keep=is_key)
        marked += between[0] + (match[1] + mark if is_key else mark)
    pieces.append(_Piece((given[end:], usual[usual_end:]), None))
    marked += given[end:]
    return (marked if isinstance(arguments, str) else json.loads(marked)), pieces


def _search(
    rendered: str, messages: Sequence[_Marked], written: Collection[int], places: dict[int, TextPlace], cursor: int
) -> None:
    """Searches from a place on for the contents that have none, each behind the end of the one before it."""
    for message in messages:
        marked = [piece for piece in message.said if piece.mark is not None]
        if not any(piece.mark in written and piece.mark not in places for piece in marked):
            continue
        content = next((form for form in bare_forms(message.content) if rendered.find(form, cursor) >= 0), "")
        if not content:
            continue
        low = start = rendered.find(content, cursor)
        cursor = low + len(content)
        for piece in marked:
            text = piece.forms[0].strip() if len(message.said) > 1 else content
            start = rendered.find(text, start, cursor)
            places[cast(int, piece.mark)] = TextPlace(start, start + len(text), low, cursor)
            start += len(text)


def _spans_of_message(
    rendered: str, message: _Marked, places: Mapping[int, TextPlace]
) -> tuple[tuple[CharSpan, ...], ...]:
    """The spans of the pieces of each text."""
    texts = [_spans_of_pieces(rendered, pieces, places) for pieces in (*message.before, message.said)]
    for name, arguments in message.calls:
        texts.append(_spans_of_pieces(rendered, name, places))
        place = places.get(cast(int, name[0].mark)) if name else None
        if place and len(arguments) == 1 and arguments[0].mark is None:
            # No key and no text, as in {}: it is the template's text behind the name that reads so.
            start = rendered.find(arguments[0].forms[0], place.stop, place.high)
            texts.append(((start, start + len(arguments[0].forms[0])) if start >= 0 else (0, 0),))
        else:
            texts.append(_spans_of_pieces(rendered, arguments, places))
    return tuple(texts)


def _spans_of_pieces(rendered: str, pieces: _Pieces, places: Mapping[int, TextPlace]) -> tuple[CharSpan, ...]:
    """The spans of a text's pieces: of marked ones by their places, of others where they touch those beside them."""
    found = [None if piece.mark is None else places.get(piece.mark) for piece in pieces]
    spans = [piece.trim(rendered, place) if place else (0, 0) for piece, place in zip(pieces, found)]
    for i, piece in enumerate(pieces):
        if piece.mark is not None:
            continue
        before, after = found[i - 1] if i else None, found[i + 1] if i + 1 < len(pieces) else None
        start, stop = spans[i - 1][1] if before else 0, spans[i + 1][0] if after else 0
        if before and after:
            spans[i] = (start, stop) if rendered[start:stop] in piece.forms else (0, 0)
        elif after and i == 0:
            fitting = (len(form) for form in piece.forms if rendered.endswith(form, after.low, stop))
            spans[i] = stop - max(fitting, default=0), stop
        elif before and i + 1 == len(pieces):
            fitting = (len(form) for form in piece.forms if rendered.startswith(form, start, before.high))
            spans[i] = start, start + max(fitting, default=0)
        elif after:  # the text before is not written, as a thought that is cut; what is left is white space
            spans[i] = after.start, stop
        elif before:
            spans[i] = start, before.stop
    return tuple(spans) or ((0, 0),)


# What messages quote: the texts of special tokens that the template has not written itself.


def quoted_spans(
    rendered: str, messages: Sequence[Message], render: Render, tokens: re.Pattern[str] | None
) -> tuple[CharSpan, ...]:
    """Where a rendered chat has the text of a special token that a message says, in order.

    The chat is rendered a second time with a mark in the place of every such text, wherever in a message it is: what
    surrounds the marks is the template's. If that changes what else the template writes, because it reads `<think>` tags
    that are tokens, these stay; if it still does, the texts of the messages are looked for instead (`find_texts`).

    Args:
        rendered, messages, render: as for `find_texts`.
        tokens: matches the text of any of the tokens; None: there are none.
    """
    for pattern in (tokens, _without_tags(tokens)) if tokens else ():
        marks = Marks(rendered)
        marked = [_mark_tokens(message, pattern, marks) for message in messages]
        if not len(marks):
            return ()
        try:
            found, failed = marks.places(render(marked))
        except Exception:  # some templates reject unknown contents
            continue
        if failed is None:
            return tuple((start, stop) for _, (start, stop, *_) in found)
    pieces = find_texts(rendered, messages, render).pieces if tokens else ()
    return tuple(sorted(span for texts in pieces for spans in texts for span in spans if span[1] > span[0]))


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of these texts, the longest one first; None if there are none."""
    ordered = sorted(filter(None, set(texts)))
    return re.compile(_alternatives(ordered)) if ordered else None


def _alternatives(texts: Sequence[str]) -> str:
    """A pattern for sorted texts that writes what they begin with alike once, so that a thousand are not tried one by one."""
    start = commonprefix(texts)  # noqa: RUF071 (character by character is intended)
    rest = [text[len(start) :] for text in texts]
    branches = [_alternatives(list(group)) for _, group in groupby(filter(None, rest), key=lambda text: text[0])]
    behind = f"(?:{'|'.join(branches)})" if branches else ""
    return re.escape(start) + (f"{behind}?" if branches and "" in rest else behind)


def _without_tags(tokens: re.Pattern[str]) -> re.Pattern[str]:
    """Matches the same tokens, but for `<think>` tags."""
    return re.compile(f"(?!</?think>)(?:{tokens.pattern})")


def _mark_tokens(value: Any, tokens: re.Pattern[str], marks: Marks) -> Any:
    """A value, such as a message, with a mark in the place of every token's text in it."""
    if isinstance(value, str):
        return tokens.sub(lambda match: marks.put(match[0]), value)
    if isinstance(value, Mapping):
        return {_mark_tokens(key, tokens, marks): _mark_tokens(item, tokens, marks) for key, item in value.items()}
    return [_mark_tokens(item, tokens, marks) for item in value] if isinstance(value, list | tuple) else value
