"""Rows of Arrow and Parquet columns as Python values, by one rule for files, folders and row groups of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pyarrow as pa

from distill_rl.data.reading.values import parse_json
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
