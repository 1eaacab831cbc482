"""One data file → its rows by index, with the checked columns of a layout, and a hash of its content.

Arrow files are memory-mapped in place. Parquet and JSON files are read into memory if they are small; larger ones are
converted once to an Arrow file in the cache folder of `datasets` (`HF_DATASETS_CACHE`), so that all processes that open
them share one copy. `datasets` is imported only where it is needed: small JSON files do without.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distill_rl.data.layouts import Layout
from distill_rl.data.rows import check_column
from distill_rl.errors import DataError

if TYPE_CHECKING:
    import datasets

SUFFIXES = (".arrow", ".parquet", ".json", ".jsonl")
CACHE_FROM_BYTES = 64 << 20
"""Parquet and JSON files of this size or more are converted to a memory-mapped Arrow file."""
HASH_WHOLE_BYTES = 1 << 30
"""Data up to this size are hashed byte for byte; larger data by file sizes and evenly spaced samples."""
_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10
_ROWS_PER_BATCH = 4096


class Rows(Protocol):
    """Rows by index, each as {column: value}; `datasets.Dataset` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class TextRows:
    """`Rows` of a table in memory whose columns are text. Importing `datasets` takes half a second, and this does not.

    Args:
        table: columns of type large_string. Other types may need the features of `datasets`.
    """

    def __init__(self, table: pa.Table):
        self._table = table.combine_chunks()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Row `index`, which is at least 0 and less than the length."""
        return {name: self._table.column(name)[index].as_py() for name in self._table.column_names}


def column_names(path: Path) -> list[str]:
    """The columns of a file; for JSON, those of the first row.

    Raises:
        DataError: a damaged file, or one without rows (an Arrow or Parquet file only if it has no bytes).
    """
    if path.stat().st_size == 0:
        raise _empty(path)
    if path.suffix in (".json", ".jsonl"):
        for _, row in _json_rows(path):
            return list(row)
        raise _empty(path)
    try:
        return pq.read_schema(path).names if path.suffix == ".parquet" else _open_arrow(path).column_names
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def open_arrow(path: Path, layout: Layout) -> datasets.Dataset:
    """The columns of an Arrow file that the layout reads, as a data set with nothing else. Rows are not checked.

    Raises:
        DataError: a missing column; a damaged file.
    """
    import datasets

    columns = layout.columns(column_names(path), str(path))
    try:
        return datasets.Dataset(_open_arrow(path).select(columns))
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def open_file(path: Path, layout: Layout) -> Rows:
    """The columns of a Parquet or JSON file that the layout reads, with nothing else; rows are checked.

    A large file is converted once to a copy in the cache folder, which later calls reuse unchecked.

    Raises:
        DataError: a missing column; a damaged file; one without rows, or with a row that does not fit the layout; a
            copy that cannot be written, which is reported like a damaged file.
    """
    columns = layout.columns(column_names(path), str(path))
    try:
        if path.stat().st_size < CACHE_FROM_BYTES:
            batches = list(_batches(path, layout, columns))
            if not batches:
                raise _empty(path)
            table = pa.Table.from_batches(batches)
            if path.suffix != ".parquet":
                return TextRows(table)
        else:
            table = _open_arrow(_convert(path, layout, columns))
        import datasets

        return datasets.Dataset(table)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


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


def _batches(path: Path, layout: Layout, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields the columns of a Parquet or JSON file in batches of at most 4,096 rows.

    Each batch is checked before it is yielded. Yields nothing for a file without rows.

    Args:
        columns: those to read of a Parquet file. Of a JSON file all of the layout are read, as the first row, which
            gives the columns, may lack some that later rows have.

    Raises:
        DataError: a row that does not fit the layout; names file and row.
    """
    if path.suffix == ".parquet":
        first_row = 0
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_PER_BATCH, columns=list(columns)):
                check_columns(batch, layout, f"{path}:", first_row)
                yield batch
                first_row += len(batch)
        return
    names = [*layout.required, *layout.optional]
    rows = _json_documents(path, layout, names)
    while batch := list(islice(rows, _ROWS_PER_BATCH)):
        yield pa.RecordBatch.from_arrays([_text_array([row[name] for row in batch]) for name in names], names)


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
    for row, values in enumerate(_pylist(columns)):
        layout.check(values, lambda column, row=row: f"{what} column {column!r}, row {first_row + row}")  # type: ignore[misc]


