"""The aligner actors as one pool: they take batches in turn, results keep their order, and no single row ends a run.

`submit` returns references at once. `settle` waits for a batch and retries what fails, in this order:

1. The batch is aligned. Batch t belongs to aligner t mod N, whatever the depth or the load.
2. If the aligner raises, dies or overruns its deadline, the batch is aligned once more. An aligner that died or hangs
   is replaced first; one that merely raised is kept.
3. If that fails too, its rows are tried one by one. Rows that fail on their own are recorded as bad, within
   `aligner.max_bad_rows`, and the batch is aligned without them.

Without actors the driver aligns in its own process, in the same order; deaths and deadlines cannot be handled there.

Consumes: batches. Waits for: the aligners, in `settle`. Unblocked by: their results or deadlines. Produces: references.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError

from distill_rl.config.schema import Config
from distill_rl.errors import AlignmentError, DistillError, WorkerError
from distill_rl.types import BadRow, BatchInfo, DocumentBatch
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.pipeline.sub_batch import PendingBatch

log = logging.getLogger(__name__)


class BadRows:
    """Rows left out of the run: listed in a file, and never more of them than the budget.

    Raises:
        AlignmentError: an earlier part of the run has listed more than the budget.
    """

    def __init__(self, path: Path, budget: int):
        """Reads the rows that earlier parts of the run have listed in `path`, if it exists.

        Args:
            path: JSON lines with source, row and reason; rows are appended to it.
            budget: most rows that may be listed.

        Raises:
            AlignmentError: more than the budget are listed already.
        """
        self._path, self._budget = path, budget
        self.rows: set[tuple[str, int]] = set()
        """(`train` or `validation`, row)"""
        for line in path.read_text("utf-8").splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):  # a line that a kill cut off is ignored: its row will be found and listed again
                entry = json.loads(line)
                if "stage" not in entry:  # rows that the data left out have a budget of their own
                    self.rows.add((entry["source"], entry["row"]))
        self._check("see there")

    def of(self, batch: DocumentBatch) -> tuple[int, ...]:
        """Returns the row numbers of this batch that are known to be bad, sorted."""
        return tuple(sorted({row for source, row in self.rows if source == batch.source} & set(batch.row_numbers)))

    def add(self, source: str, bad: BadRow) -> None:
        """Lists a row as left out, in the file and in memory, and logs why. Does nothing if it is listed already.

        Args:
            source: `train` or `validation`.

        Raises:
            AlignmentError: more rows than the budget are now listed. The row is listed all the same.
        """
        if (source, bad.row) in self.rows:
            return
        self.rows.add((source, bad.row))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"source": source, "row": bad.row, "reason": bad.reason[:500]}) + "\n")
        log.warning("row %d (%s) is left out: %s", bad.row, source, bad.reason)
        self._check(f"the last: {bad.reason}")

    def _check(self, detail: str) -> None:
        """Raises an AlignmentError if more rows are listed than the budget allows; `detail` ends its message."""
        if len(self.rows) > self._budget:
            rule = f"no more than aligner.max_bad_rows={self._budget} may be left out"
            remedy = f"fix or remove the rows listed in {self._path}, or raise aligner.max_bad_rows"
            raise AlignmentError("data rows that cannot be aligned", rule, f"{len(self.rows)}, {detail}", remedy)


class LeftOutLog:
    """Says what chat templates leave out of the documents: once per part, and again each time it is ten times as many."""

    def __init__(self) -> None:
        self._documents: Counter[str] = Counter()

    def add(self, source: str, info: BatchInfo) -> None:
        """Counts what was left out of one batch of `train` or `validation` documents, and logs what is due."""
        for part in info.left_out:
            before = self._documents[part.what]
            self._documents[part.what] = count = before + part.documents
            if not before:
                log.warning("chats are read without %s, for instance row %d (%s)", part.what, part.row, source)
            elif len(str(count)) > len(str(before)):
                log.warning("chats are read without %s: %d so far", part.what, count)


class AlignerPool:
    """The aligner actors, or this process in their place, called as one; see the top of this module.

    Args:
        group: the actors. If it is empty, `local` does the work in this process.
        local: an object with the methods of `AlignerWorker`, for an empty group.
        num_parts: number of values that `build` returns besides its BatchInfo.
    """

    def __init__(
        self, group: WorkerGroup, calls: Calls, config: Config, *, local: Any = None, num_parts: int, bad_rows: BadRows
    ):
        self._group, self._calls, self._config, self._local = group, calls, config, local
        self._num_parts, self._bad_rows, self.restarts = num_parts, bad_rows, 0
        self._left_out = LeftOutLog()
        self._deadline_s = config.aligner.deadline_s
        self.unsettled: list[PendingBatch] = []
        """Batches whose alignment nobody has waited for yet, in the order of submission."""

    @property
    def names(self) -> list[str]:
        return self._group.names or ["driver"]

    def submit(self, batch: DocumentBatch) -> PendingBatch:
        """Hands a batch to its aligner and returns at once, with references to the results.

        `settle` must be called for it later. An empty pool does the work in this process before it returns, and
        records rows that fail.

        Raises:
            DistillError: in an empty pool, the data need a fix by the user, or too many rows are bad.
        """
        pending = PendingBatch(batch, batch.index % len(self.names), None, [])
        self._build(pending)
        self.unsettled.append(pending)
        return pending

    def overdue(self, pending: PendingBatch) -> bool:
        """Returns whether a batch has been first in its aligner's queue, unfinished, for too long.

        That is longer than `aligner.deadline_s`.

        The time counts from the first call that sees it there. For a batch that has been submitted and not settled;
        False in an empty pool.
        """
        if not self._group.actors or _outcome(pending.info) != "unknown":
            return False
        for earlier in self.unsettled:
            if earlier is pending:
                break
            if earlier.aligner == pending.aligner and _outcome(earlier.info) == "unknown":
                return False  # the aligner has not come to this batch yet
        if pending.first_in_line_since is None:
            pending.first_in_line_since = time.monotonic()
        return time.monotonic() - pending.first_in_line_since > self._deadline_s

    @property
    def queue(self) -> int:
        """Number of batches that the aligners have not finished."""
        infos = [pending.info for pending in self.unsettled]
        return len(ray.wait(infos, num_returns=len(infos), timeout=0)[1]) if infos else 0

    def settle(self, pending: PendingBatch) -> tuple[BatchInfo, bool]:
        """Waits until a batch is aligned; after failures repeats it, and then leaves out the rows that fail.

        The order is that at the top of this module.

        New bad rows are recorded. Aligners that died or hang are replaced.

        Returns:
            The BatchInfo, and whether `pending.info` and `pending.parts` were replaced on the way, so that calls that
            were given the old ones must be made again.

        Raises:
            DistillError: the data need a fix by the user, more rows are bad than the budget allows, or more aligners
                were replaced than `faults.aligner_restarts`.
        """
        what = f"aligning batch {pending.documents.index + 1}"
        self.unsettled = [other for other in self.unsettled if other is not pending]
        first_info = pending.info
        info = self._attempt(pending, what)
        if info is None:
            log.warning("%s is tried once more", what)
            self._build(pending)
            info = self._attempt(pending, what)
        if info is None:
            log.warning("%s failed twice; its rows are tried one by one", what)
            self._find_bad_rows(pending)
            self._build(pending)
            info = self._wait(pending, what)
        for row in info.bad_rows:
            self._bad_rows.add(pending.documents.source, row)
        self._left_out.add(pending.documents.source, info)
        return info, pending.info is not first_info

    def _build(self, pending: PendingBatch) -> None:
        """Calls the batch's aligner, without its known bad rows, and stores the new references in `pending`.

        In an empty pool the work is done here, and the references are to finished results.
        """
        batch, pending.first_in_line_since = pending.documents, None
        if not self._group.actors:
            pending.info, *pending.parts = [ray.put(part) for part in self._build_here(batch)]
            return
        pending.actor = self._group.actors[pending.aligner]
        build = pending.actor.build.options(num_returns=1 + self._num_parts)
        pending.info, *pending.parts = build.remote(batch, self._bad_rows.of(batch))

    def _build_here(self, batch: DocumentBatch) -> tuple[Any, ...]:
        """Aligns a batch in this process and returns what `AlignerWorker.build` does.

        If that fails, each row is tried alone, those that fail are recorded as bad, and the batch is aligned without
        them.

        Raises:
            DistillError: the data need a fix by the user, or too many rows are bad.
        """
        try:
            return self._local.build(batch, self._bad_rows.of(batch))
        except DistillError:
            raise
        except Exception as error:
            log.warning("aligning batch %d: %s: %s", batch.index + 1, type(error).__name__, error)
        for document in self._not_known_bad(batch):
            try:
                self._local.try_row(document)
            except DistillError:
                raise
            except Exception as error:
                self._bad_rows.add(batch.source, BadRow(int(document["row"]), f"{type(error).__name__}: {error}"))
        return self._local.build(batch, self._bad_rows.of(batch))

    def _attempt(self, pending: PendingBatch, what: str) -> BatchInfo | None:
        """Waits for a batch until its deadline. Returns its BatchInfo, or None after a failure that may be retried.

        After None the aligner at the batch's index has been replaced if it died or hangs, so that it can work again.

        Raises:
            DistillError: a retry cannot help.
        """
        try:
            return self._wait(pending, what)
        except DistillError as error:
            if _outcome(pending.info) == "done":  # it finished between the deadline and now
                return ray.get(pending.info)
            self._recover(pending, pending.info, error)
            return None

    def _wait(self, pending: PendingBatch, what: str) -> BatchInfo:
        """Waits for a batch's BatchInfo and returns it.

        The deadline counts from when `overdue` first saw the batch at the head of its aligner's queue, otherwise from
        now.

        Raises:
            DistillError: the aligner raised, died or is late.
        """
        since = pending.first_in_line_since
        waited_s = 0.0 if since is None else time.monotonic() - since
        names = {pending.info: self.names[pending.aligner]}
        return self._calls.gather(names, what=what, timeout_s=max(0.0, self._deadline_s - waited_s))[0]

    def _recover(self, pending: PendingBatch, call: ray.ObjectRef, error: DistillError) -> None:
        """Replaces the batch's aligner after `error` if it died or does not answer; otherwise does nothing.

        Args:
            call: the call that failed.

        Raises:
            DistillError: `error`, if the user has to fix its cause.
            WorkerError: more aligners were replaced than `faults.aligner_restarts`.
        """
        if error.exit_code == 2:
            raise error
        log.warning("%s: %s; got %s", error.what, error.rule, error.value)
        if _outcome(call) != "unknown" or self._group.actors[pending.aligner] is not pending.actor:
            return  # it answered, so it is alive; or it has been replaced already
        name = self._group.names[pending.aligner]
        budget = f"faults.aligner_restarts={self._config.faults.aligner_restarts}"
        if self.restarts >= self._config.faults.aligner_restarts:
            rule = f"aligners may be replaced {budget} times"
            raise WorkerError(name, rule, str(error), "fix what ends them, or raise it") from error
        self.restarts += 1
        log.warning("%s is replaced (%d of %s)", name, self.restarts, budget)
        self._group.replace(pending.aligner, timeout_s=self._config.ray.start_timeout_s)

    def _find_bad_rows(self, pending: PendingBatch) -> None:
        """Tries each row that is not known to be bad on its own, and records those that fail.

        Aligners that die or hang are replaced.

        Raises:
            DistillError: as for `settle`.
        """
        for document in self._not_known_bad(pending.documents):
            row = int(document["row"])
            calls = self._group.submit("try_row", document, ranks=[pending.aligner])
            try:
                self._calls.gather(calls, what=f"aligning row {row}", timeout_s=self._deadline_s)
            except DistillError as error:
                pending.actor = self._group.actors[pending.aligner]
                self._recover(pending, next(iter(calls)), error)
                self._bad_rows.add(pending.documents.source, BadRow(row, str(error)))

    def _not_known_bad(self, batch: DocumentBatch) -> list[Mapping[str, Any]]:
        """The batch's documents without rows that could not be aligned before."""
        bad = self._bad_rows.of(batch)
        return [document for document in batch.documents if int(document["row"]) not in bad]


def _outcome(call: ray.ObjectRef) -> Literal["done", "raised", "unknown"]:
    """Returns how a call ended, without waiting; `unknown` if it has not ended or its actor died.

    After `done` or `raised`, the actor that was called is alive and free.
    """
    try:
        ray.get(call, timeout=0)
    except RayTaskError:
        return "raised"
    except (RayError, TimeoutError):
        return "unknown"
    return "done"
