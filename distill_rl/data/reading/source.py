"""The documents of a run by index: of one source, or of several in one order in which every source has its exact share at any place."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distill_rl.data.order import WINDOW_BYTES, Blocks, FullOrder, Order, WindowedOrder, place_in
from distill_rl.data.reading.files import BlockRows, BlockStore, HeadRows, SourcePart, content_hash
from distill_rl.data.reading.layouts import KINDS, Kind, RowLayout
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


@dataclass(eq=False)
class Source:
    """A map-style sequence of documents; cheap to open again in another process.

    `source[i]` is `{"row": row, "text": str}` or `{"row": row, "messages": [{"role": str, "content": str, …}, …]}`, the
    latter with "tools" and "chat_template_kwargs" if the row has them; and the teachers' weights, if they are chosen by
    row (`RowLayout.document`). Rows are counted from 0 over
    all files in order, and a part made by `divide` keeps these numbers.
    """

    parts: Sequence[SourcePart]
    """The files and folders, each with the columns that are read."""
    layout: RowLayout
    """How their rows become documents."""
    paths: Sequence[Path]
    """The files whose content enters the fingerprint."""
    store: BlockStore
    """The blocks of the parts that are in memory."""
    large: bool
    """Whether the files are read block by block because of their size."""
    reading: str = ""
    """What else decides which rows there are; enters the fingerprint."""
    window_bytes: int = field(default_factory=lambda: WINDOW_BYTES)
    """Most memory of the blocks of a window; one of several sources has a share of it."""
    _selection: _Selection | None = field(default=None, init=False)
    _kept_documents: dict[int, Mapping[str, Any]] | None = field(default=None, init=False)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(part.rows) for part in self.parts], dtype=np.int64)

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
        row, kept = self.row_number(index), self._kept_documents
        if kept is not None and row in kept:
            return kept[row]
        part, row_in_part = self._part_of(row)
        document = {"row": row, **part.document(row_in_part)}
        if kept is not None:
            kept[row] = document
        return document

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
        part, row = self._part_of(self.row_number(index))
        return part.values(row)

    def _part_of(self, row: int) -> tuple[SourcePart, int]:
        i, row_in_part = place_in(self._ends, row)
        return self.parts[i], row_in_part

    @cached_property
    def _content(self) -> str:
        return content_hash(self.paths)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the files' content (`content_hash`), format, column and selection of rows; not over paths."""
        about = [self._content, self.layout.format, self.layout.key]
        about.append(f"\0{self._selection.description}" if self._selection else "")
        about[-1] += f"\0{self.reading}" if self.reading else ""
        return hashlib.sha256("\0".join(about).encode()).hexdigest()

    def divide(self, rows: np.ndarray, description: str) -> tuple[Source, Source]:
        """Two parts: one without some rows, and one of these; the files are shared, not copied.

        Documents of the second part are kept in memory once they are read: they may lie far apart, and are read again and
        again.

        Args:
            rows: int64, sorted, of a source that is not a part itself.
            description: enters the fingerprints of the parts, so it must determine `rows`.
        """
        training, validation = copy(self), copy(self)
        training._selection = _Selection(rows, False, f"training: {description}")
        validation._selection = _Selection(rows, True, f"validation: {description}")
        validation._kept_documents = {}
        return training, validation

    @cached_property
    def _blocks(self) -> Blocks | None:
        if not any(isinstance(part.rows, BlockRows) for part in self.parts):
            return None
        return Blocks.joined([_blocks_of(part) for part in self.parts])

    @property
    def windowed(self) -> bool:
        """Whether the data are too large for a permutation of all rows."""
        return self.large and self._blocks is not None and self._blocks.bytes > self.window_bytes

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
            i, block_in_part = place_in(part_ends, block)
            rows = self.parts[i].rows
            if isinstance(rows, BlockRows):
                keys.add(rows.key(block_in_part))
        self.store.keep(keys)


