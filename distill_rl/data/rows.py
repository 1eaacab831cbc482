"""Checks that rows hold text or chat messages: one value at a time, or a whole Arrow column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from distill_rl.errors import DataError

MESSAGE_TYPE = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
ARROW_TYPES: dict[str, pa.DataType] = {"text": pa.large_string(), "messages": pa.large_list(MESSAGE_TYPE)}


def check_value(value: Any, kind: Literal["text", "messages"], what: str) -> Any:
    """Checks one value, and returns it: the text, or the messages as a new list, reduced to role and content.

    Args:
        what: file, row and column, for error messages.

    Raises:
        DataError: not text; not a non-empty list of `{role, content}` with text in both; not valid Unicode.
    """
    if kind == "text":
        return _check_text(value, what)
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise DataError(what, "a list of at least one message {role, content}", found)
    messages = []
    for i, message in enumerate(value):
        where = f"{what}, message {i}"
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            found = f"the keys {sorted(message)}" if isinstance(message, Mapping) else type(message).__name__
            raise DataError(where, "a message has a role and a content", found)
        messages.append({key: _check_text(message[key], f"{where}, {key}") for key in ("role", "content")})
    return messages


def _check_text(value: Any, what: str) -> str:
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


def check_column(
    column: pa.Array | pa.ChunkedArray, kind: Literal["text", "messages"], what: str, first_row: int = 0
) -> None:
    """Checks a whole Arrow column without making a Python object per row.

    Args:
        what: file and column, for error messages.
        first_row: row number of the column's first value.

    Raises:
        DataError: the column's type is wrong, or a row is one that `check_value` would refuse; names such a row.
    """
    if kind == "text":
        _require_string(column.type, what, first_row)
        _require_all(column.is_valid(), what, first_row, "text", "null")
        _require_utf8(column, what, first_row)
        return
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for chunk in chunks:
        _check_messages(chunk, what, first_row)
        first_row += len(chunk)


def check_type(column_type: pa.DataType, kind: Literal["text", "messages"], what: str) -> None:
    """Checks the type of a column: text, or lists of structs whose role and content are text, further fields allowed.

    Args:
        what: file and column, for error messages.

    Raises:
        DataError: another type.
    """
    if kind == "text":
        _require_string(column_type, what, 0)
        return
    found = str(column_type)
    item = column_type.value_type if _is_list(column_type) else None
    if item is None or not pa.types.is_struct(item) or not {"role", "content"} <= {field.name for field in item}:
        raise DataError(f"{what}, row 0", "a list of messages {role, content}", f"the type {found[:100]}")
    for key in ("role", "content"):
        _require_string(item.field(key).type, f"{what}, {key}", 0)


def _check_messages(chunk: pa.Array, what: str, first_row: int) -> None:
    """Checks one chunk of a column of messages.

    Its type must be that of messages, and every row a list of at least one complete message.

    Args:
        what: file and column, for error messages.
        first_row: row number of the chunk's first value.

    Raises:
        DataError: names the first row that breaks a rule; the rules are checked one after another.
    """
    check_type(chunk.type, "messages", what)
    _require_all(chunk.is_valid(), what, first_row, "a list of messages", "null")
    _require_all(pc.greater(pc.list_value_length(chunk), 0), what, first_row, "at least one message", "an empty list")
    messages = pc.list_flatten(chunk)
    parents = pc.list_parent_indices(chunk)

    def row_of(message: int) -> int:
        """The row of the data that holds a message, given the message's index in the chunk."""
        return first_row + parents[message].as_py()

    for key in ("role", "content"):
        values = pc.struct_field(messages, key)
        bad = pc.index(values.is_valid(), False).as_py()
        if bad >= 0:
            raise DataError(f"{what}, row {row_of(bad)}, {key}", "text", "null")
        _require_utf8(values, f"{what}, {key}", first_row, row_of)


def _is_list(column_type: pa.DataType) -> bool:
    """Whether a type is one of Arrow's list types: list, large list or fixed-size list."""
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(column_type) for is_kind in kinds)


def _require_string(column_type: pa.DataType, what: str, first_row: int) -> None:
    """Raises DataError, naming `first_row`, unless the type is string, large string or string view."""
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(is_kind(column_type) for is_kind in kinds):
        raise DataError(f"{what}, row {first_row}", "text", f"the type {str(column_type)[:100]}")


def _require_all(valid: Any, what: str, first_row: int, rule: str, found: str) -> None:
    """Raises DataError for the first row that is not valid, if there is one.

    Args:
        valid: Arrow array of booleans, one per row.
        what, rule, found: parts of the message: the column, what is required, and what the row has.
        first_row: row number of the first value.
    """
    bad = pc.index(valid, False).as_py()
    if bad >= 0:
        raise DataError(f"{what}, row {first_row + bad}", rule, found)


def _require_utf8(column: Any, what: str, first_row: int, row_of: Any = None) -> None:
    """Raises DataError if text in an Arrow array is not UTF-8, naming its row, or if the array is damaged otherwise.

    Args:
        what: file and column, for error messages.
        first_row: row number of the first value.
        row_of: maps an index of `column` to a row of the data; None: `first_row` plus the index.
    """
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        for i, value in enumerate(column):
            try:
                value.as_py()
            except UnicodeDecodeError as bad:
                row = row_of(i) if row_of else first_row + i
                raise DataError(
                    f"{what}, row {row}", "text is UTF-8", f"byte 0x{bad.object[bad.start]:02x} at byte {bad.start}"
                ) from bad
        raise DataError(what, "a valid Arrow column", str(error)[:200], "the file may be damaged") from error
