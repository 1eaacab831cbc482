"""One data file → its rows by index, with the checked columns of a layout, and a hash of its content.

Arrow files are memory-mapped in place. Small data are read into memory and checked row by row. Of large data, only the
index is: Parquet has it in its footer, of JSON lines and text the lines are counted once; rows are checked as they are
read, a block at a time, and nothing is copied. What can only be read from the start (compressed files, CSV, a JSON list) is
converted once to Parquet in the cache. `datasets` is not imported: it takes half a second.
"""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distill_rl.data.order import Blocks, place_in
from distill_rl.data.reading import records
from distill_rl.data.reading.cache import Cache, replacing
from distill_rl.data.reading.layouts import MEDIA, Kind, RowLayout, parse_json
from distill_rl.data.reading.records import AS_JSON, COMPRESSIONS, SampleBy, stored_columns, stored_row
from distill_rl.errors import DataError, UnreadableFile
from distill_rl.system.files import size_text

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
    if twice := [name for name, count in Counter(field.name for field in kind).items() if count > 1]:
        raise DataError(f"{what}, key {twice[0]!r}", "a struct has every key once", "twice", "rename one, or drop it")
    reads = {field.name: read_of(field.type, what) for field in kind}
    return lambda value: {
        name: _apply(reads[name], item) for name, item in value.items() if item is not None or name in kept
    }


def _apply(read: Read | None, value: Any) -> Any:
    """A value that may be None, as `read` makes it."""
    return value if read is None or value is None else read(value)


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of Arrow's list types: list, large list, fixed-size list, or a view of either."""
    kinds = pa.ListType | pa.LargeListType | pa.FixedSizeListType | pa.ListViewType | pa.LargeListViewType
    return isinstance(kind, kinds)


class TableRows:
    """Rows of a table in memory, or of a memory-mapped one.

    Args:
        restore: makes the columns of a row into their values, or raises the DataError of a bad row.
    """

    def __init__(self, table: pa.Table, restore: Restore):
        self._length, self._restore = int(table.num_rows), restore
        self.before: Callable[[], object] = lambda: None
        """Called before a row is read; may raise."""
        self._columns = {name: one_chunk(table.column(name)) for name in table.column_names}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Row `index`, which is at least 0 and less than the length."""
        self.before()
        return self._restore({name: column[index].as_py() for name, column in self._columns.items()})


class HeadRows(TableRows):
    """The first rows of a file that is not converted yet; how many it has is not known."""


def one_chunk(column: pa.ChunkedArray) -> Any:
    """A column whose values are found without a search for their chunk, if it has one chunk only."""
    return column.chunk(0) if column.num_chunks == 1 else column


def check_type(column_type: pa.DataType, kind: Kind, what: str) -> None:
    """Checks the type of a column: text, or messages: lists of structs with a role, or the JSON text of such a list.

    Either may be in dictionary form, as categories are.

    Args:
        what: file and column, for error messages.

    Raises:
        DataError: another type.
    """
    plain = _plain_type(column_type)
    if kind == "text":
        _require_string(plain, what)
    elif not (is_string(plain) or isinstance(plain, pa.JsonType)):
        item = plain.value_type if is_list(plain) else None
        names = {field.name for field in item} if item is not None and pa.types.is_struct(item) else set()
        if item is None or "role" not in names:
            remedy = "set data.format=sharegpt" if {"from", "value"} <= names else ""
            rule = "a list of messages {role, content}"
            raise DataError(f"{what}, row 0", rule, f"the type {str(plain)[:100]}", remedy)
        _require_string(_plain_type(item.field("role").type), f"{what}, role")


def _plain_type(column_type: pa.DataType) -> pa.DataType:
    return column_type.value_type if pa.types.is_dictionary(column_type) else column_type


def is_string(column_type: pa.DataType) -> bool:
    """Whether a type is one of Arrow's string types: string, large string or string view."""
    return column_type in (pa.string(), pa.large_string(), pa.string_view())


def _require_string(column_type: pa.DataType, what: str) -> None:
    if not is_string(column_type):
        raise DataError(f"{what}, row 0", "text", f"the type {str(column_type)[:100]}")


