"""The global order of documents, cut into global batches.

The order is a pure function of the seed and the place in it (`order`), and with several sources of their weights
(`reading/source.py`). Batch i holds documents i·G to (i+1)·G of it (G: the global batch size), so a batch may span the end of an epoch, and
only the last batch of a run can be short. Nothing depends on world size or prefetching, or on whether a run was
resumed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distill_rl.config.schema import Config, DataConfig
from distill_rl.data.order import FullOrder, Order
from distill_rl.errors import DataError, UnreadableFile
from distill_rl.types import BadRow, Cursor, DocumentBatch, TrainState

_CHARACTERS_PER_TOKEN = 4
"""Of English text, about; published settings assume it."""

ENDLESS = sys.maxsize
"""`Loader.total_steps` of a run whose end is not known yet."""


class DocumentRows(Protocol):
    """What the loader needs from a source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class Loader:
    """Iterates over the remaining global batches of a run; every iteration begins again at `start`.

    The run ends after `train.steps` optimizer steps or after `round(train.epochs · len(source))` documents (at least one),
    whichever comes first, counted from its first attempt on; without either there is no end until `end_at`, which may also
    let it end earlier. `start.cursor` decides which document comes next and `start.step` the index of the next
    batch, so a run that is resumed with another batch size continues at the same place in the data.

    With `data.bad_rows` "skip", rows that cannot be read or are empty are left out. They keep their places, so batches with
    such rows have fewer documents, or none. The batch size counts texts before they are joined (`data.concatenate`).

    Args:
        config: its batch size, seed, length, and how rows are read.
        start: where the run is to continue.
        order: of the documents; None: a permutation of all rows per epoch.

    Raises:
        DataError: no rows; a cursor beyond the rows (the data have changed).
    """

    def __init__(self, source: DocumentRows, config: Config, start: TrainState, order: Order | None = None):
        rows, train = len(source), config.train
        if not rows:
            raise DataError("data.path", "at least one row", "an empty data set")
        if not 0 <= start.cursor.position <= rows:
            raise DataError("checkpoint", "the cursor lies inside the data", f"row {start.cursor.position} of {rows}")
        self._source, self._config, self._start = source, config, start
        self._order = order or FullOrder(config.run.seed, rows)
        self._first = start.cursor.epoch * rows + start.cursor.position
        self._end = None if train.epochs is None else max(round(train.epochs * rows), 1)
        totals = [ENDLESS if train.steps is None else train.steps]
        if self._end is not None:
            totals.append(start.step + -(-max(self._end - self._first, 0) // train.global_batch_size))
        self.total_steps: int = min(totals)
        """The step at which the run ends, counted from the start of its first attempt."""

    def end_at(self, step: int) -> int:
        """Lets the run end at this step, if it would not end before; iterations that have begun end there, too.

        Returns:
            The step at which it ends now.
        """
        self.total_steps = min(self.total_steps, step)
        return self.total_steps

    def __iter__(self) -> Iterator[DocumentBatch]:
        """Yields the remaining batches, the first with the index `start.step`.

        Each carries the cursor behind its last document. Only the last batch of the run can be short, but for rows that
        are skipped. Nothing is yielded if the run has already ended.

        Raises:
            DataError: a row that cannot be read, unless `data.bad_rows` is "skip"; a file that can no longer be read.
        """
        position, index = self._first, self._start.step
        while index < self.total_steps:
            stop = position + self._config.train.global_batch_size
            if self._end is not None:
                stop = min(stop, self._end)
            documents, bad = _read(self._source, map(self._order, range(position, stop)), self._config.data)
            position = stop
            cursor = Cursor(*divmod(stop, len(self._source)))
            yield DocumentBatch(index=index, documents=documents, cursor=cursor, bad_rows=bad)
            index += 1


def validation_batches(source: DocumentRows, config: Config) -> Iterator[DocumentBatch]:
    """Yields the first `data.validation.max_documents` documents in source order, or all if there are fewer, in batches.

    The last batch may be short; indices are counted from 0. Batches are marked with the source "validation". Rows are read
    as by `Loader`.
    """
    end, batch_size = min(len(source), config.data.validation.max_documents), config.train.global_batch_size
    for index, first in enumerate(range(0, end, batch_size)):
        stop = min(first + batch_size, end)
        documents, bad = _read(source, range(first, stop), config.data)
        cursor = Cursor(0, stop)
        yield DocumentBatch(index=index, documents=documents, cursor=cursor, source="validation", bad_rows=bad)


def _read(
    source: DocumentRows, indices: Iterable[int], data: DataConfig
) -> tuple[tuple[Mapping[str, Any], ...], tuple[BadRow, ...]]:
    """The documents at some indices, perhaps joined, and, if they are skipped, the rows that could not be read or are empty."""
    documents, bad, skip, joining = [], [], data.bad_rows == "skip", Joining.of(data)
    for index in indices:
        try:
            document = source[index]
            if skip and (reason := empty(document)):
                raise DataError(reason)
            documents.append(document)
        except DataError as error:
            if not skip or isinstance(error, UnreadableFile):
                raise
            bad.append(BadRow(getattr(source, "row_number", int)(index), str(error)))
    return joining.join(documents) if joining else tuple(documents), tuple(bad)


def empty(document: Mapping[str, Any]) -> str:
    """Why a document has nothing to learn from: it is blank, or a chat without any content. Empty if it has something."""
    if "text" in document:
        return "" if document["text"].strip() else "the text is empty"
    said = (
        message.get("content") or message.get("tool_calls") or message.get("function_call")
        for message in document["messages"]
    )
    return "" if any(bool(part.strip() if isinstance(part, str) else part) for part in said) else "the chat is empty"


@dataclass(frozen=True, slots=True)
class Joining:
    """How texts are joined.

    Args:
        separator: written between two texts.
        characters: at this number of characters, separators not counted, a joined text is complete.
    """

    separator: str
    characters: int

    @classmethod
    def of(cls, data: DataConfig) -> Joining | None:
        """As the settings say; None: texts are not joined."""
        if not data.concatenate:
            return None
        return cls(data.separator, data.characters_per_sample or _CHARACTERS_PER_TOKEN * data.max_length)

    def groups(self, characters: Sequence[int]) -> list[slice]:
        """Which consecutive texts are joined, given the length of each; the last joined text may be shorter than the others."""
        groups, start, joined = [], 0, 0
        for i, count in enumerate(characters):
            joined += count
            if joined >= self.characters or i == len(characters) - 1:
                groups.append(slice(start, i + 1))
                start, joined = i + 1, 0
        return groups

    def join(self, documents: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Joins consecutive texts.

        A joined document has the row number of its first text under `"row"`, and all of them under `"rows"`.
        """
        groups = (documents[group] for group in self.groups([len(document["text"]) for document in documents]))
        return tuple(
            {
                "row": group[0]["row"],
                "rows": tuple(document["row"] for document in group),
                "text": self.separator.join(document["text"] for document in group),
            }
            for group in groups
        )
