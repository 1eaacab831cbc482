"""The global order of documents, cut into global batches.

The order is the concatenation of one permutation per epoch; each is a pure function of seed, epoch and number of rows.
Batch i holds documents i·G to (i+1)·G of it (G: the global batch size), so a batch may span the end of an epoch, and
only the last batch of a run can be short. Nothing depends on world size or prefetching, or on whether a run was
resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from distill_rl.errors import ConfigError, DataError
from distill_rl.types import Cursor, DocumentBatch, TrainState

_ORDER_STREAM = 0


class Rows(Protocol):
    """What the loader needs from a source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


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


def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of `n` rows in `epoch`, int64 [n]; the same on every machine."""
    return random_order(seed, (_ORDER_STREAM, epoch), n)


class Loader:
    """Iterates over the remaining global batches of a run; every iteration begins again at `start`.

    The run ends after `steps` optimizer steps or after `round(epochs · len(source))` documents (at least one),
    whichever comes first. `start.cursor` decides which document comes next and `start.step` the index of the next
    batch, so a run that is resumed with another batch size continues at the same place in the data.

    Args:
        batch_size: documents per global batch.
        seed: of the order of the documents.
        steps, epochs: length of the whole run, from its first attempt on; None: not limited by it.
        start: where the run is to continue.

    Raises:
        ConfigError: neither `steps` nor `epochs`.
        DataError: no rows; a cursor beyond the rows (the data have changed).
    """

    def __init__(
        self,
        source: Rows,
        *,
        batch_size: int,
        seed: int,
        steps: int | None,
        epochs: float | None,
        start: TrainState,
    ):
        rows = len(source)
        if steps is None and epochs is None:
            raise ConfigError("train.steps, train.epochs", "at least one is set", "neither")
        if not rows:
            raise DataError("data.path", "at least one row", "an empty data set")
        if not 0 <= start.cursor.position <= rows:
            raise DataError("checkpoint", "the cursor lies inside the data", f"row {start.cursor.position} of {rows}")
        self._source, self._batch_size, self._start = source, batch_size, start
        self._order = lru_cache(maxsize=2)(lambda epoch: permutation(seed, epoch, rows))
        self._first = start.cursor.epoch * rows + start.cursor.position
        self._end = None if epochs is None else max(round(epochs * rows), 1)
        totals = [] if steps is None else [steps]
        if self._end is not None:
            totals.append(start.step + -(-max(self._end - self._first, 0) // batch_size))
        self.total_steps: int = min(totals)
        """The step at which the run ends, counted from the start of its first attempt."""

    def __iter__(self) -> Iterator[DocumentBatch]:
        """Yields the remaining batches, the first with the index `start.step`.

        Each carries the cursor behind its last document. Only the last batch of the run can be short. Nothing is
        yielded if the run has already ended.
        """
        position = self._first
        for index in range(self._start.step, self.total_steps):
            stop = position + self._batch_size
            if self._end is not None:
                stop = min(stop, self._end)
            documents = tuple(self._document(i) for i in range(position, stop))
            position = stop
            yield DocumentBatch(index=index, documents=documents, cursor=Cursor(*divmod(stop, len(self._source))))

    def _document(self, i: int) -> Mapping[str, Any]:
        """Document i of the global order, counted from the first document of epoch 0."""
        epoch, position = divmod(i, len(self._source))
        return self._source[int(self._order(epoch)[position])]


def validation_batches(source: Rows, batch_size: int, max_documents: int) -> Iterator[DocumentBatch]:
    """Yields the first `max_documents` documents in source order, or all if there are fewer, in batches from index 0.

    The last batch may be short. Batches are marked with the source "validation".
    """
    end = min(len(source), max_documents)
    for index, first in enumerate(range(0, end, batch_size)):
        stop = min(first + batch_size, end)
        documents = tuple(source[row] for row in range(first, stop))
        yield DocumentBatch(index=index, documents=documents, cursor=Cursor(0, stop), source="validation")
