"""The aligner actors as one: batches go round, results keep their order, and no row ends a run by itself.

`submit` returns at once with references; `settle` waits for a batch and sees to it that there is one: an aligner that
raises, dies or overruns its deadline is asked once more (after a replacement where it did not merely raise), and if that
fails too, the rows of the batch are tried one by one. A row that fails alone is left out, within `aligner.max_bad_rows`.

Consumes: batches. Waits for: the aligners, in `settle`. Unblocked by: their answers or deadlines. Produces: references.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from distill_rl.errors import AlignmentError, DistillError, WorkerError
from distill_rl.types import BadRow, BatchInfo, DocumentBatch
from distill_rl.workers.calls import Calls
from distill_rl.workers.group import WorkerGroup

log = logging.getLogger(__name__)


@dataclass
class Pending:
    """A batch at an aligner: references only."""

    batch: DocumentBatch
    place: int
    """which aligner"""
    info: ray.ObjectRef
    parts: list[ray.ObjectRef]


class BadRows:
    """Rows left out of the run: listed in a file, and never more than the budget."""

    def __init__(self, path: Path, budget: int):
        self._path, self._budget = path, budget
        self.rows: set[int] = set()
        if path.exists():
            self.rows = {json.loads(line)["row"] for line in path.read_text("utf-8").splitlines()}

    def add(self, found: BadRow) -> None:
        """
        Raises:
            AlignmentError: one more than `aligner.max_bad_rows`.
        """
        if found.row in self.rows:
            return
        self.rows.add(found.row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": found.row, "reason": found.reason[:500]}) + "\n")
        log.warning("row %d is left out: %s", found.row, found.reason)
        if len(self.rows) > self._budget:
            rule = f"no more than aligner.max_bad_rows={self._budget} may be left out"
            remedy = f"mend or remove the rows listed in {self._path}, or raise aligner.max_bad_rows"
            raise AlignmentError(
                "data rows that cannot be aligned", rule, f"{len(self.rows)}, the last: {found.reason}", remedy
            )


class AlignerPool:
    """
    Args:
        group: the actors; empty: `local` works in this process.
        local: an object with the methods of `AlignerWorker`, for an empty group.
        num_parts: what `build` returns besides its BatchInfo.
        deadline_s: for one batch, and for one row of a batch that failed twice.
    """

    def __init__(
        self,
        group: WorkerGroup,
        calls: Calls,
        *,
        local: Any = None,
        num_parts: int,
        deadline_s: float,
        start_timeout_s: float,
        bad_rows: BadRows,
    ):
        self._group, self._calls, self._local, self._num_parts = group, calls, local, num_parts
        self._deadline_s, self._start_timeout_s, self._bad_rows = deadline_s, start_timeout_s, bad_rows

    @property
    def names(self) -> list[str]:
        return self._group.names or ["driver"]

    def submit(self, batch: DocumentBatch) -> Pending:
        """Hands a batch to the next aligner; waits only where there is none but this process."""
        place = batch.index % len(self.names)
        info, *parts = self._build(place, batch)
        return Pending(batch, place, info, parts)

    def settle(self, pending: Pending) -> tuple[BatchInfo, bool]:
        """What came of a batch, and whether its references were replaced on the way.

        Raises:
            DistillError: what the user has to mend in the data; more bad rows than the budget.
        """
        what = f"aligning batch {pending.batch.index + 1}"
        first = pending.info
        info = self._attempt(pending, what) or self._again(pending, what)
        if info is None:
            self._find_bad_rows(pending, what)
            pending.info, *pending.parts = self._build(pending.place, pending.batch)
            info = self._wait(pending, what)
        for row in info.bad_rows:
            self._bad_rows.add(row)
        return info, pending.info is not first

    def _build(self, place: int, batch: DocumentBatch) -> list[ray.ObjectRef]:
        skip = tuple(self._bad_rows.rows & {int(document["row"]) for document in batch.documents})
        if not self._group.actors:
            return [ray.put(part) for part in self._local.build(batch, skip)]
        actor = self._group.actors[place]
        return actor.build.options(num_returns=1 + self._num_parts).remote(batch, skip)

    def _again(self, pending: Pending, what: str) -> BatchInfo | None:
        log.warning("%s is tried once more", what)
        pending.info, *pending.parts = self._build(pending.place, pending.batch)
        return self._attempt(pending, what)

    def _attempt(self, pending: Pending, what: str) -> BatchInfo | None:
        """None after a failure that another try may mend; the aligner is able to work again then."""
        try:
            return self._wait(pending, what)
        except DistillError as error:
            self._recover(pending.place, error)
            return None

    def _wait(self, pending: Pending, what: str) -> BatchInfo:
        return self._calls.gather({pending.info: self.names[pending.place]}, what=what, timeout_s=self._deadline_s)[0]

    def _recover(self, place: int, error: DistillError) -> None:
        """Raises what no second try can mend; puts a new actor in the place of one that died or does not answer."""
        if error.exit_code == 2:
            raise error
        log.warning("%s: %s; got %s", error.what, error.rule, error.value)
        if not self._group.actors:
            return
        name = self._group.names[place]
        with suppress(WorkerError):
            self._calls.gather(self._group.submit("identify", ranks=[place]), what=f"asking {name}", timeout_s=1.0)
            return
        log.warning("%s is replaced", name)
        self._group.replace(place, timeout_s=self._start_timeout_s)

    def _find_bad_rows(self, pending: Pending, what: str) -> None:
        log.warning("%s failed twice; its rows are tried one by one", what)
        for document in pending.batch.documents:
            row = int(document["row"])
            if row in self._bad_rows.rows:
                continue
            try:
                self._try_row(pending.place, document, f"aligning row {row}")
            except DistillError as error:
                self._recover(pending.place, error)
                self._bad_rows.add(BadRow(row, str(error)))

    def _try_row(self, place: int, document: Any, what: str) -> None:
        if not self._group.actors:
            self._local.try_row(document)
            return
        calls = self._group.submit("try_row", document, ranks=[place])
        self._calls.gather(calls, what=what, timeout_s=self._deadline_s)
