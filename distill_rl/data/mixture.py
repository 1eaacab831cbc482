"""Several sources with weights, in one global order in which every source has its exact share at any place."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any

import numpy as np

from distill_rl.data.order import WINDOW_BYTES, Order
from distill_rl.data.reading.layouts import Kind
from distill_rl.data.reading.source import Source
from distill_rl.errors import DataError

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


class Mixture:
    """The documents of several sources, one source after another; `order` mixes them by weight.

    An epoch has as many documents as all sources have rows. A source whose documents are used up begins again in a new
    order, so within an epoch some sources may be read several times and others in part.

    Args:
        members: of one kind.

    Raises:
        DataError: a weight that is not above 0; chats beside texts.
    """

    def __init__(self, members: Sequence[MixedSource]):
        sources = [member.source for member in members]
        for i, member in enumerate(members):
            source = member.source
            if member.weight <= 0:
                raise DataError(f"data.sources.{i}.weight", "must be greater than 0", member.weight)
            if source.kind != sources[0].kind:
                kinds = {"text": "rows of text", "messages": "chats"}
                rule = f"all sources have the same form, {kinds[sources[0].kind]} like the first"
                remedy = "convert one of them, or train on them one after the other"
                raise DataError(f"data.sources.{i}.path", rule, kinds[source.kind], remedy)
        self.members, self.sources = tuple(members), tuple(sources)
        self._weights = [member.weight for member in members]
        for source in sources:
            source.window_bytes = WINDOW_BYTES // len(sources)
        self._ends = np.cumsum([len(source) for source in sources], dtype=np.int64)
        self._row_ends = np.cumsum([source.rows_in_all for source in sources], dtype=np.int64)

    @property
    def kind(self) -> Kind:
        return self.sources[0].kind

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

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Document `index` of all sources in turn; its "row" counts over the rows of all of them.

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

    def count(self, rows: Sequence[int]) -> dict[str, int]:
        """Number of documents per source, by its name, given their "row"s."""
        found = np.bincount(np.searchsorted(self._row_ends, rows, side="right"), minlength=len(self.sources))
        return {member.name: count for member, count in zip(self.members, found.tolist())}

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the sources' fingerprints and the proportions of their weights."""
        counts = MixtureSchedule(self._weights).counts
        parts = [f"{source.fingerprint} {count}" for source, count in zip(self.sources, counts)]
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
        i = int(np.searchsorted(self._ends, index, side="right"))
        return i, int(index) - (int(self._ends[i - 1]) if i else 0)

    def first_row(self, i: int) -> int:
        """The number of the first row of source `i`."""
        return int(self._row_ends[i - 1]) if i else 0


class Interleaved:
    """What the sources of a mixture hold out, in an order in which each has its share by weight from the start.

    Args:
        mixture: what is left of the sources, for the numbers of rows.
        held_out: one part of every source.
        limit: most documents of each that are needed.
    """

    def __init__(self, mixture: Mixture, held_out: Sequence[MixedSource], limit: int):
        self._mixture, self._held_out = mixture, [part.source for part in held_out]
        places = [
            ((rank + 0.5) / part.weight, i, rank)
            for i, part in enumerate(held_out)
            for rank in range(min(len(part.source), limit))
        ]
        self._places = [place[1:] for place in sorted(places)]

    @property
    def kind(self) -> Kind:
        return self._mixture.kind

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Document `index`; its "row" is that of the mixture. Raises DataError as a source does."""
        i, rank = self._places[index]
        document = self._held_out[i][rank]
        return {**document, "row": document["row"] + self._mixture.first_row(i)}

    def row_number(self, index: int) -> int:
        """The "row" of document `index`."""
        i, rank = self._places[index]
        return self._held_out[i].row_number(rank) + self._mixture.first_row(i)
