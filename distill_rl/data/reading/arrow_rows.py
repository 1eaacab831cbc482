"""Arrow and Parquet columns: rows as Python values, by one rule for files, folders and row groups of any size, and checks of
whole columns, without a Python object per row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from distill_rl.data.reading.layouts import MEDIA, check_value, parse_json
from distill_rl.errors import DataError

KEPT = ("role", "content", "from", "value")
"""Keys of a message or a turn that stay if they are null."""

Read = Callable[[Any], Any]
"""A value that is not None, as Arrow gives it → as the document has it."""
Restore = Callable[[dict[str, Any]], dict[str, Any]]
"""The columns of a row as they are stored → their values."""


def restore_of(schema: pa.Schema, main: str, what: str) -> Restore:
    """How the columns of a schema become values (`read_of`).

    Args:
        main: the column with the messages or turns, in which the keys `KEPT` may be null.
        what: the file or folder, for error messages.

    Raises:
        DataError: a struct with two keys of one name.
    """
    reads = {}
    for field in schema:
        read = read_of(field.type, f"{what}, column {field.name!r}", KEPT if field.name == main else ())
        if read is not None:
            reads[field.name] = read

    def restore(row: dict[str, Any]) -> dict[str, Any]:
        for name, read in reads.items():
            if row.get(name) is not None:
                row[name] = read(row[name])
        return row

    return restore


def read_of(kind: pa.DataType, what: str, kept: Collection[str] = ()) -> Read | None:
    """How values of a type become those of a document; None: they are it.

    - In a struct, every row has all keys of the column, so a key that a row does not have and one that is null look the
      same: both are left out.
    - A map becomes a dict, and Arrow's JSON type what it says; their nulls stay.

    Args:
        what: file and column, for error messages.
        kept: keys that stay if they are null, in the structs of the outermost list.

    Raises:
        DataError: a struct with two keys of one name.
    """
    if pa.types.is_dictionary(kind):
        return read_of(kind.value_type, what, kept)
    if isinstance(kind, pa.JsonType):
        return lambda text: parse_json(text, what, "JSON, as the type of the column says")
    if pa.types.is_struct(kind):
        return _read_of_struct(kind, what, frozenset(kept))
    if pa.types.is_map(kind):
        item = read_of(kind.item_type, what)
        return lambda pairs: {key: _apply(item, value) for key, value in pairs}
    if is_list(kind):
        item = read_of(kind.value_type, what, kept)
        return None if item is None else lambda values: [_apply(item, value) for value in values]
    return None


def _read_of_struct(kind: pa.StructType, what: str, kept: frozenset[str]) -> Read:
    """`read_of` for a struct; a key is kept in it, and not in what it holds."""
    names = [field.name for field in kind]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{what}, key {twice[0]!r}", "a struct has every key once", "twice", "rename one, or drop it")
    reads = {field.name: read_of(field.type, what) for field in kind}

    def read(value: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, item in value.items():
            if item is not None:
                one = reads[name]
                found[name] = item if one is None else one(item)
            elif name in kept:
                found[name] = None
        return found

    return read


def _apply(read: Read | None, value: Any) -> Any:
    """A value that may be None, as `read` makes it."""
    return value if read is None or value is None else read(value)


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of Arrow's list types: list, large list, fixed-size list, or a view of either."""
    types = pa.types
    kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(is_kind(kind) for is_kind in kinds)


class TableRows:
    """Rows of a table in memory, or of a memory-mapped one.

    Args:
        restore: makes the columns of a row into their values, or raises the DataError of a bad row.
        before: called before a row is read; may raise.
    """

    def __init__(self, table: pa.Table, restore: Restore, before: Callable[[], object] = lambda: None):
        self._length, self._restore, self._before = int(table.num_rows), restore, before
        self._columns = {name: one_chunk(table.column(name)) for name in table.column_names}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Row `index`, which is at least 0 and less than the length."""
        self._before()
        return self._restore({name: column[index].as_py() for name, column in self._columns.items()})


class HeadRows(TableRows):
    """The first rows of a file that is not converted yet; how many it has is not known."""


def one_chunk(column: pa.ChunkedArray) -> Any:
    """A column whose values are found without a search for their chunk, if it has one chunk only."""
    return column.chunk(0) if column.num_chunks == 1 else column


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
    # Every row must be a list of at least one complete message. Rows are only made into Python objects if a content is
    # null or not text, or the column holds JSON.
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
    return column_type.value_type if pa.types.is_dictionary(column_type) else column_type


def _decoded(column: pa.Array) -> pa.Array:
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
    bad = pc.index(valid, False).as_py()
    if bad >= 0:
        raise DataError(f"{what}, row {first_row + bad}", rule, found)


def _require_utf8(column: Any, what: str, first_row: int, row_of: Any = None) -> None:
    """Raises DataError if text in an Arrow array is not UTF-8, naming its row, or if the array is damaged otherwise."""
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