def _blocks_of(part: SourcePart) -> Blocks:
    """The blocks of a part; those of a memory-mapped one, which are never held in memory, take none."""
    if isinstance(part.rows, BlockRows):
        return part.rows.blocks
    count = len(part.rows)
    ends = np.append(np.arange(_MAPPED_ROWS, count, _MAPPED_ROWS), count).astype(np.int64)
    return Blocks(ends, np.zeros(len(ends), dtype=np.int64))


# Several sources with weights, in one global order in which every source has its exact share at any place.

_STRETCH = 1 << 16
"""Places of a schedule that are worked out together."""


class MixtureSchedule:
    """Which source every document comes from, a pure function of its place and the weights.

    After any number n of documents, a source with the share w of all weights has had ⌊w·n⌋ or ⌈w·n⌉ of them. To
    that end its k-th document (from 0) must come at a place p with ⌊k/w⌋ ≤ p < ⌈(k + 1)/w⌉, and of the documents that may come
    next, the one whose time ends first is taken. That always succeeds: these are the windows of a proportionate-fair
    schedule, and earliest deadline first is optimal for unit jobs on one machine (Baruah et al., "Proportionate
    progress", Algorithmica 15, 1996).

    Weights are taken as the decimal numbers that they are written as, and the arithmetic is in whole numbers. The
    schedule repeats with their period (10 places for 0.7 and 0.3), so a place is looked up in a table of at most one
    period, which is worked out as far as it is needed.

    Args:
        weights: each above 0.
    """

    def __init__(self, weights: Sequence[float]):
        shares = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(share.denominator for share in shares))
        counts = [int(share * scale) for share in shares]
        common = int(np.gcd.reduce(np.array(counts, dtype=object)))
        self.counts = [count // common for count in counts]
        """Documents of every source in a period."""
        self._period = sum(self.counts)
        self._starts = [[0] * len(counts)]
        self._stretch = lru_cache(maxsize=4)(self._work_out)

    def __call__(self, i: int) -> tuple[int, int]:
        """The source of document i, and how many documents of that source come before it."""
        period, place = divmod(i, self._period)
        stretch, place = divmod(place, _STRETCH)
        while len(self._starts) <= stretch:
            self._stretch(len(self._starts) - 1)
        sources, ranks = self._stretch(stretch)
        source = sources[place]
        return source, period * self.counts[source] + ranks[place]

    def _work_out(self, stretch: int) -> tuple[list[int], list[int]]:
        """The sources of a stretch, and how many documents of the source come before each within the period."""
        done = list(self._starts[stretch])
        first = stretch * _STRETCH
        sources, ranks = [], []
        waiting: list[tuple[int, int]] = []
        ready: list[tuple[int, int]] = []
        for source, count in enumerate(self.counts):
            heapq.heappush(waiting, (done[source] * self._period // count, source))
        for place in range(first, min(first + _STRETCH, self._period)):
            while waiting and waiting[0][0] <= place:
                source = heapq.heappop(waiting)[1]
                heapq.heappush(ready, (-(-(done[source] + 1) * self._period // self.counts[source]), source))
            source = heapq.heappop(ready)[1]
            sources.append(source)
            ranks.append(done[source])
            done[source] += 1
            heapq.heappush(waiting, (done[source] * self._period // self.counts[source], source))
        if len(self._starts) == stretch + 1:
            self._starts.append(done)
        return sources, ranks


@dataclass(frozen=True, slots=True)
class MixedSource:
    """One of the sources of a mixture."""

    source: Source
    weight: float
    """Above 0; only the proportions of a mixture's weights count."""
    name: str
    """For metrics."""


class _Joined:
    """The documents of several sources. `_place` says which source has a document of this one, and at which index."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = tuple(sources)
        self._row_ends = np.cumsum([source.rows_in_all for source in sources], dtype=np.int64)

    @property
    def kind(self) -> Kind:
        return self.sources[0].kind

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Document `index`; its "row" counts over the rows of all sources.

        Raises:
            IndexError, DataError: as for a source.
        """
        i, within = self._place(index)
        document = self.sources[i][within]
        return {**document, "row": document["row"] + self.first_row(i)}

    def row_number(self, index: int) -> int:
        """The "row" of document `index`."""
        i, within = self._place(index)
        return self.sources[i].row_number(within) + self.first_row(i)

    def first_row(self, i: int) -> int:
        """The number of the first row of source `i`."""
        return int(self._row_ends[i - 1]) if i else 0

    def _place(self, index: int) -> tuple[int, int]:
        raise NotImplementedError


class Mixture(_Joined):
    """The documents of several sources, one source after another; `order` mixes them by weight.

    An epoch has as many documents as all sources have rows. A source whose documents are used up begins again in a new
    order, so within an epoch some sources may be read several times and others in part.

    Args:
        members: of one kind.

    Raises:
        DataError: a weight that is not above 0; chats beside texts.
    """

    def __init__(self, members: Sequence[MixedSource]):
        super().__init__([member.source for member in members])
        sources = self.sources
        for i, member in enumerate(members):
            source = member.source
            if member.weight <= 0:
                raise DataError(f"data.sources.{i}.weight", "must be greater than 0", member.weight)
            if source.kind != sources[0].kind:
                rule = f"all sources have the same form, {KINDS[sources[0].kind]} like the first"
                remedy = "convert one of them, or train on them one after the other"
                raise DataError(f"data.sources.{i}.path", rule, KINDS[source.kind], remedy)
        self.members = tuple(members)
        self._weights = [member.weight for member in members]
        for source in sources:
            source.window_bytes = WINDOW_BYTES // len(sources)
        self._ends = np.cumsum([len(source) for source in sources], dtype=np.int64)

    @property
    def exact(self) -> bool:
        """Whether the number of rows of every source is known."""
        return all(source.exact for source in self.sources)

    @property
    def windowed(self) -> bool:
        """Whether some source is too large for a permutation of its rows."""
        return any(source.windowed for source in self.sources)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def count(self, rows: Sequence[int]) -> dict[str, int]:
        """Number of documents per source, by its name, given their "row"s."""
        found = np.bincount(np.searchsorted(self._row_ends, rows, side="right"), minlength=len(self.sources))
        return {member.name: int(found[i]) for i, member in enumerate(self.members)}

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the sources' fingerprints and the proportions of their weights."""
        counts = MixtureSchedule(self._weights).counts
        parts = [f"{source.fingerprint} {counts[i]}" for i, source in enumerate(self.sources)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def order(self, seed: int, *, windowed: bool = True) -> Order:
        """The global order: `MixtureSchedule` chooses the source, the order of the source chooses its row.

        Args:
            windowed: False: every source has a permutation of all of its rows, however large it is.
        """
        schedule = MixtureSchedule(self._weights)
        orders = [source.order(seed, windowed=windowed, member=(i,)) for i, source in enumerate(self.sources)]
        firsts = [0, *self._ends.tolist()]

        def index(i: int) -> int:
            source, rank = schedule(i)
            return int(firsts[source]) + orders[source](rank)

        return index

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return place_in(self._ends, index)


class Interleaved(_Joined):
    """What the sources of a mixture hold out, in an order in which each has its share by weight from the start.

    Args:
        held_out: one part of every source.
        limit: most documents of each that are needed.
    """

    def __init__(self, held_out: Sequence[MixedSource], limit: int):
        super().__init__([part.source for part in held_out])
        places = [
            ((rank + 0.5) / part.weight, i, rank)
            for i, part in enumerate(held_out)
            for rank in range(min(len(part.source), limit))
        ]
        self._places = [place[1:] for place in sorted(places)]

    def __len__(self) -> int:
        return len(self._places)

    def _place(self, index: int) -> tuple[int, int]:
        return self._places[index]
