"""What the rows of a data set hold: the columns that are read, and the document that a row becomes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from distill_rl.config.schema import DataConfig
from distill_rl.data.reading.convert import from_alpaca, from_sharegpt
from distill_rl.data.reading.values import MEDIA, check_strings, check_text, check_value, parse_json
from distill_rl.data.routing import WEIGHTS, Routing
from distill_rl.errors import DataError

Kind = Literal["text", "messages"]
Format = Literal["text", "messages", "sharegpt", "alpaca"]

VARIABLES = "chat_template_kwargs"
"""Column of chats, and key of their documents, with further variables for the chat template; the name is TRL's."""
_RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
    }
    | {"return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "padding", "truncation"}
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
class Layout:
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
        for key in self.required:
            if key not in available:
                raise no_column(name, key, available, self.format)
        for key in self.chosen_by:
            if key not in available:
                assert self.routing is not None
                close = difflib.get_close_matches(key, available, n=1, cutoff=0.5)
                remedy = f"did you mean {close[0]!r}?" if close else ""
                rule = f"a column of the data, which {self.routing.named_by(key)} names"
                raise DataError(f"{name}: column {key!r}", rule, f"the columns {list(available)}", remedy)
        media = sorted(MEDIA & set(available)) if self.kind == "messages" else []
        if media:
            remedy = "remove the column if the chats make sense without it"
            raise DataError(
                f"{name}: column {media[0]!r}", "chats are text only", f"the columns {list(available)}", remedy
            )
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
        if self.format == "text":
            return {"text": check_text(row[self.key], at(self.key)), **self._weights(row, at)}
        messages = row[self.key]
        if self.format == "alpaca":
            messages = from_alpaca(row, at)
        elif self.format == "sharegpt":
            messages = from_sharegpt(messages, row.get("system"), at(self.key))
        for media in sorted(MEDIA & row.keys()):
            if row[media]:
                raise DataError(at(media), "chats are text only", media, "leave such rows out")
        checked = check_value(messages, "messages", at(self.key))
        return {"messages": checked, **self._others(row, at), **self._weights(row, at)}

    def check(self, row: Mapping[str, Any], at: Callable[[str], str]) -> None:
        """Checks a row as `document` does; without the main column, only its other columns are checked."""
        if self.key in row:
            self.document(row, at)
        else:
            self._others(row, at)
            self._weights(row, at)

    def _weights(self, row: Mapping[str, Any], at: Callable[[str], str]) -> dict[str, tuple[float, ...]]:
        """The weights of the running teachers for a row; empty if they are not chosen by row."""
        return {} if self.routing is None else {WEIGHTS: self.routing.weights(row, at)}

    def _others(self, row: Mapping[str, Any], at: Callable[[str], str]) -> dict[str, Any]:
        """What a chat's document has besides its messages: "tools" and VARIABLES, those that the row has."""
        others = {
            "tools": _tools(row.get(self.tools_key), at(self.tools_key)),
            VARIABLES: _variables(row.get(VARIABLES), at(VARIABLES)),
        }
        return {key: value for key, value in others.items() if value}


def choose_layout(columns: Sequence[str], data: DataConfig, name: str, routing: Routing | None = None) -> Layout:
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
    layout = Layout(kind, required, data.tools_key, routing)
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
    if kind != "sharegpt" and "conversations" in columns:
        remedy = "set data.format=sharegpt, or data.messages_key=conversations if its turns have a role and a content"
    elif kind != "alpaca" and {"instruction", "output"} <= set(columns):
        remedy = "set data.format=alpaca"
    elif kind != "messages" and "messages" in columns:
        remedy = "set data.format=messages"
    elif kind != "text" and "text" in columns:
        remedy = "set data.format=text"
    elif pairs and key in _DEFAULT_KEYS:
        renamed = zip(pairs[0], ("instruction", "output"))
        changes = " and ".join(f"{old!r} to {new!r}" for old, new in renamed if old != new)
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
    """The tools of a chat: a list of JSON schemas, given as objects or as JSON text; empty for null.

    Raises:
        DataError: anything else.
    """
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
    """Further variables of the chat template, given as an object or as its JSON text; empty for null.

    Raises:
        DataError: anything else; the name of an argument of `apply_chat_template`.
    """
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
