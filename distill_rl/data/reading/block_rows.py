"""Rows of files that are too large for memory: read a block at a time, when a row of it is asked for.

Lines are found by number through an index of every few MiB, so a file is neither copied nor held in memory."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distill_rl.data.order import Blocks
from distill_rl.data.reading.arrow_rows import Restore, one_chunk
from distill_rl.data.reading.cache import Cache, replacing
from distill_rl.data.reading.layouts import MEDIA, RowLayout
from distill_rl.data.reading.records import json_row, kind_of, text_row, with_columns, without_mark
from distill_rl.errors import DataError, UnreadableFile

BLOCK_BYTES = 4 << 20
"""Bytes that a block has at least, but for the last of a file. The order of large data depends on it."""
_SPACE = np.isin(np.arange(256), np.frombuffer(b" \t\r\n\v\f", np.uint8))

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


class GroupRows:
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
        self._file, self._metadata, self._columns, self._store = file, metadata, columns, store
        self._restore = restore
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        leaves = _leaves_of(metadata.schema.to_arrow_schema(), measured)
        sizes = [block_bytes or sum(group.column(i).total_uncompressed_size for i in leaves) for group in groups]
        ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        self.blocks = Blocks(ends, np.array(sizes, dtype=np.int64))

    def __len__(self) -> int:
        return int(self._metadata.num_rows)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Row `index`, which is at least 0 and less than the length.

        Raises:
            DataError: its row group is damaged, the file was changed, or the row could not be read when it was converted.
        """
        block = int(np.searchsorted(self.blocks.ends, index, side="right"))
        columns = self._store.get(self.key(block), lambda: self._read(block))
        first = int(self.blocks.ends[block - 1]) if block else 0
        return self._restore({name: column[index - first].as_py() for name, column in columns.items()})

    def key(self, block: int) -> Hashable:
        return (self._file.path, block)

    def _read(self, block: int) -> dict[str, pa.Array]:
        path = self._file.path
        try:
            with self._file.reading(), pq.ParquetFile(path, metadata=self._metadata) as file:
                table = file.read_row_group(block, columns=self._columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            rule, found = f"row group {block} is readable", str(error)[:200]
            raise UnreadableFile(str(path), rule, found, "the file may be damaged") from error
        return {name: one_chunk(table.column(name)) for name in table.column_names}


def _leaves_of(schema: pa.Schema, names: Collection[str]) -> list[int]:
    """The indices of the Parquet columns that hold some columns of a schema; a nested one has several."""
    found: list[int] = []
    first = 0
    for field in schema:
        count = _num_leaves(field.type)
        if field.name in names:
            found += range(first, first + count)
        first += count
    return found


def _num_leaves(kind: pa.DataType) -> int:
    children = [kind.field(i).type for i in range(kind.num_fields)]
    return sum(map(_num_leaves, children)) if children else 1


class LineRows:
    """The rows of a file of JSON lines, or of lines of text.

    Args:
        file: as it was before the index was made.
        index: of the file's lines.
        store: shared by the files of a source.
    """

    def __init__(self, file: SameFile, index: LineIndex, layout: RowLayout, store: BlockStore):
        self._file, self._layout, self._store, self._index = file, layout, store, index
        self._parse = text_row if kind_of(file.path) == ".txt" else json_row
        self._names = {*layout.names, *(() if layout.kind == "text" else MEDIA)}
        self.blocks = Blocks(index.rows[1:], np.diff(index.offsets))

    def __len__(self) -> int:
        return int(self._index.rows[-1])

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Row `index`, which is at least 0 and less than the length.

        Raises:
            DataError: the file was changed, cannot be read, or the line cannot.
        """
        block = int(np.searchsorted(self.blocks.ends, index, side="right"))
        lines = self._store.get(self.key(block), lambda: self._read(block))
        what = f"{self._file.path}: row {index}"
        row = with_columns(self._parse(lines[index - int(self._index.rows[block])], what), self._layout, what)
        return {name: value for name, value in row.items() if name in self._names}

    def key(self, block: int) -> Hashable:
        return (self._file.path, block)

    def _read(self, block: int) -> list[bytes]:
        first, end = self._index.offsets[block : block + 2].tolist()
        path = self._file.path
        try:
            with self._file.reading(), path.open("rb") as file:
                file.seek(first)
                text = file.read(end - first)
        except OSError as error:
            raise UnreadableFile(str(path), "is readable", str(error)) from error
        lines = [line for line in text.split(b"\n") if line.strip()]
        if first == 0 and text.startswith(BOM_UTF8):
            lines[0] = without_mark(lines[0])
        if len(lines) != self._index.rows[block + 1] - self._index.rows[block]:
            rule = "has the lines that it had when it was opened"
            raise UnreadableFile(str(path), rule, f"other lines from byte {first} on", "start again")
        return lines


class WholeFile:
    """A text file as one row.

    Args:
        store: shared by the files of a source.
    """

    def __init__(self, path: Path, store: BlockStore):
        self._file, self._store = SameFile(path), store
        self.blocks = Blocks(np.array([1], dtype=np.int64), np.array([path.stat().st_size], dtype=np.int64))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """The row. Raises DataError for a file that cannot be read or is not UTF-8."""
        return dict(self._store.get(self.key(0), self._read))

    def key(self, block: int) -> Hashable:
        return (self._file.path, block)

    def _read(self) -> dict[str, Any]:
        path = self._file.path
        try:
            with self._file.reading():
                return text_row(without_mark(path.read_bytes()), f"{path}: row 0")
        except OSError as error:
            raise UnreadableFile(str(path), "is readable", str(error)) from error


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
            rows.append(rows[-1] + _count(block))
    if rest := b"".join(parts):
        offsets.append(offsets[-1] + len(rest))
        rows.append(rows[-1] + _count(rest))
    return LineIndex(np.array(offsets, dtype=np.int64), np.array(rows, dtype=np.int64))


def _count(block: bytes) -> int:
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    starts = np.concatenate([[0], ends + 1])
    starts = starts[starts < len(data)]
    suspect = starts[_SPACE[data[starts]]]  # a blank line begins with white space, or is its line break alone
    return len(starts) - sum(not block[start : _line_end(block, start)].strip() for start in suspect.tolist())


def _line_end(block: bytes, start: int) -> int:
    end = block.find(b"\n", start)
    return len(block) if end < 0 else end
