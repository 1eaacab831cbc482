"""One source of documents: a read-only sequence over files, Arrow folders or a hub data set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distill_rl.data.order import WINDOW_BYTES, Blocks, FullOrder, Order, WindowedOrder
from distill_rl.data.reading.arrow_rows import HeadRows
from distill_rl.data.reading.block_rows import BlockStore
from distill_rl.data.reading.files import content_hash
from distill_rl.data.reading.layouts import Kind, RowLayout
from distill_rl.data.reading.locate import SourcePart
from distill_rl.errors import DataError

_MAPPED_ROWS = 4096
"""Rows of a block of a memory-mapped part, in data that have other parts, too."""


class _Selection(NamedTuple):
    """The rows of a part of a source."""

    rows: np.ndarray
    """int64, sorted."""
    kept: bool
    """Whether the part has these rows, or all others."""
    description: str
    """Enters the fingerprint."""


class Source:
    """A map-style sequence of documents; cheap to open again in another process.

    `source[i]` is `{"row": row, "text": str}` or `{"row": row, "messages": [{"role": str, "content": str, …}, …]}`, the
    latter with "tools" and "chat_template_kwargs" if the row has them; and the teachers' weights, if they are chosen by
    row (`RowLayout.document`). Rows are counted from 0 over
    all files in order, and a part made by `divide` keeps these numbers.

    Args:
        parts: the files and folders, each with the columns that are read.
        layout: how their rows become documents.
        paths: the files whose content enters the fingerprint.
        store: the blocks of the parts that are in memory.
        large: whether the files are read block by block because of their size.
        reading: what else decides which rows there are; enters the fingerprint.
    """

    def __init__(
        self,
        parts: Sequence[SourcePart],
        *,
        layout: RowLayout,
        paths: Sequence[Path],
        store: BlockStore,
        large: bool,
        reading: str = "",
    ):
        self.parts, self.layout, self._paths = tuple(parts), layout, tuple(paths)
        self._store, self._large, self._reading = store, large, reading
        self.window_bytes = WINDOW_BYTES
        """Most memory of the blocks of a window; one of several sources has a share of it."""
        self._ends = np.cumsum([len(part.rows) for part in self.parts], dtype=np.int64)
        self._selection: _Selection | None = None
        self._kept_documents: dict[int, Mapping[str, Any]] | None = None

    @property
    def kind(self) -> Kind:
        """text | messages; also the documents' key."""
        return self.layout.kind

    @property
    def exact(self) -> bool:
        """Whether the number of rows is known; if not, only the first rows of some files are here."""
        return not any(isinstance(part.rows, HeadRows) for part in self.parts)

    @property
    def rows_in_all(self) -> int:
        """The rows of all files, whether or not this part has them."""
        return int(self._ends[-1])

    def __len__(self) -> int:
        if self._selection is None:
            return self.rows_in_all
        count = len(self._selection.rows)
        return count if self._selection.kept else self.rows_in_all - count

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Document `index` of this source, read and checked now; see the class for its form.

        Its "row" is the number in the whole data, which differs from `index` in a part made by `divide`.

        Raises:
            IndexError: an index below 0 or past the end.
            DataError: a value that is not text or messages, or not UTF-8; names file and row.
        """
        row = self.row_number(index)
        if self._kept_documents is None:
            return self._document(row)
        if row not in self._kept_documents:
            self._kept_documents[row] = self._document(row)
        return self._kept_documents[row]

    def row_number(self, index: int) -> int:
        """The "row" of document `index`. Raises IndexError for an index below 0 or past the end."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if self._selection is None:
            return int(index)
        if self._selection.kept:
            return int(self._selection.rows[index])
        left_before = self._selection.rows - np.arange(len(self._selection.rows))  # rows kept before each that is not
        return int(index + np.searchsorted(left_before, index, side="right"))

    def columns(self, index: int) -> Mapping[str, Any]:
        """The columns of document `index`, as they are read and not checked.

        Raises:
            IndexError: an index below 0 or past the end.
            DataError: a row that cannot be read.
        """
        return self._values(self.row_number(index))[0]

    def _document(self, row: int) -> Mapping[str, Any]:
        values, at = self._values(row)
        try:
            return {"row": row, **self.layout.document(values, at)}
        except RecursionError as error:
            raise DataError(at(self.layout.key), "is nested less deeply", "too many levels") from error

    def _values(self, row: int) -> tuple[Mapping[str, Any], Callable[[str], str]]:
        """The columns of a row, and the words for the row and one of its columns in messages."""
        part_index = int(np.searchsorted(self._ends, row, side="right"))
        part = self.parts[part_index]
        row_in_part = row - (int(self._ends[part_index - 1]) if part_index else 0)

        def at(column: str) -> str:
            """Words for this row and a column of it."""
            return f"{part.name}, column {column!r}, row {row_in_part}"

        try:
            return part.rows[row_in_part], at
        except UnicodeDecodeError as error:
            found = f"byte 0x{error.object[error.start]:02x} at {error.start}"
            raise DataError(at(self.layout.key), "text is UTF-8", found) from error

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the files' content (`content_hash`), format, column and selection of rows; not over paths."""
        content, layout = content_hash(self._paths), self.layout
        selection = f"\0{self._selection.description}" if self._selection else ""
        selection += f"\0{self._reading}" if self._reading else ""
        return hashlib.sha256(f"{content}\0{layout.format}\0{layout.key}\0{selection}".encode()).hexdigest()

    def divide(self, rows: np.ndarray, *, described: tuple[str, str]) -> tuple[Source, Source]:
        """Two parts: one without some rows, and one of these; the files are shared, not copied.

        Documents of the second part are kept in memory once they are read: they may lie far apart, and are read again and
        again.

        Args:
            rows: int64, sorted, of a source that is not a part itself.
            described: enters the fingerprints of the parts, so it must determine `rows`.
        """
        parts = []
        for kept, description in zip((False, True), described):
            part = Source(
                self.parts,
                layout=self.layout,
                paths=self._paths,
                store=self._store,
                large=self._large,
                reading=self._reading,
            )
            part.window_bytes = self.window_bytes
            part._selection = _Selection(rows, kept, description)
            part._kept_documents = {} if kept else None
            parts.append(part)
        return parts[0], parts[1]

    @cached_property
    def _blocks(self) -> Blocks | None:
        if not any(hasattr(part.rows, "blocks") for part in self.parts):
            return None
        return Blocks.joined([_blocks_of(part) for part in self.parts])

    @property
    def windowed(self) -> bool:
        """Whether the data are too large for a permutation of all rows."""
        return self._large and self._blocks is not None and self._blocks.bytes > self.window_bytes

    def order(self, seed: int, *, windowed: bool = True, member: tuple[int, ...] = ()) -> Order:
        """The global order of the documents, as indices into this source.

        Args:
            windowed: False: a permutation of all rows, even of data that are too large to have all blocks in memory.
            member: tells the orders of several sources apart.
        """
        blocks = self._blocks
        if blocks is None or not (windowed and self.windowed):
            if blocks is not None and not self.windowed:
                self._enter(np.arange(len(blocks.ends)))
            return FullOrder(seed, len(self), member)
        if self._selection is not None:
            blocks = blocks.without(self._selection.rows)
        return WindowedOrder(seed, blocks, member, window_bytes=self.window_bytes, entered=self._enter)

    def _enter(self, blocks: np.ndarray) -> None:
        """Keeps these blocks in memory once they are read, and drops the others."""
        part_ends = np.cumsum([len(_blocks_of(part).ends) for part in self.parts])
        keys = set()
        for block in blocks.tolist():
            i = int(np.searchsorted(part_ends, block, side="right"))
            rows = self.parts[i].rows
            if hasattr(rows, "key"):
                keys.add(rows.key(block - (int(part_ends[i - 1]) if i else 0)))
        self._store.keep(keys)


def _blocks_of(part: SourcePart) -> Blocks:
    """The blocks of a part; those of a memory-mapped one, which are never held in memory, take none."""
    if hasattr(part.rows, "blocks"):
        return part.rows.blocks  # type: ignore[no-any-return]
    count = len(part.rows)
    ends = np.append(np.arange(_MAPPED_ROWS, count, _MAPPED_ROWS), count).astype(np.int64)
    return Blocks(ends, np.zeros(len(ends), dtype=np.int64))
