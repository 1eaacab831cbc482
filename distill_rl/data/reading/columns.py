"""Checks that a whole Arrow column holds text or chat messages, without making a Python object per row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from distill_rl.data.reading.arrow_rows import KEPT, is_list, read_of
from distill_rl.data.reading.values import MEDIA, check_value
from distill_rl.errors import DataError


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
    check_type(column.type, kind, what, first_row)
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for chunk in map(_decoded, chunks):
        if kind == "text":
            _require_all(chunk.is_valid(), what, first_row, "text", "null")
            _require_utf8(chunk, what, first_row)
        else:
            _check_messages(chunk, what, first_row)
        first_row += len(chunk)


def check_type(column_type: pa.DataType, kind: Literal["text", "messages"], what: str, first_row: int = 0) -> None:
    """Checks the type of a column: text, or messages: lists of structs with a role, or the JSON text of such a list.

    Either may be in dictionary form, as categories are.

    Args:
        what: file and column, for error messages.
        first_row: row number of the column's first value.

    Raises:
        DataError: another type.
    """
    if kind == "text":
        _require_string(column_type, what, first_row)
        return
    column_type = _plain_type(column_type)
    if is_string(column_type) or isinstance(column_type, pa.JsonType):
        return
    found = str(column_type)
    item = column_type.value_type if is_list(column_type) else None
    names = {field.name for field in item} if item is not None and pa.types.is_struct(item) else set()
    if item is None or "role" not in names:
        remedy = "set data.format=sharegpt" if {"from", "value"} <= names else ""
        where, rule = f"{what}, row {first_row}", "a list of messages {role, content}"
        raise DataError(where, rule, f"the type {found[:100]}", remedy)
    _require_string(item.field("role").type, f"{what}, role", first_row)


def _check_messages(chunk: pa.Array, what: str, first_row: int) -> None:
    """Checks one chunk of a column of messages.

    Every row must be a list of at least one complete message. Rows are only made into
    Python objects if a content is null or not text, or the column holds JSON.

    Args:
        what: file and column, for error messages.
        first_row: row number of the chunk's first value.

    Raises:
        DataError: names the first row that breaks a rule; the rules are checked one after another.
    """
    _require_all(chunk.is_valid(), what, first_row, "a list of messages", "null")
    if not is_list(chunk.type):
        _require_utf8(chunk, what, first_row)
        _check_rows(chunk, range(len(chunk)), what, first_row)
        return
    _require_all(pc.greater(pc.list_value_length(chunk), 0), what, first_row, "at least one message", "an empty list")
    messages = pc.list_flatten(chunk)
    parents = pc.list_parent_indices(chunk)

    def row_of(message: int) -> int:
        """The row of the data that holds a message, given the message's index in the chunk."""
        return first_row + parents[message].as_py()

    names = {field.name: field.type for field in messages.type}
    roles = _decoded(pc.struct_field(messages, "role"))
    bad = pc.index(roles.is_valid(), False).as_py()
    if bad >= 0:
        raise DataError(f"{what}, row {row_of(bad)}, role", "text", "null")
    _require_utf8(roles, f"{what}, role", first_row, row_of)
    if "content" not in names or not is_string(_plain_type(names["content"])) or names.keys() & (MEDIA | {"from"}):
        _check_rows(chunk, range(len(chunk)), what, first_row)
        return
    contents = _decoded(pc.struct_field(messages, "content"))
    _require_utf8(contents, f"{what}, content", first_row, row_of)
    if contents.null_count:
        nulls = pc.filter(parents, contents.is_null())
        _check_rows(chunk, pc.unique(nulls).to_pylist(), what, first_row)


def _check_rows(chunk: pa.Array, rows: Iterable[int], what: str, first_row: int) -> None:
    """Checks some rows of a column of messages one by one, as `check_value` does; indices count within the chunk."""
    read = read_of(chunk.type, what, KEPT) or (lambda value: value)
    for row in rows:
        check_value(read(chunk[row].as_py()), "messages", f"{what}, row {first_row + row}")


def _plain_type(column_type: pa.DataType) -> pa.DataType:
    """The type of a column's values, also of one in dictionary form."""
    return column_type.value_type if pa.types.is_dictionary(column_type) else column_type


def _decoded(column: pa.Array) -> pa.Array:
    """An array that is not in dictionary form."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def is_string(column_type: pa.DataType) -> bool:
    """Whether a type is one of Arrow's string types: string, large string or string view."""
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(column_type) for is_kind in kinds)


def _require_string(column_type: pa.DataType, what: str, first_row: int) -> None:
    """Raises DataError, naming `first_row`, unless the type is string, large string or string view."""
    if not is_string(_plain_type(column_type)):
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
