"""The aligner actors as one: batches go round, results keep their order, and no row ends a run by itself.

`submit` returns at once with references; `settle` waits for a batch and sees to it that there is one: an aligner that
raises, dies or overruns its deadline is asked once more (after a replacement where it did not merely raise), and if that
fails too, the rows of the batch are tried one by one. A row that fails alone is left out, within `aligner.max_bad_rows`.
Without actors the same is done in this process, but for deaths and deadlines, from which nothing could recover.

Consumes: batches. Waits for: the aligners, in `settle`. Unblocked by: their answers or deadlines. Produces: references.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError

from distill_rl.errors import AlignmentError, DistillError, WorkerError
from distill_rl.types import BadRow, BatchInfo, DocumentBatch
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup

log = logging.getLogger(__name__)


@dataclass
class Pending:
    """A batch at an aligner: references only."""

    batch: DocumentBatch
    place: int
    """which aligner"""
    info: Any
    """reference to the BatchInfo"""
    parts: list[ray.ObjectRef]
    actor: Any = None
    """who was asked; another may have taken its place"""
    since: float | None = None
    """when it was first seen to be next at its aligner"""


class BadRows:
    """Rows left out of the run: listed in a file, and never more than the budget.

    Raises:
        AlignmentError: an earlier part of the run has listed more than the budget.
    """

    def __init__(self, path: Path, budget: int):
        self._path, self._budget = path, budget
        self.rows: set[tuple[str, int]] = set()
        """(train | validation, row)"""
        for line in path.read_text("utf-8").splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):  # a line that a kill cut off is found, and written, again
                listed = json.loads(line)
                self.rows.add((listed["source"], listed["row"]))
        self._check("see there")

    def of(self, batch: DocumentBatch) -> tuple[int, ...]:
        """Rows of this batch that are known to be bad."""
        return tuple(sorted({row for source, row in self.rows if source == batch.source} & set(batch.row_numbers)))

    def add(self, source: str, found: BadRow) -> None:
        """
        Raises:
            AlignmentError: one more than `aligner.max_bad_rows`.
        """
        if (source, found.row) in self.rows:
            return
        self.rows.add((source, found.row))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"source": source, "row": found.row, "reason": found.reason[:500]}) + "\n")
        log.warning("row %d (%s) is left out: %s", found.row, source, found.reason)
        self._check(f"the last: {found.reason}")

    def _check(self, last: str) -> None:
        if len(self.rows) > self._budget:
            rule = f"no more than aligner.max_bad_rows={self._budget} may be left out"
            remedy = f"mend or remove the rows listed in {self._path}, or raise aligner.max_bad_rows"
            raise AlignmentError("data rows that cannot be aligned", rule, f"{len(self.rows)}, {last}", remedy)


class AlignerPool:
    """
    Args:
        group: the actors; empty: `local` works in this process.
        local: an object with the methods of `AlignerWorker`, for an empty group.
        num_parts: what `build` returns besides its BatchInfo.
        deadline_s: for one batch, and for one row of a batch that failed twice.
        max_restarts: how many aligners may be replaced.
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
        max_restarts: int = 10,
    ):
        self._group, self._calls, self._local, self._num_parts = group, calls, local, num_parts
        self._deadline_s, self._start_timeout_s, self._bad_rows = deadline_s, start_timeout_s, bad_rows
        self._max_restarts, self.restarts = max_restarts, 0
        self._unsettled: list[Pending] = []
        """in the order of submission"""

    @property
    def names(self) -> list[str]:
        return self._group.names or ["driver"]

    def submit(self, batch: DocumentBatch) -> Pending:
        """Hands a batch to the next aligner; waits only where there is none but this process."""
        pending = Pending(batch, batch.index % len(self.names), None, [])
        self._build(pending)
        self._unsettled.append(pending)
        return pending

    def overdue(self, pending: Pending) -> bool:
        """Whether a batch that nobody waits for yet has been at the head of its aligner's queue for `deadline_s`."""
        if not self._group.actors or _outcome(pending.info) != "unknown":
            return False
        before = self._unsettled[: self._place_of(pending)]
        if any(each.place == pending.place and _outcome(each.info) == "unknown" for each in before):
            return False
        if pending.since is None:
            pending.since = time.monotonic()
        return time.monotonic() - pending.since > self._deadline_s

    @property
    def queue(self) -> int:
        """Batches that the aligners have yet to answer."""
        infos = [each.info for each in self._unsettled]
        return len(ray.wait(infos, num_returns=len(infos), timeout=0)[1]) if infos else 0

    def _place_of(self, pending: Pending) -> int:
        return next((n for n, each in enumerate(self._unsettled) if each is pending), 0)

    def settle(self, pending: Pending) -> tuple[BatchInfo, bool]:
        """What came of a batch, and whether its references were replaced on the way.

        Raises:
            DistillError: what the user has to mend in the data; more bad rows than the budget.
        """
        what = f"aligning batch {pending.batch.index + 1}"
        self._unsettled = [each for each in self._unsettled if each is not pending]
        first = pending.info
        info = self._attempt(pending, what) or self._again(pending, what)
        if info is None:
            log.warning("%s failed twice; its rows are tried one by one", what)
            self._find_bad_rows(pending)
            self._build(pending)
            info = self._wait(pending, what)
        for row in info.bad_rows:
            self._bad_rows.add(pending.batch.source, row)
        return info, pending.info is not first

    def _build(self, pending: Pending) -> None:
        """Has a batch built by whoever sits at its place now."""
        batch, pending.since = pending.batch, None
        if not self._group.actors:
            pending.info, *pending.parts = [ray.put(part) for part in self._build_here(batch)]
            return
        pending.actor = self._group.actors[pending.place]
        build = pending.actor.build.options(num_returns=1 + self._num_parts)
        pending.info, *pending.parts = build.remote(batch, self._bad_rows.of(batch))

    def _build_here(self, batch: DocumentBatch) -> tuple[Any, ...]:
        try:
            return self._local.build(batch, self._bad_rows.of(batch))
        except DistillError:
            raise
        except Exception as error:
            log.warning("aligning batch %d: %s: %s", batch.index + 1, type(error).__name__, error)
        for document in self._unknown(batch):
            try:
                self._local.try_row(document)
            except DistillError:
                raise
            except Exception as error:
                self._bad_rows.add(batch.source, BadRow(int(document["row"]), f"{type(error).__name__}: {error}"))
        return self._local.build(batch, self._bad_rows.of(batch))

    def _again(self, pending: Pending, what: str) -> BatchInfo | None:
        log.warning("%s is tried once more", what)
        self._build(pending)
        return self._attempt(pending, what)

    def _attempt(self, pending: Pending, what: str) -> BatchInfo | None:
        """None after a failure that another try may mend; the aligner is able to work again then."""
        try:
            return self._wait(pending, what)
        except DistillError as error:
            if _outcome(pending.info) == "done":  # after its deadline, but before anybody was told
                return ray.get(pending.info)
            self._recover(pending, pending.info, error)
            return None

    def _wait(self, pending: Pending, what: str) -> BatchInfo:
        waited = 0.0 if pending.since is None else time.monotonic() - pending.since
        names = {pending.info: self.names[pending.place]}
        return self._calls.gather(names, what=what, timeout_s=max(0.0, self._deadline_s - waited))[0]

    def _recover(self, pending: Pending, call: ray.ObjectRef, error: DistillError) -> None:
        """Raises what no second try can mend; puts a new actor in the place of one that died or does not answer.

        Raises:
            DistillError: `error`, if it is the user's to mend.
            WorkerError: more were replaced than `faults.aligner_restarts`.
        """
        if error.exit_code == 2:
            raise error
        log.warning("%s: %s; got %s", error.what, error.rule, error.value)
        if _outcome(call) != "unknown" or self._group.actors[pending.place] is not pending.actor:
            return
        name = self._group.names[pending.place]
        if self.restarts >= self._max_restarts:
            rule = f"aligners may be replaced faults.aligner_restarts={self._max_restarts} times"
            raise WorkerError(name, rule, str(error), "mend what ends them, or raise it") from error
        self.restarts += 1
        log.warning("%s is replaced (%d of faults.aligner_restarts=%d)", name, self.restarts, self._max_restarts)
        self._group.replace(pending.place, timeout_s=self._start_timeout_s)

    def _find_bad_rows(self, pending: Pending) -> None:
        for document in self._unknown(pending.batch):
            row = int(document["row"])
            calls = self._group.submit("try_row", document, ranks=[pending.place])
            try:
                self._calls.gather(calls, what=f"aligning row {row}", timeout_s=self._deadline_s)
            except DistillError as error:
                pending.actor = self._group.actors[pending.place]
                self._recover(pending, next(iter(calls)), error)
                self._bad_rows.add(pending.batch.source, BadRow(row, str(error)))

    def _unknown(self, batch: DocumentBatch) -> list[Mapping[str, Any]]:
        """Documents that are not known to be bad."""
        known = self._bad_rows.of(batch)
        return [document for document in batch.documents if int(document["row"]) not in known]


def _outcome(call: ray.ObjectRef) -> Literal["done", "raised", "unknown"]:
    """How a call ended, if it did; whoever was asked is alive and free unless that is unknown."""
    try:
        ray.get(call, timeout=0)
    except RayTaskError:
        return "raised"
    except (RayError, TimeoutError):
        return "unknown"
    return "done"
