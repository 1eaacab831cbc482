"""One data file → its rows by index, with the checked columns of a layout, and a hash of its content.

Arrow files are memory-mapped in place. Small data are read into memory and checked row by row. Of large data, only the
index is: Parquet has it in its footer, of JSON lines and text the lines are counted once; rows are checked as they are
read, and nothing is copied. What can only be read from the start (compressed files, CSV, a JSON list) is converted once to
Parquet in the cache. `datasets` is not imported: it takes half a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distill_rl.data.reading import records
from distill_rl.data.reading.arrow_rows import HeadRows, TableRows, restore_of
from distill_rl.data.reading.block_rows import BlockStore, GroupRows, LineRows, SameFile, WholeFile
from distill_rl.data.reading.cache import Cache, replacing
from distill_rl.data.reading.columns import check_column, check_type
from distill_rl.data.reading.layouts import Layout
from distill_rl.data.reading.lines import LineIndex
from distill_rl.data.reading.records import AS_JSON, COMPRESSIONS, SampleBy, stored_columns, stored_row
from distill_rl.errors import DataError
from distill_rl.system.files import size_text

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


class Rows(Protocol):
    """Rows by index, each as {column: value}."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


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
            return list(_open_arrow(path).column_names)
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
        return _open_arrow(path)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def open_file(path: Path, layout: Layout, access: Access) -> Rows:
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


def _open_parquet(path: Path, layout: Layout, access: Access) -> Rows:
    """The columns of a Parquet file: in memory and checked, or by row groups."""
    if path.stat().st_size == 0:
        raise _empty(path)
    file = SameFile(path)
    metadata = pq.read_metadata(path)
    schema = metadata.schema.to_arrow_schema()
    columns = layout.columns(schema.names, str(path))
    if not metadata.num_rows:
        raise _empty(path)
    what = f"{path}, column {layout.key!r}"
    restore = restore_of(pa.schema([schema.field(name) for name in columns]), layout.key, str(path))
    if not (access.small and access.strict):
        if layout.format in ("text", "messages"):
            check_type(schema.field(layout.key).type, layout.kind, what)
        return GroupRows(file, metadata, columns, layout.required, access.store, restore)
    with file.reading(), pq.ParquetFile(path, metadata=metadata) as parquet:
        table = parquet.read(columns=columns)
    check_columns(table, layout, f"{path}:")
    return TableRows(table, restore)


def _table(path: Path, layout: Layout, access: Access, rows: int | None = None) -> pa.Table:
    """The rows of a file, or the first of them, as a table of text. Raises DataError if there are none."""
    found = records.documents(path, layout, access.sample_by, strict=access.strict)
    batches = list(_batches(islice(found, rows), stored_columns(layout, strict=access.strict)))
    if not batches:
        raise _empty(path)
    return pa.Table.from_batches(batches).combine_chunks()


def _open_converted(path: Path, layout: Layout, access: Access) -> Rows:
    """The rows of a file from its Parquet copy in the cache, which is written if it is missing.

    Copies are keyed by path, size, modification time and layout, so an edited file is converted again. If nothing may be
    written, only the first rows are read.
    """
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
    return GroupRows(
        SameFile(target, watched=False), pq.read_metadata(target), names, (), access.store, stored_row, _GROUP_BYTES
    )


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


def check_columns(columns: Any, layout: Layout, what: str, first_row: int = 0) -> None:
    """Checks the rows of an Arrow table or record batch, without Python objects where the layout allows it.

    Args:
        what: words for the file, before the word "column" in error messages.
        first_row: row number of the first row.

    Raises:
        DataError: a column of another type; a row that does not fit the layout.
    """
    if layout.format in ("text", "messages"):
        check_column(columns.column(layout.key), layout.kind, f"{what} column {layout.key!r}", first_row)
        columns = columns.select([name for name in columns.schema.names if name != layout.key])
        if not columns.num_columns:
            return
    restore = restore_of(columns.schema, layout.key, what.rstrip(":,"))
    for row, values in enumerate(map(restore, _pylist(columns))):
        layout.check(values, lambda column, row=row: f"{what} column {column!r}, row {first_row + row}")  # type: ignore[misc]


def _pylist(columns: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of an Arrow table or record batch as dicts, some at a time."""
    for first in range(0, columns.num_rows, 256):
        yield from columns.slice(first, 256).to_pylist()


def content_hash(paths: Sequence[Path]) -> str:
    """SHA-256 (hexadecimal) over the content of files in the given order; their names and locations do not matter.

    Up to 1 GiB in total, every byte is hashed, and sizes. Beyond that, files of more than 4 MiB contribute only their
    size and 64 samples of 64 KiB, including their first and last bytes: an edit that keeps the size and misses all
    samples is not noticed.
    """
    digest = hashlib.sha256()
    sizes = [path.stat().st_size for path in paths]
    whole = sum(sizes) <= HASH_WHOLE_BYTES
    for path, size in zip(paths, sizes):
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


def _open_arrow(path: Path) -> pa.Table:
    """The table of an Arrow file, memory-mapped.

    The file is in the stream format that `datasets` writes, or in the random-access file format.

    Raises:
        pyarrow.ArrowInvalid, OSError: a damaged or missing file.
    """
    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid as stream_error:
        source.seek(0)
        if source.read(6) != b"ARROW1":
            raise stream_error
        return pa.ipc.open_file(source).read_all()


def _empty(path: Path) -> EmptyFile:
    """The error for a file without rows, for the caller to raise."""
    return EmptyFile(str(path), "at least one row", "an empty file")


def _damaged(path: Path, error: Exception) -> DataError:
    """The error for a file that cannot be read, with the first 200 characters of `error`, for the caller to raise."""
    kind = path.suffix[1:] or "folder"
    return DataError(str(path), f"a readable, complete {kind} file", str(error)[:200], "the file may be truncated")