def _pylist(columns: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of an Arrow table or record batch as dicts, some at a time."""
    for first in range(0, columns.num_rows, 256):
        yield from columns.slice(first, 256).to_pylist()


def _json_documents(path: Path, layout: Layout, names: Sequence[str]) -> Iterator[dict[str, str | None]]:
    """The columns of a JSON file, row by row and checked: text as it is, anything else as its JSON text.

    So a column can hold objects of different shapes, such as the arguments of different tools.

    Raises:
        DataError: a row that is not a JSON object, lacks a column, or does not fit the layout.
    """
    for label, row in _json_rows(path):
        what = f"{path}: {label}"
        for key in layout.required:
            if key not in row:
                raise DataError(what, f"has the column {key!r}, like the first row", sorted(row))
        layout.document(row, lambda column, what=what: f"{what}, column {column!r}")  # type: ignore[misc]
        values = {name: row.get(name) for name in names}
        yield {
            name: value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in values.items()
        }


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of JSON lines or of one JSON list of objects, each with a label for error messages.

    Blank lines are skipped. Lines are read one by one, a list as a whole; only a `.json` file may be a list.

    Raises:
        DataError: text that is not UTF-8 or not JSON; a row that is not an object.
    """
    with path.open("rb") as file:
        is_list = path.suffix == ".json" and file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        file.seek(0)
        if is_list:
            rows = _parse(file.read(), f"{path}: the JSON list")
            for i, row in enumerate(rows):
                yield f"row {i}", _object(row, f"{path}: row {i}")
            return
        i = 0
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            label = f"row {i} (line {line_number})"
            yield label, _object(_parse(line, f"{path}: {label}"), f"{path}: {label}")
            i += 1


def _parse(text: bytes, what: str) -> Any:
    """The value of a JSON text, with or without a byte-order mark.

    Args:
        what: file and row, for error messages.

    Raises:
        DataError: not UTF-8, or not complete, valid JSON.
    """
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            what, "text is UTF-8", f"byte 0x{text[error.start]:02x} at byte {error.start}", "convert the file to UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        found = getattr(error, "msg", str(error))
        remedy = "the file may be truncated, or not JSON lines"
        raise DataError(
            what, "is complete, valid JSON", f"{found} at character {getattr(error, 'pos', 0)}", remedy
        ) from error


def _object(row: Any, what: str) -> dict[str, Any]:
    """Returns a row that is a JSON object. Raises DataError for anything else."""
    if not isinstance(row, dict):
        raise DataError(what, "is a JSON object with the columns as its keys", type(row).__name__)
    return row


def _convert(path: Path, layout: Layout, columns: Sequence[str]) -> Path:
    """The path of the cached Arrow copy of a file's columns; it is written atomically if it is missing.

    Copies are keyed by path, size, modification time and layout, so an edited file is converted again. The rows are
    checked as they are written.

    Raises:
        DataError: a file without rows; a row that is not of the kind.
        pyarrow.ArrowException, OSError: the file cannot be read, or the copy cannot be written.
    """
    from datasets.config import HF_DATASETS_CACHE

    status = path.stat()
    name = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{layout}"
    folder = Path(HF_DATASETS_CACHE) / "distill_rl"
    target = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.arrow"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    batches = _batches(path, layout, columns)
    first = next(batches, None)
    if first is None:
        raise _empty(path)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            with pa.ipc.new_stream(file, first.schema) as writer:
                writer.write_batch(first)
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _empty(path: Path) -> DataError:
    """The error for a file without rows, for the caller to raise."""
    return DataError(str(path), "at least one row", "an empty file")


def _damaged(path: Path, error: Exception) -> DataError:
    """The error for a file that cannot be read, with the first 200 characters of `error`, for the caller to raise."""
    kind = path.suffix[1:] or "folder"
    return DataError(str(path), f"a readable, complete {kind} file", str(error)[:200], "the file may be truncated")