# Rows of files that are too large for memory: read a block at a time, when a row of it is asked for.

BLOCK_BYTES = 4 << 20
"""Bytes that a block has at least, but for the last of a file. The order of large data depends on it."""
_KEPT = 4


class SameFile:
    """A file that must not be edited or replaced while it is read: its size and time are those that it has now.

    Args:
        watched: False: a copy of our own, which another process may replace by an equal one.
    """

    def __init__(self, path: Path, *, watched: bool = True):
        self.path, self._state = path, self._now(path) if watched else None

    def require(self) -> None:
        """Raises UnreadableFile if the file has changed, or is gone."""
        try:
            is_same = self._state in (None, self._now(self.path))
        except OSError as error:
            raise UnreadableFile(str(self.path), "is readable", str(error)) from error
        if not is_same:
            rule = "has the size and time that it had when it was opened"
            raise UnreadableFile(str(self.path), rule, "others: it was edited or replaced", "start again")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Calls `require` when a block that reads the file ends, also by an error, which a change may explain."""
        try:
            yield
        finally:
            self.require()

    @staticmethod
    def _now(path: Path) -> tuple[int, int]:
        status = path.stat()
        return status.st_size, status.st_mtime_ns


class BlockStore:
    """The blocks of a source that are in memory: those of one window, or the last few that were read."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Hashable, Any] = OrderedDict()
        self._limit = _KEPT

    def get(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """The block under a key, which is read if it is not in memory."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        while len(self._blocks) >= self._limit:  # first make room, then read
            self._blocks.popitem(last=False)
        block = self._blocks[key] = read()
        return block

    def keep(self, keys: Collection[Hashable]) -> None:
        """Drops all other blocks, and makes room for these."""
        self._limit = max(len(keys), _KEPT)
        for key in [key for key in self._blocks if key not in keys]:
            del self._blocks[key]


class BlockRows:
    """Rows of a file that are read a block at a time, when one of them is asked for.

    Args:
        file: as it was before it was looked at.
        blocks: the file's.
        store: shared by the files of a source.
    """

    def __init__(self, file: SameFile, blocks: Blocks, store: BlockStore):
        self._file, self.blocks, self._store = file, blocks, store

    def __len__(self) -> int:
        return int(self.blocks.ends[-1]) if len(self.blocks.ends) else 0

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Row `index`, which is at least 0 and less than the length.

        Raises:
            DataError: the file was changed, cannot be read, or the row cannot.
        """
        number, place = place_in(self.blocks.ends, index)
        return self._row(self._store.get(self.key(number), lambda: self._load(number)), place, index)

    def key(self, block: int) -> Hashable:
        """What a block has in the store."""
        return (self._file.path, block)

    def _load(self, number: int) -> Any:
        try:
            with self._file.reading():
                return self._read(number)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(number, error) from error

    def _unreadable(self, number: int, error: Exception) -> UnreadableFile:
        return UnreadableFile(str(self._file.path), "is readable", str(error))

    def _read(self, number: int) -> Any:
        """Block `number`, read from the file."""
        raise NotImplementedError

    def _row(self, block: Any, place: int, index: int) -> dict[str, Any]:
        """The row at a place of a block, which is row `index` of the file."""
        raise NotImplementedError


class GroupRows(BlockRows):
    """The rows of a Parquet file, by row groups.

    Args:
        file: as it was before its footer was read.
        metadata: the footer.
        columns: those to read.
        measured: those of them whose size counts, so that optional columns do not change the order.
        store: shared by the files of a source.
        restore: makes the columns of a row into their values, or raises the DataError of a bad row.
        block_bytes: of every row group; 0: of each the bytes of the measured columns in the footer, uncompressed.
    """

    def __init__(
        self,
        file: SameFile,
        metadata: pq.FileMetaData,
        columns: list[str],
        measured: Collection[str],
        store: BlockStore,
        restore: Restore,
        block_bytes: int = 0,
    ):
        self._metadata, self._columns, self._restore = metadata, columns, restore
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        leaves = _leaves_of(metadata.schema.to_arrow_schema(), measured)
        sizes = [block_bytes or sum(group.column(i).total_uncompressed_size for i in leaves) for group in groups]
        ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        super().__init__(file, Blocks(ends, np.array(sizes, dtype=np.int64)), store)

    def _read(self, number: int) -> dict[str, pa.Array]:
        with pq.ParquetFile(self._file.path, metadata=self._metadata) as file:
            table = file.read_row_group(number, columns=self._columns, use_threads=False)
        return {name: one_chunk(table.column(name)) for name in table.column_names}

    def _unreadable(self, number: int, error: Exception) -> UnreadableFile:
        rule = f"row group {number} is readable"
        return UnreadableFile(str(self._file.path), rule, str(error)[:200], "the file may be damaged")

    def _row(self, block: dict[str, pa.Array], place: int, index: int) -> dict[str, Any]:
        return self._restore({name: column[place].as_py() for name, column in block.items()})


def _leaves_of(schema: pa.Schema, names: Collection[str]) -> list[int]:
    """The indices of the Parquet columns that hold some columns of a schema; a nested one has several."""
    leaves = [field.name for field in schema for _ in range(_num_leaves(field.type))]
    return [i for i, name in enumerate(leaves) if name in names]


def _num_leaves(kind: pa.DataType) -> int:
    children = [kind.field(i).type for i in range(kind.num_fields)]
    return sum(map(_num_leaves, children)) if children else 1


class LineRows(BlockRows):
    """The rows of a file of JSON lines, or of lines of text.

    Args:
        file: as it was before the index was made.
        index: of the file's lines.
        store: shared by the files of a source.
    """

    def __init__(self, file: SameFile, index: LineIndex, layout: RowLayout, store: BlockStore):
        super().__init__(file, Blocks(index.rows[1:], np.diff(index.offsets)), store)
        self._layout, self._index = layout, index
        self._parse = records.text_row if records.kind_of(file.path) == ".txt" else records.json_row
        self._names = {*layout.names, *(() if layout.kind == "text" else MEDIA)}

    def _read(self, number: int) -> list[bytes]:
        first, end = self._index.offsets[number : number + 2].tolist()
        with self._file.path.open("rb") as file:
            file.seek(first)
            text = file.read(end - first)
        lines = _rows_of(text)
        if first == 0 and text.startswith(BOM_UTF8):
            lines[0] = records.without_mark(lines[0])
        if len(lines) != self._index.rows[number + 1] - self._index.rows[number]:
            rule = "has the lines that it had when it was opened"
            raise UnreadableFile(str(self._file.path), rule, f"other lines from byte {first} on", "start again")
        return lines

    def _row(self, block: list[bytes], place: int, index: int) -> dict[str, Any]:
        what = f"{self._file.path}: row {index}"
        row = records.with_columns(self._parse(block[place], what), self._layout, what)
        return {name: value for name, value in row.items() if name in self._names}


class WholeFile(BlockRows):
    """A text file as one row.

    Args:
        store: shared by the files of a source.
    """

    def __init__(self, path: Path, store: BlockStore):
        sizes = np.array([path.stat().st_size], dtype=np.int64)
        super().__init__(SameFile(path), Blocks(np.array([1], dtype=np.int64), sizes), store)

    def _read(self, number: int) -> dict[str, Any]:
        text = records.without_mark(self._file.path.read_bytes())
        return records.text_row(text, f"{self._file.path}: row 0")

    def _row(self, block: dict[str, Any], place: int, index: int) -> dict[str, Any]:
        return dict(block)


FileRows = TableRows | BlockRows


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The opened rows of a file, an Arrow folder or a hub data set, with only the columns of a layout."""

    name: str
    rows: FileRows
    layout: RowLayout

    def _at(self, row: int, column: str) -> str:
        """Words for a row and a column of it."""
        return f"{self.name}, column {column!r}, row {row}"

    def values(self, row: int) -> dict[str, Any]:
        """The columns of a row, as they are read and not checked. Raises DataError for a row that cannot be read."""
        try:
            return self.rows[row]
        except UnicodeDecodeError as error:
            found = f"byte 0x{error.object[error.start]:02x} at {error.start}"
            raise DataError(self._at(row, self.layout.key), "text is UTF-8", found) from error

    def document(self, row: int) -> dict[str, Any]:
        """The document of a row (`RowLayout.document`). Raises DataError for a row that does not fit the layout."""
        values = self.values(row)
        try:
            return self.layout.document(values, partial(self._at, row))
        except RecursionError as error:
            raise DataError(self._at(row, self.layout.key), "is nested less deeply", "too many levels") from error

    def check(self, table: pa.Table) -> None:
        """Checks all rows of the table that they are. Raises DataError for the first bad one, or a damaged table."""
        damage = None
        try:
            table.validate(full=True)
        except pa.ArrowInvalid as error:  # also for text that is not UTF-8, whose row is found below
            damage = error
        for row in range(len(self.rows)):
            self.document(row)
        if damage:
            found = str(damage)[:200]
            raise DataError(self.name, "valid Arrow columns", found, "the file may be damaged") from damage


@dataclass(frozen=True, slots=True)
class LineIndex:
    """Where the blocks of a file begin, and the file ends; lines that are not blank are rows."""

    offsets: np.ndarray
    """int64 [B + 1], in bytes."""
    rows: np.ndarray
    """int64 [B + 1], rows before each offset."""

    @classmethod
    def of(cls, path: Path, cache: Cache) -> LineIndex:
        """The index of a file, from the cache or by reading the file once, at the speed of the disk.

        One that cannot be written to the cache is said, and made again next time.

        Raises:
            OSError: the file cannot be read.
        """
        entry = cache.entry(path, f"lines {BLOCK_BYTES}", ".npy")
        with suppress(OSError, ValueError, EOFError):  # there is none, or it is damaged
            return cls(*np.load(entry))
        index = _scan(path)
        if cache.write:
            try:
                with replacing(entry) as partial:
                    np.save(partial, np.stack([index.offsets, index.rows]))
            except (OSError, DataError) as error:
                cache.say(f"not kept   the index of {path}, which is made again at every start: {error}")
        return index


def _scan(path: Path) -> LineIndex:
    """Reads a file and counts the rows of its blocks, each of which ends with a line."""
    offsets, rows = [0], [0]
    with path.open("rb") as file:  # a buffered read is full unless the file ends
        parts: list[bytes] = []  # of the block; a line may be longer than it
        while chunk := file.read(BLOCK_BYTES):
            end = chunk.rfind(b"\n") + 1
            if not end:
                parts.append(chunk)
                continue
            block = b"".join([*parts, chunk[:end]])
            parts = [chunk[end:]]
            offsets.append(offsets[-1] + len(block))
            rows.append(rows[-1] + len(_rows_of(block)))
    if rest := b"".join(parts):
        offsets.append(offsets[-1] + len(rest))
        rows.append(rows[-1] + len(_rows_of(rest)))
    return LineIndex(np.array(offsets, dtype=np.int64), np.array(rows, dtype=np.int64))


def _rows_of(block: bytes) -> list[bytes]:
    """The lines of a block that are rows: those that are not blank."""
    return [line for line in block.split(b"\n") if line.strip()]


_PACKABLE = (".json", ".jsonl", ".ndjson", ".txt", ".csv")
SUFFIXES = (".arrow", ".parquet", *_PACKABLE, *(kind + packed for kind in _PACKABLE for packed in COMPRESSIONS))
"""What names of data files end in, in lower or upper case."""
SMALL_BYTES = 64 << 20
"""Data of less than this are read into memory, and checked, when they are opened."""
HASH_WHOLE_BYTES = 1 << 30
"""Data up to this size are hashed byte for byte; larger data by file sizes and evenly spaced samples."""
_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10
_RATIO = 8
"""Text is taken to be this much larger than its compressed file."""
_GROUP_BYTES, _GROUP_ROWS = 8 << 20, 1 << 16
"""Row groups of converted files have this much text, or this many rows. The order of large data depends on it."""
_HEAD_ROWS = 128


@dataclass(frozen=True, slots=True)
class Access:
    """How the files of a source are opened."""

    cache: Cache
    store: BlockStore
    small: bool
    """Whether all of them together are read into memory."""
    strict: bool
    """Whether a bad row is an error when the file is opened; otherwise only when it is read."""
    sample_by: SampleBy = "line"


class EmptyFile(DataError):
    """A file without rows."""


def column_names(path: Path, sample_by: SampleBy = "line", *, strict: bool = True) -> list[str]:
    """The columns of a file; for formats without a schema, those of the first row.

    Args:
        strict: False: of the first rows together, without those that cannot be read.

    Raises:
        EmptyFile: no rows (an Arrow or Parquet file only if it has no bytes).
        DataError: a damaged file.
    """
    if path.stat().st_size == 0:
        raise _empty(path)
    try:
        kind = records.kind_of(path)
        if kind == ".arrow":
            return list(open_arrow(path).column_names)
        if kind == ".parquet":
            return list(pq.read_schema(path).names)
        names = records.first_columns(path, sample_by, strict=strict)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise _damaged(path, error) from error
    if names is None:
        raise _empty(path)
    return names


def bytes_in_memory(path: Path) -> int:
    """About how much memory the rows of a file take; 0 for an Arrow file, which is memory-mapped."""
    if records.kind_of(path) == ".arrow":
        return 0
    return path.stat().st_size * (_RATIO if records.compression_of(path) else 1)


def open_arrow(path: Path) -> pa.Table:
    """The table of an Arrow file, memory-mapped. Raises DataError for a damaged one."""
    if path.stat().st_size == 0:
        raise _empty(path)
    try:
        source = pa.memory_map(str(path))
        is_file = source.read(6) == b"ARROW1"  # otherwise a stream, which `datasets` writes
        source.seek(0)
        return (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)).read_all()
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def open_file(path: Path, layout: RowLayout, access: Access) -> FileRows:
    """The columns of a file, other than an Arrow file, that the layout reads, with nothing else.

    Raises:
        EmptyFile: no rows.
        DataError: a missing column; a damaged file; with `access.strict` and small data, a row that does not fit the
            layout; a conversion that cannot be written.
    """
    kind, packed = records.kind_of(path), records.compression_of(path)
    try:
        if kind == ".parquet":
            return _open_parquet(path, layout, access)
        layout.columns(column_names(path, access.sample_by, strict=access.strict), str(path))
        if not packed and not (access.small and access.strict):
            if kind == ".txt" and access.sample_by == "document":
                return WholeFile(path, access.store)
            if kind in (".json", ".jsonl", ".txt") and not records.is_json_list(path):
                file = SameFile(path)
                return LineRows(file, LineIndex.of(path, access.cache), layout, access.store)
        if access.small:
            return TableRows(_table(path, layout, access), stored_row)
        return _open_converted(path, layout, access)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise _damaged(path, error) from error


def _open_parquet(path: Path, layout: RowLayout, access: Access) -> FileRows:
    if path.stat().st_size == 0:
        raise _empty(path)
    file = SameFile(path)
    metadata = pq.read_metadata(path)
    schema = metadata.schema.to_arrow_schema()
    columns = layout.columns(schema.names, str(path))
    if not metadata.num_rows:
        raise _empty(path)
    restore = restore_of(pa.schema([schema.field(name) for name in columns]), layout.key, str(path))
    if layout.format in ("text", "messages"):
        check_type(schema.field(layout.key).type, layout.kind, f"{path}, column {layout.key!r}")
    if not (access.small and access.strict):
        return GroupRows(file, metadata, columns, layout.required, access.store, restore)
    with file.reading(), pq.ParquetFile(path, metadata=metadata) as parquet:
        table = parquet.read(columns=columns)
    rows = TableRows(table, restore)
    SourcePart(str(path), rows, layout).check(table)
    return rows


def _table(path: Path, layout: RowLayout, access: Access, rows: int | None = None) -> pa.Table:
    """The rows of a file, or the first of them, as a table of text. Raises DataError if there are none."""
    found = records.documents(path, layout, access.sample_by, strict=access.strict)
    batches = list(_batches(islice(found, rows), stored_columns(layout, strict=access.strict)))
    if not batches:
        raise _empty(path)
    return pa.Table.from_batches(batches).combine_chunks()


def _open_converted(path: Path, layout: RowLayout, access: Access) -> FileRows:
    """The rows of a file from its Parquet copy in the cache, which is written if it is missing."""
    # Copies are keyed by path, size, modification time and layout, so an edited file is converted again. If nothing may
    # be written, only the first rows are read.
    cache, names = access.cache, stored_columns(layout, strict=access.strict)
    columns = f"{layout}{' '.join(map(repr, layout.chosen_by))}"
    target = cache.entry(path, f"{columns}\0{access.strict}\0{access.sample_by}\0{AS_JSON}", ".parquet")
    if not _is_complete(target):
        if not cache.write:
            return HeadRows(_table(path, layout, access, _HEAD_ROWS), stored_row)
        cache.say(f"converting {path} ({size_text(path.stat().st_size)}) to Parquet, once, in {cache.folder}")
        found = records.documents(path, layout, access.sample_by, strict=access.strict)
        schema = pa.schema([(name, pa.large_string()) for name in names])
        with replacing(target) as partial, SameFile(path).reading():
            with pq.ParquetWriter(partial, schema, compression="zstd", use_dictionary=False) as writer:
                for batch in _batches(found, names):
                    writer.write_table(pa.Table.from_batches([batch]), row_group_size=len(batch))
            if not pq.read_metadata(partial).num_rows:
                raise _empty(path)
        cache.say(f"converted  {path}: {size_text(target.stat().st_size)}")
    file, metadata = SameFile(target, watched=False), pq.read_metadata(target)
    return GroupRows(file, metadata, names, (), access.store, stored_row, _GROUP_BYTES)


def _is_complete(target: Path) -> bool:
    """Whether a converted copy exists with its footer, which is written last."""
    try:
        pq.read_metadata(target)
    except (pa.ArrowException, OSError):
        return False
    return True


def _batches(rows: Iterator[dict[str, str | None]], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields rows of text in batches of `_GROUP_BYTES` or `_GROUP_ROWS`; the last has less."""
    batch: list[dict[str, str | None]] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(len(value) for name, value in row.items() if value is not None and name != AS_JSON)
        if size >= _GROUP_BYTES or len(batch) >= _GROUP_ROWS:
            yield _record_batch(batch, names)
            batch, size = [], 0
    if batch:
        yield _record_batch(batch, names)


def _record_batch(rows: Sequence[dict[str, str | None]], names: Sequence[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([_text_array([row.get(name) for row in rows]) for name in names], list(names))


def _text_array(texts: Sequence[str | None]) -> pa.LargeStringArray:
    """An Arrow array of texts. `pa.array` makes the same, but imports pandas first, which takes a third of a second."""
    encoded = [b"" if text is None else text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    present = np.packbits(np.array([text is not None for text in texts], dtype=bool), bitorder="little")
    buffers = [pa.py_buffer(buffer) for buffer in (offsets, b"".join(encoded), present)]
    return pa.LargeStringArray.from_buffers(len(texts), *buffers)


def content_hash(paths: Sequence[Path]) -> str:
    """SHA-256 (hexadecimal) over the content of files in the given order; their names and locations do not matter.

    Up to 1 GiB in total, every byte is hashed, and sizes. Beyond that, files of more than 4 MiB contribute only their
    size and 64 samples of 64 KiB, including their first and last bytes: an edit that keeps the size and misses all
    samples is not noticed.
    """
    digest = hashlib.sha256()
    whole = sum(path.stat().st_size for path in paths) <= HASH_WHOLE_BYTES
    for path in paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            if whole or size <= _SAMPLES * _SAMPLE_BYTES:
                while block := file.read(1 << 20):
                    digest.update(block)
                continue
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _empty(path: Path) -> EmptyFile:
    return EmptyFile(str(path), "at least one row", "an empty file")


def _damaged(path: Path, error: Exception) -> DataError:
    """The error for a file that cannot be read, with the first 200 characters of `error`, for the caller to raise."""
    kind = path.suffix[1:] or "folder"
    return DataError(str(path), f"a readable, complete {kind} file", str(error)[:200], "the file may be truncated")
