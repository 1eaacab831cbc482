"""The global order of a source's documents: a pure function of seed and epoch, the same on every machine.

Data that fit in memory, or are memory-mapped, have one permutation of all rows per epoch (`FullOrder`). A corpus is read
in blocks (row groups of Parquet, stretches of lines), of which only a few fit in memory: `WindowedOrder` shuffles the
blocks of an epoch, cuts them into windows of bounded size, and shuffles the rows inside every window. Checkpoints hold
a position in the order, so nothing in this file may change what an order gives; a new one needs a new name
(`run.job`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

WINDOW_BYTES = 128 << 20
"""Blocks of a window have at most this size together, or there are two of them."""
_ORDER_STREAM, _BLOCK_STREAM, _WINDOW_STREAM = 0, 2, 3  # 1: rows held out for validation (`sources`)


Order = Callable[[int], int]
"""Document of the global order, counted from the first of epoch 0 → its index in the source."""


def random_order(seed: int, stream: tuple[int, ...], n: int) -> np.ndarray:
    """A permutation of 0…n-1 as int64 [n], determined by `seed` and `stream` on every machine.

    Different streams are independent. Sorts the raw 64-bit output of Philox: numpy guarantees that output across
    versions, but not the output of `Generator.permutation`.

    Args:
        seed: any integer; taken modulo 2⁶⁴.
        stream: what the order is for, such as (purpose, epoch).
    """
    bits = np.random.Philox(np.random.SeedSequence(seed % 2**64, spawn_key=stream)).random_raw(n)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


def place_in(ends: np.ndarray, index: int) -> tuple[int, int]:
    """Which of consecutive stretches, given by their ends, has an index, and how many places of the stretch come before it."""
    i = int(np.searchsorted(ends, index, side="right"))
    return i, int(index) - (int(ends[i - 1]) if i else 0)


class FullOrder:
    """One permutation of all rows per epoch.

    Args:
        rows: number of rows, at least 1.
        member: tells the orders of several sources of a run apart; empty for a single source.
    """

    def __init__(self, seed: int, rows: int, member: tuple[int, ...] = ()):
        self._rows = rows
        self._of = lru_cache(maxsize=2)(lambda epoch: random_order(seed, (_ORDER_STREAM, epoch, *member), rows))

    def __call__(self, i: int, /) -> int:
        epoch, position = divmod(i, self._rows)
        return int(self._of(epoch)[position])


@dataclass(frozen=True, slots=True)
class Blocks:
    """Stretches of consecutive rows, each of which is read as a whole."""

    ends: np.ndarray
    """int64 [B], the row behind each block; rows are counted from 0 over all blocks."""
    sizes: np.ndarray
    """int64 [B], bytes that a block takes in memory."""

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())

    def without(self, rows: np.ndarray) -> Blocks:
        """The blocks of what is left without some rows (int64, sorted), which are then counted anew."""
        return Blocks(self.ends - np.searchsorted(rows, self.ends), self.sizes)

    @classmethod
    def joined(cls, parts: list[Blocks]) -> Blocks:
        """The blocks of several parts, one after another."""
        rows = np.concatenate([np.diff(part.ends, prepend=0) for part in parts])
        return cls(np.cumsum(rows, dtype=np.int64), np.concatenate([part.sizes for part in parts]))


class WindowedOrder:
    """Shuffled blocks, in windows of `WINDOW_BYTES` inside of which the rows are shuffled; every row once per epoch.

    Args:
        blocks: at least one row in all.
        member: tells the orders of several sources of a run apart; empty for a single source.
        window_bytes: most bytes of a window's blocks, if these are more than two.
        entered: called with the indices of a window's blocks before the first index in it is returned.
    """

    def __init__(
        self,
        seed: int,
        blocks: Blocks,
        member: tuple[int, ...] = (),
        *,
        window_bytes: int = WINDOW_BYTES,
        entered: Callable[[np.ndarray], None] = lambda _: None,
    ):
        self._seed, self._blocks, self._member, self._entered = seed, blocks, member, entered
        self._window_bytes = window_bytes
        self._rows = int(blocks.ends[-1])
        self._counts = np.diff(blocks.ends, prepend=0)
        self._epoch = lru_cache(maxsize=2)(self._cut)
        self._window = lru_cache(maxsize=1)(self._shuffle)

    def __call__(self, i: int, /) -> int:
        epoch, position = divmod(i, self._rows)
        starts = self._epoch(epoch)[2]
        window = int(np.searchsorted(starts, position, side="right")) - 1
        return int(self._window(epoch, window)[position - starts[window]])

    def _cut(self, epoch: int) -> tuple[np.ndarray, list[int], np.ndarray]:
        order = random_order(self._seed, (_BLOCK_STREAM, epoch, *self._member), len(self._counts))
        filled = np.cumsum(self._blocks.sizes[order])
        cuts = [0]
        while cuts[-1] < len(order):
            before = int(filled[cuts[-1] - 1]) if cuts[-1] else 0
            full = int(np.searchsorted(filled, before + self._window_bytes, side="right"))
            cuts.append(min(max(full, cuts[-1] + 2), len(order)))
        rows = np.concatenate([[0], np.cumsum(self._counts[order])])
        return order, cuts, rows[cuts[:-1]].astype(np.int64)

    def _shuffle(self, epoch: int, window: int) -> np.ndarray:
        """The rows of a window in their order, as indices in the source, int64."""
        order, cuts, _ = self._epoch(epoch)
        blocks = order[cuts[window] : cuts[window + 1]]
        self._entered(blocks)
        ends = self._blocks.ends
        rows = np.concatenate([np.arange(ends[i] - self._counts[i], ends[i]) for i in blocks])
        return rows[random_order(self._seed, (_WINDOW_STREAM, epoch, window, *self._member), len(rows))]
