"""What the rows of a data set hold: the columns that are read, the document that a row becomes,
and the checks that its values are text or chat messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from distill_rl.config.schema import DataConfig
from distill_rl.data.routing import WEIGHTS, Routing
from distill_rl.errors import DataError

SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Role of a ShareGPT turn → role of a message. A `function_call` is an assistant's message with one tool call."""

MEDIA = frozenset({"image", "images", "image_url", "input_image", "audio", "audios", "input_audio", "video", "videos"})
"""Keys and types of parts that hold something other than text."""

Kind = Literal["text", "messages"]
KINDS: dict[Kind, str] = {"text": "rows of text", "messages": "chats"}
"""Kind of document → words for them."""
Format = Literal["text", "messages", "sharegpt", "alpaca"]

VARIABLES = "chat_template_kwargs"
"""Column of chats, and key of their documents, with further variables for the chat template; the name is TRL's."""
_RESERVED = frozenset(
    {"messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs"}
    | {"padding", "truncation"}
)
_OPTIONAL: dict[Format, tuple[str, ...]] = {
    "text": (),
    "messages": (VARIABLES,),
    "sharegpt": ("system", VARIABLES),
    "alpaca": ("input", "system", "history", VARIABLES),
}

_PROMPT_COMPLETION = ("prompt", "completion")
_QUESTION_AND_ANSWER = (
    ("instruction", "response"),
    _PROMPT_COMPLETION,
    ("prompt", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
)
"""Columns of published data sets that hold what Alpaca calls `instruction` and `output`."""
_DEFAULT_KEYS = ("text", "messages", "conversations", "instruction", "output")
"""Main columns that are looked for without a setting; any other was named by the user, perhaps with a typo."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The columns of a data set that are read, and how a row becomes a document."""

    format: Format
    required: tuple[str, ...]
    """Columns that every file must have; the first is the main one."""
    tools_key: str = "tools"
    routing: Routing | None = field(default=None, repr=False)
    """Which teachers a row is for; None: every row is for all of them."""

    @property
    def kind(self) -> Kind:
        """The kind of document; also its key."""
        return "text" if self.format == "text" else "messages"

    @property
    def key(self) -> str:
        """The main column."""
        return self.required[0]

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are read where a file has them."""
        tools = () if self.format == "text" else (self.tools_key,)
        known = {*self.required, *self.chosen_by}
        return tuple(key for key in (*_OPTIONAL[self.format], *tools) if key not in known)

    @property
    def chosen_by(self) -> tuple[str, ...]:
        """Columns that every file must have because teachers are chosen by them."""
        found = () if self.routing is None else self.routing.columns
        return tuple(key for key in found if key not in self.required)

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.required, *self.chosen_by, *self.optional)

    def columns(self, available: Sequence[str], name: str) -> list[str]:
        """The columns to read of a file or folder that has these.

        Raises:
            DataError: one is missing or there twice, or the chats come with images, audio or video.
        """
        given = f"the columns {list(available)}"
        for key in self.required:
            if key not in available:
                raise no_column(name, key, available, self.format)
        for key in self.chosen_by:
            if key not in available:
                assert self.routing is not None
                close = difflib.get_close_matches(key, available, n=1, cutoff=0.5)
                remedy = f"did you mean {close[0]!r}?" if close else ""
                rule = f"a column of the data, which {self.routing.named_by(key)} names"
                raise DataError(f"{name}: column {key!r}", rule, given, remedy)
        media = sorted(MEDIA & set(available)) if self.kind == "messages" else []
        if media:
            remedy = "remove the column if the chats make sense without it"
            raise DataError(f"{name}: column {media[0]!r}", "chats are text only", given, remedy)
        found = [*self.required, *self.chosen_by, *(key for key in self.optional if key in available)]
        if twice := [key for key in found if list(available).count(key) > 1]:
            rule, remedy = "a column that is read is there once", "rename the one to read, or drop the others"
            raise DataError.many(
                str(DataError(f"{name}: column {key!r}", rule, f"{list(available).count(key)} of that name", remedy))
                for key in twice
            )
        return found

    def document(self, row: Mapping[str, Any], at: Callable[[str], str]) -> dict[str, Any]:
        """The document that a row becomes: `{"text": …}`, or `{"messages": […]}` with "tools" and VARIABLES if it has any.

        If teachers are chosen by row, it has their weights, too (`routing.WEIGHTS`).

        Args:
            row: the values of the columns; optional ones may be missing or null.
            at: the name of a column → the words for file, row and column in error messages.

        Raises:
            DataError: a value of another form.
        """
        is_text = self.format == "text"
        document = {"text": check_text(row[self.key], at(self.key))} if is_text else self._chat(row, at)
        return document if self.routing is None else document | {WEIGHTS: self.routing.weights(row, at)}

    def _chat(self, row: Mapping[str, Any], at: Callable[[str], str]) -> dict[str, Any]:
        """The messages of a row in any form of chats, and its "tools" and VARIABLES if it has any."""
        messages = row[self.key]
        if self.format == "alpaca":
            messages = from_alpaca(row, at)
        elif self.format == "sharegpt":
            messages = from_sharegpt(messages, row.get("system"), at(self.key))
        for media in sorted(MEDIA & row.keys()):
            if row[media]:
                raise DataError(at(media), "chats are text only", media, "leave such rows out")
        chat = {
            "messages": check_messages(messages, at(self.key)),
            "tools": _tools(row.get(self.tools_key), at(self.tools_key)),
            VARIABLES: _variables(row.get(VARIABLES), at(VARIABLES)),
        }
        return {key: value for key, value in chat.items() if value}  # there is at least one message


def choose_layout(columns: Sequence[str], data: DataConfig, name: str, routing: Routing | None = None) -> RowLayout:
    """The layout of data with these columns, by `data.format`; for "auto" the first that the columns allow.

    Args:
        name: of the file or folder, for error messages.
        routing: which teachers a row is for; None: every row is for all of them.

    Raises:
        DataError: a column is missing; the remedy says which settings read these columns, if that can be seen.
    """
    kind = data.format if data.format != "auto" else _recognised(columns, data)
    required = {
        "text": (data.text_key,),
        "messages": (data.messages_key,),
        "sharegpt": (data.messages_key if data.messages_key in columns else "conversations",),
        "alpaca": ("instruction", "output"),
    }[kind]
    layout = RowLayout(kind, required, data.tools_key, routing)
    layout.columns(columns, name)
    return layout


def _recognised(columns: Sequence[str], data: DataConfig) -> Format:
    """The format that data with these columns have; "text" if they have none."""
    names_a_text = data.text_key in columns and data.text_key not in _DEFAULT_KEYS
    if names_a_text and data.messages_key in _DEFAULT_KEYS:
        return "text"
    if data.messages_key in columns:
        return "messages"
    if data.text_key in columns or data.text_key not in _DEFAULT_KEYS or data.messages_key not in _DEFAULT_KEYS:
        return "text"  # a key that the user has set is wanted, not guessed around
    if "conversations" in columns:
        return "sharegpt"
    return "alpaca" if {"instruction", "output"} <= set(columns) else "text"


def no_column(name: str, key: str, columns: Sequence[str], kind: Format) -> DataError:
    """The error for data without the column `key`, for the caller to raise.

    The remedy is the settings that read these columns, or names the most similar of them.
    """
    remedy = {"messages": "set data.messages_key", "text": "set data.text_key"}.get(kind, "set data.format")
    close = difflib.get_close_matches(key, columns, n=1, cutoff=0.5)
    pairs = [pair for pair in _QUESTION_AND_ANSWER if set(pair) <= set(columns)]
    formats: dict[str, set[str]] = {
        "sharegpt": {"conversations"},
        "alpaca": {"instruction", "output"},
        "messages": {"messages"},
        "text": {"text"},
    }
    other = next((name for name, keys in formats.items() if name != kind and keys <= set(columns)), "")
    if other:
        also = ", or data.messages_key=conversations if its turns have a role and a content"
        remedy = f"set data.format={other}{also if other == 'sharegpt' else ''}"
    elif pairs and key in _DEFAULT_KEYS:
        names = {pairs[0][0]: "instruction", pairs[0][1]: "output"}
        changes = " and ".join(f"{old!r} to {new!r}" for old, new in names.items() if old != new)
        remedy = f"rename {changes}, and set data.format=alpaca"
        if pairs[0] == _PROMPT_COMPLETION:
            joined = " + ".join(f"row[{column!r}]" for column in pairs[0])
            remedy += f"; if both are lists of messages, write {joined} into a column 'messages' instead"
    elif close:
        remedy = f"did you mean {close[0]!r}? {remedy}"
    return DataError(f"{name}: column {key!r}", "a column of the data", f"the columns {list(columns)}", remedy)


def template_options(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template gets of a document besides its messages, as arguments of `apply_chat_template`."""
    options = dict(document.get(VARIABLES) or {})
    if document.get("tools"):
        options["tools"] = document["tools"]
    return options


def _tools(value: Any, what: str) -> list[dict[str, Any]]:
    """The tools of a chat: a list of JSON schemas, given as objects or as JSON text; empty for null."""
    rule = "a list of tools, each a JSON schema"
    value = parse_json(value, what, rule) if isinstance(value, str) and value.strip() else value
    if not value:
        return []
    tools = value if isinstance(value, list) else []
    tools = [parse_json(tool, what, rule) if isinstance(tool, str) else tool for tool in tools]
    if not tools or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(what, rule, f"{type(value).__name__} {str(value)[:40]!r}")
    check_strings(tools, what)
    return tools


def _variables(value: Any, what: str) -> dict[str, Any]:
    """Further variables of the chat template, given as an object or as its JSON text; empty for null."""
    rule = "an object with variables of the chat template"
    value = parse_json(value, what, rule) if isinstance(value, str) and value.strip() else value
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(what, rule, type(value).__name__)
    if reserved := sorted(_RESERVED & value.keys()):
        raise DataError(what, "variables of the chat template, not what rendering itself uses", reserved[0])
    check_strings(value, what)
    return dict(value)


def check_messages(value: Any, what: str) -> list[dict[str, Any]]:
    """Checks the messages of a chat, and returns them as a new list with all of their keys.

    They may also be given as the JSON text of their list. A key of a message whose value is null is dropped, so that
    a template sees it as absent. Only a null content stays, which some templates test for; it needs another key beside
    it, such as tool calls. Nulls inside of the values stay.

    Args:
        what: file, row and column, for error messages.

    Raises:
        DataError: not a non-empty list of messages; not valid Unicode; images, audio or video.
    """
    messages = _items(value, what, "message {role, content}")
    return [_check_message(message, f"{what}, message {i}") for i, message in enumerate(messages)]


def _items(value: Any, what: str, item: str) -> list[Any]:
    """The items of a list, which may be given as its JSON text. Raises DataError for anything else, and for no items."""
    items = parse_json(value, what) if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        found = "an empty list" if items == [] else type(items).__name__
        raise DataError(what, f"a list of at least one {item}", found)
    return items


def _check_message(message: Any, what: str) -> dict[str, Any]:
    """Checks one message, and returns it as a new dict without null values, except for a null content."""
    if not isinstance(message, Mapping) or "role" not in message:
        if isinstance(message, Mapping) and {"from", "value"} <= message.keys():
            raise DataError(what, "a message has a role and a content", sorted(message), "set data.format=sharegpt")
        found = f"the keys {sorted(message)}" if isinstance(message, Mapping) else type(message).__name__
        raise DataError(what, "a message has a role and a content", found)
    checked = {key: item for key, item in message.items() if item is not None or key in ("role", "content")}
    check_text(checked.get("role"), f"{what}, role")
    content = checked.get("content")
    others = checked.keys() - {"role", "content"}
    if isinstance(content, list):
        _check_parts(content, what)
    elif content is not None or not others:
        if "content" not in message and not others:
            raise DataError(what, "a message has a role and a content", f"the keys {sorted(message)}")
        check_text(content, f"{what}, content")
    media = sorted(key for key in others & MEDIA if checked[key])
    if media:
        raise DataError(f"{what}, {media[0]}", "chats are text only", media[0], "leave such rows out")
    if others:
        check_strings(checked, what)
    return checked


def _check_parts(content: list[Any], what: str) -> None:
    """Raises DataError for a content with a part that is not `{"type": "text", "text": …}`."""
    for i, part in enumerate(content):
        where = f"{what}, part {i} of the content"
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in MEDIA:
            raise DataError(where, "chats are text only", f"a part of type {kind}", "leave such rows out")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(where, 'is {"type": "text", "text": ...}', f"a part of type {kind}")
    check_strings(content, what)


def check_text(value: Any, what: str) -> str:
    """Returns a value that is text, unchanged; an empty text is allowed.

    Args:
        what: file, row and column, for error messages.

    Raises:
        DataError: anything but a string, or a string with a lone surrogate.
    """
    if not isinstance(value, str):
        found = "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        raise DataError(what, "text", found)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(what, "valid Unicode", f"a lone surrogate at character {error.start}") from error
    return value


def check_strings(value: Any, what: str) -> None:
    """Raises DataError if a text somewhere inside of a value has a lone surrogate."""
    if isinstance(value, str):
        check_text(value, what)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_strings(key, what)
            check_strings(item, what)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_strings(item, what)


def parse_json(text: str, what: str, rule: str = "a list of messages, or its JSON text") -> Any:
    """The value of a JSON text in a column. Raises DataError, with this rule, if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(what, rule, f"text {text[:40]!r}") from error


def from_sharegpt(value: Any, system: Any, what: str) -> list[dict[str, Any]]:
    """The messages of a ShareGPT row, a list of turns `{"from": …, "value": …}`; further keys of a turn are kept.

    Args:
        value: the turns, or the JSON text of their list.
        system: text of a system message that comes before the turns; null or empty: there is none.
        what: file, row and column, for error messages.

    Raises:
        DataError: not a non-empty list of such turns; an unknown role.
    """
    messages = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(_items(value, what, "turn {from, value}")):
        where = f"{what}, turn {i}"
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            found = f"the keys {sorted(turn)}" if isinstance(turn, Mapping) else type(turn).__name__
            remedy = f"set data.format=messages and data.messages_key={what.rpartition('column ')[2].split(',')[0]}"
            is_message = isinstance(turn, Mapping) and {"role", "content"} <= turn.keys()
            raise DataError(where, "a turn has the keys from and value", found, remedy if is_message else "")
        role = turn["from"]
        if role not in SHAREGPT_ROLES:
            remedy = "use data.format=messages for other roles"
            raise DataError(f"{where}, from", f"one of {', '.join(SHAREGPT_ROLES)}", repr(role), remedy)
        message = {key: item for key, item in turn.items() if key not in ("from", "value")}
        if role == "function_call":
            message |= {"content": "", "tool_calls": _tool_calls(turn["value"], where)}
        else:
            message["content"] = turn["value"]
        messages.append({"role": SHAREGPT_ROLES[role], **message})
    return messages


def _tool_calls(value: Any, what: str) -> list[dict[str, Any]]:
    """The calls of a `function_call` turn: one `{"name": …, "arguments": …}` or a list of them, usually as JSON text."""
    rule = 'a function_call is {"name": ..., "arguments": ...}'
    calls = parse_json(value, what, rule) if isinstance(value, str) else value
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in calls):
        raise DataError(what, rule, str(value)[:40])
    return [{"type": "function", "function": {key: call[key] for key in ("name", "arguments")}} for call in calls]


def from_alpaca(row: Mapping[str, Any], at: Callable[[str], str]) -> list[dict[str, Any]]:
    """The messages of an Alpaca row: `instruction`, a blank line and `input` if there is one; then `output`.

    Before them come a `system` message and the pairs (instruction, output) of a `history`, if the row has them.

    Args:
        at: the name of a column → the words for file, row and column in error messages.

    Raises:
        DataError: a value that is not text, or a history of another form.
    """
    instruction, output = (check_text(row[key], at(key)) for key in ("instruction", "output"))
    given = check_text(row.get("input") or "", at("input"))
    messages = [{"role": "system", "content": check_text(row["system"], at("system"))}] if row.get("system") else []
    history, rule = row.get("history") or [], "a list of pairs [instruction, output]"
    if isinstance(history, str):
        history = parse_json(history, at("history"), rule)
    if not isinstance(history, list):
        raise DataError(at("history"), rule, type(history).__name__)
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(at("history"), rule, str(pair)[:40])
        question, answer = (check_text(text, at("history")) for text in pair)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction})
    messages.append({"role": "assistant", "content": output})
    return messages
