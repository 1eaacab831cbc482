"""The aligner actors as one pool: all of them work on one batch, results keep their order, and no row ends a run.

A batch is cut into contiguous parts of about as much text, one per aligner (`cut`). Each part is one
call, `align`; once all parts of a batch are aligned, one more call lays out its rows, `assemble`. A batch of one part takes one
call, `build`, which does both. Which aligner makes a call depends on the load, but its result does not, so that a batch has the
same rows for any number of aligners.

An aligner has one call at a time, and the others wait here, earlier batches first. So a call's deadline counts from when
it was made, and an aligner that dies or hangs takes nothing with it but its call:

1. If a call raises, dies or overruns its deadline, it is made once more, by whichever aligner is free. An aligner that
   died or hangs is replaced first; one that merely raised is kept.
2. If it fails again, its rows are tried one by one. Rows that fail on their own are recorded as bad, within
   `aligner.max_bad_rows`, and the call is made without them; before an `assemble`, all parts are aligned again.
3. If it fails a third time, so does the batch.

Without actors the driver aligns in its own process, in the same order; deaths and deadlines cannot be handled there.

Consumes: batches. Waits for: the aligners, in `settle`. Unblocked by: their results or deadlines. Produces: references.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from distill_rl.config.schema import Config
from distill_rl.errors import AlignmentError, DistillError, WorkerError
from distill_rl.system.files import append_json_lines, read_json_lines
from distill_rl.types import BadRow, BatchInfo, DocumentBatch, Row, row_of
from distill_rl.workers.actors.aligner import AlignerUse
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.hosts import HostLost
from distill_rl.workers.pipeline.sub_batch import PendingBatch

LEAST_BYTES = 8192
"""Text worth a call of its own: it takes about ten milliseconds to tokenise on two sides and align, a call about two."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _AlignerTask:
    """Work on a batch that one call of an aligner does: `align` for a part of the batch, or `assemble` or `build` for all of it."""

    batch: _Alignment
    documents: Sequence[Mapping[str, Any]]
    is_part: bool
    failures: int = 0
    use: AlignerUse | None = None
    """What the part took, once it is aligned."""
    aligned: Any = None
    """Reference to the aligned documents of the part."""

    @property
    def what(self) -> str:
        """For messages."""
        is_aligned = self.batch.parts and not self.is_part
        return f"{'assembling' if is_aligned else 'aligning'} batch {self.batch.pending.documents.index + 1}"


class _Alignment:
    """The work on a batch that is to be aligned, in as many parts as `parts` has slices of its documents, if these are several."""

    def __init__(self, pending: PendingBatch, order: int, parts: Sequence[slice]):
        documents = pending.documents.documents
        self.pending, self.order, self.closed = pending, order, False
        """`order` counts batches as they are submitted; `closed` is True once the batch is aligned or has failed."""
        several = parts if len(parts) > 1 else ()
        self.parts = [_AlignerTask(self, documents[part], is_part=True) for part in several]
        self.whole = _AlignerTask(self, documents, is_part=False)


@dataclass(frozen=True)
class _Call:
    """A call that an aligner is making: the only one it has."""

    task: _AlignerTask
    results: Sequence[ray.ObjectRef]
    """What the driver reads comes first."""
    since: float
    """`time.monotonic()` of the call."""


@dataclass
class AlignerPool:
    """The aligner actors, or this process in their place, called as one; see the top of this module."""

    _group: WorkerGroup
    """The actors. If it is empty, `local` does the work in this process."""
    _calls: Calls
    _config: Config
    num_ranks: int
    """Data-parallel ranks of the student and of all teachers together."""
    bad_rows: BadRows
    local: Any = None
    """An object with the methods of `AlignerWorker`, for an empty group."""
    restarts: int = 0
    """Number of aligners that were replaced."""
    _failure: DistillError | None = None
    """Why an aligner could not be replaced; set once, and no aligner is called any more."""
    _submitted: int = 0
    _unfinished: list[_Alignment] = field(default_factory=list)
    _tasks: list[_AlignerTask] = field(default_factory=list)
    """Not called yet."""
    _running: dict[int, _Call] = field(default_factory=dict)
    """By rank of the aligner."""
    _aligned: list[PendingBatch] = field(default_factory=list)
    """Batches that `advance` has not returned yet."""

    def __post_init__(self) -> None:
        self._left_out, self._deadline_s = LeftOutLog(), self._config.aligner.deadline_s
        self._idle = deque(range(len(self._group.actors)))
        """Ranks of the aligners without a call, the one that has been idle for longest first."""

    @property
    def queue(self) -> int:
        """Number of batches that the aligners have not finished."""
        return len(self._unfinished)

    def awaited(self) -> list[ray.ObjectRef]:
        """Returns the calls that aligners are making; `advance` handles one when it has ended."""
        return [call.results[0] for call in self._running.values()]

    def submit(self, batch: DocumentBatch) -> PendingBatch:
        """Hands a batch to the aligners and returns at once; its references appear when it is aligned.

        `advance` has to be called until then. An empty pool does the work in this process before it returns, and
        records rows that fail.

        Raises:
            DistillError: in an empty pool, the data need a fix by the user, or too many rows are bad.
        """
        pending = PendingBatch(batch)
        if not self._group.actors:
            try:
                self._build_here(pending)
            except HostLost as error:
                pending.error = error  # the step that is under way can still be done, and saved
            return pending
        alignment = _Alignment(pending, self._submitted, cut(batch.documents, len(self._group.actors)))
        self._submitted += 1
        self._unfinished.append(alignment)
        self._tasks += alignment.parts or [alignment.whole]
        self._hand_out()
        return pending

    def advance(self) -> list[PendingBatch]:
        """Takes in the calls that have ended or are late, recovers from failures, and gives idle aligners work.

        Does not wait, unless an aligner has to be replaced or rows have to be tried one by one. An error is not raised
        here but by `settle` for its batch, because earlier batches can still be trained on.

        Returns:
            The batches that are aligned now and were not at the last call.
        """
        for rank, call in list(self._running.items()):
            # Asked of each call anew: what is done for one may take long.
            ended = bool(ray.wait([call.results[0]], timeout=0, fetch_local=False)[0])
            if ended or time.monotonic() - call.since > self._deadline_s:
                del self._running[rank]
                self._take_in(rank, call, ended=ended)
                if rank not in self._running:
                    self._idle.append(rank)
        self._hand_out()
        aligned, self._aligned = self._aligned, []
        return aligned

    def settle(self, pending: PendingBatch, advance: Callable[[], object] | None = None) -> BatchInfo:
        """Waits until a batch is aligned, records its bad rows, and returns its BatchInfo.

        Args:
            advance: what to call in place of the method of that name, which it must call.

        Raises:
            DistillError: the data need a fix by the user, more rows are bad than the budget allows, or more aligners
                were replaced than `faults.aligner_restarts`.
        """
        batch = pending.documents
        self._calls.until(
            lambda: bool(pending.info or pending.error or self._failure),
            advance or self.advance,
            self.awaited,
            what=f"aligning batch {batch.index + 1}",
            actors=self._group.names,
            timeout_s=self._deadline_s,
        )
        if pending.info is None:
            raise pending.error or self._failure or AssertionError(pending)
        for row in pending.info.bad_rows:
            self.bad_rows.add(batch.source, row)
        self._left_out.add(batch.source, pending.info)
        return pending.info

    def abandon(self) -> None:
        """Drops the batches that have not been returned yet. What aligners are working on comes to nothing."""
        for alignment in list(self._unfinished):
            self._close(alignment)
        self._aligned.clear()

    def _hand_out(self) -> None:
        """Gives idle aligners the tasks that wait, those of earlier batches first."""
        self._tasks.sort(key=lambda task: task.batch.order)  # stable: parts of a batch stay in order
        while self._tasks and self._idle and self._failure is None:
            self._call(self._idle.popleft(), self._tasks.pop(0))

    def _call(self, rank: int, task: _AlignerTask) -> None:
        """Calls an idle aligner on a task, without the rows that are known to be bad."""
        actor, batch = self._group.actors[rank], task.batch.pending.documents
        if task.is_part:
            skip = self.bad_rows.of(batch.source, task.documents)
            results = actor.align.options(num_returns=2).remote(task.documents, skip)
        elif parts := [part.aligned for part in task.batch.parts]:
            assemble = actor.assemble.options(num_returns=1 + self.num_ranks)
            results = assemble.remote(batch.index, batch.cursor, *parts)
        else:
            skip = self.bad_rows.of(batch.source, task.documents)
            build = actor.build.options(num_returns=1 + self.num_ranks)
            results = build.remote(batch.index, batch.cursor, task.documents, skip)
        self._running[rank] = _Call(task, results, time.monotonic())

    def _take_in(self, rank: int, call: _Call, *, ended: bool) -> None:
        """Takes in the call of an aligner that has ended, or is late if not `ended`."""
        task, name = call.task, self._group.names[rank]
        try:
            if not ended:
                raise self._calls.late([name], task.what, self._deadline_s)
            read = self._calls.gather({call.results[0]: name}, what=task.what, timeout_s=0.0)[0]
        except DistillError as error:
            self._fail(rank, call, error)
            return
        alignment = task.batch
        if alignment.closed:
            return  # another part has failed for good
        if not task.is_part:
            info = _total(read, [part.use for part in alignment.parts if part.use is not None])
            self._close(alignment)
            self._finish(alignment.pending, info, call.results[1:])
            return
        task.use, task.aligned = read, call.results[1]
        if alignment.parts and all(part.aligned is not None for part in alignment.parts):
            self._call(rank, alignment.whole)  # before any other task, and where the last part is already

    def _fail(self, rank: int, call: _Call, error: DistillError) -> None:
        """Recovers from a call that failed with `error`, so that the aligner works again; see the top of this module."""
        # If that is not possible, the batch has failed.
        task = call.task
        try:
            self._replace_if_lost(rank, call.results[0], error)
            if task.batch.closed:
                return
            task.failures += 1
            if task.failures == 1:
                log.warning("%s is tried once more", task.what)
                self._tasks.append(task)
            elif task.failures == 2:
                log.warning("%s failed twice; its rows are tried one by one", task.what)
                self._find_bad_rows(rank, task.batch.pending.documents.source, task.documents)
                again = [task] if task.is_part else task.batch.parts or [task]
                for part in again:
                    part.aligned = None
                self._tasks += again
            else:
                raise error
        except DistillError as final:
            self._close(task.batch, final)

    def _replace_if_lost(self, rank: int, call: ray.ObjectRef, error: DistillError) -> None:
        """Replaces an aligner whose only call failed with `error`, if it died or does not answer, and waits until the new one works."""
        # Raises `error` if the user has to fix its cause. If no replacement is allowed or none starts, no aligner is called any more.
        if error.exit_code == 2:
            raise error
        self._calls.hosts.require()
        log.warning("%s: %s; got %s", error.what, error.rule, error.value)
        with suppress(RayError, TimeoutError):
            with suppress(RayTaskError):
                ray.get(call, timeout=0)
            return  # it has returned or raised, so that its actor is alive and free
        name, most = self._group.names[rank], self._config.faults.aligner_restarts
        budget = f"faults.aligner_restarts={most}"
        try:
            if self.restarts >= most:
                rule = f"aligners may be replaced {budget} times"
                raise WorkerError(name, rule, str(error), "fix what ends them, or raise it") from error
            self.restarts += 1
            log.warning("%s is replaced (%d of %s)", name, self.restarts, budget)
            self._group.replace(rank, timeout_s=self._config.ray.start_timeout_s)
        except DistillError as failure:
            self._failure = failure
            raise

    def _find_bad_rows(self, rank: int, source: str, documents: Sequence[Mapping[str, Any]]) -> None:
        """Tries each document that is not known to be bad on an aligner without a call, and records those that fail."""
        for document in self.bad_rows.others(source, documents):
            row = row_of(document)
            calls = self._group.submit("try_row", document, ranks=[rank])
            try:
                self._calls.gather(calls, what=f"aligning row {row}", timeout_s=self._deadline_s)
            except DistillError as error:
                self._replace_if_lost(rank, next(iter(calls)), error)
                self.bad_rows.add(source, BadRow(row, str(error)))

    def _close(self, alignment: _Alignment, error: DistillError | None = None) -> None:
        """Ends the work on a batch: it is aligned, or failed with `error`, of several errors the first."""
        if alignment.closed:
            return
        alignment.closed, alignment.pending.error = True, error
        del alignment.parts[:], alignment.whole  # tasks refer to it: the circle would live until Python finds it
        self._unfinished.remove(alignment)
        self._tasks = [task for task in self._tasks if task.batch is not alignment]

    def _finish(self, pending: PendingBatch, info: BatchInfo, rows: Sequence[ray.ObjectRef]) -> None:
        """Notes that a batch is aligned, with the references to the rows of every rank."""
        pending.info, pending.rows = info, list(rows)
        self._aligned.append(pending)

    def _build_here(self, pending: PendingBatch) -> None:
        """Aligns a batch in this process."""
        # If that fails, each row is tried alone, those that fail are recorded as bad, and the batch is aligned without
        # them.
        batch = pending.documents
        try:
            return self._build_once(pending)
        except DistillError:
            raise
        except Exception as error:
            log.warning("aligning batch %d: %s: %s", batch.index + 1, type(error).__name__, error)
        for document in self.bad_rows.others(batch.source, batch.documents):
            try:
                self.local.try_row(document)
            except DistillError:
                raise
            except Exception as error:
                self.bad_rows.add(batch.source, BadRow(row_of(document), f"{type(error).__name__}: {error}"))
        self._build_once(pending)

    def _build_once(self, pending: PendingBatch) -> None:
        """Aligns a batch in this process, without rows that are known to be bad; raises what the aligner raises."""
        batch = pending.documents
        skip = self.bad_rows.of(batch.source, batch.documents)
        info, *rows = self.local.build(batch.index, batch.cursor, batch.documents, skip)
        self._calls.hosts.require()  # without its raylet `ray.put` would end this process
        self._finish(pending, info, [ray.put(of_rank) for of_rank in rows])


def _total(info: BatchInfo, uses: Sequence[AlignerUse]) -> BatchInfo:
    """The summary of a batch whose rows were made as `info` says, after its parts were aligned as `uses` say."""
    seconds = info.seconds + sum(use.seconds for use in uses)
    return replace(info, seconds=seconds, peak_gib=max([info.peak_gib, *(use.peak_gib for use in uses)]))


def cut(documents: Sequence[Mapping[str, Any]], parts: int, least: int = LEAST_BYTES) -> list[slice]:
    """Cuts documents into contiguous parts with about the same amount of text; a pure function of its arguments.

    No part has more than its even share of all text by more than the largest document. Parts are fewer where some would
    have less text than `least` or no document.

    Args:
        parts: the most parts, at least 1.
        least: bytes of text that a part should have at least.

    Returns:
        The slices of `documents` in order; none of them is empty, unless there are no documents.
    """
    sizes = np.array([text_bytes(document) for document in documents], dtype=np.int64)
    ends = np.cumsum(sizes)  # bytes up to and with each document
    total = int(sizes.sum())
    parts = max(1, min(parts, total // least))
    stops = [0]
    for part in range(1, parts):
        # Part after part ends at the boundary of documents that is nearest to its share of the text.
        share = total * part / parts
        stop = int(np.searchsorted(ends, share))
        if ends[stop] - share < share - (ends[stop - 1] if stop else 0):
            stop += 1
        stops.append(max(stop, stops[-1]))
    stops.append(len(documents))
    slices = [slice(first, stop) for first, stop in pairwise(stops) if stop > first]
    return slices or [slice(0, 0)]


def text_bytes(value: object) -> int:
    """Bytes of UTF-8 of all strings in a document or in a part of one."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, Mapping):
        return sum(text_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(text_bytes(item) for item in value)
    return 0


class BadRows:
    """Rows left out of the run: listed in a file, and never more of them than the budget.

    Raises:
        AlignmentError: an earlier part of the run has listed more than the budget.
    """

    def __init__(self, path: Path, budget: int):
        """Reads the rows that earlier parts of the run have listed in `path`, if it exists.

        Args:
            path: JSON lines with source, row (of a joined text a list) and reason; rows are appended to it.
            budget: most rows that may be listed.

        Raises:
            AlignmentError: more than the budget are listed already.
        """
        self._path, self._budget = path, budget
        self.rows: set[tuple[str, Row]] = set()
        """(`train` or `validation`, row)"""
        for entry in read_json_lines(path):
            if "stage" not in entry:  # rows that the data left out have a budget of their own
                row = entry["row"]
                self.rows.add((entry["source"], tuple(row) if isinstance(row, list) else row))
        self._check("see there")

    def of(self, source: str, documents: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
        """Returns the rows of those documents that are known to be bad, in the order of the documents.

        Args:
            source: `train` or `validation`.
        """
        return tuple(row for row in map(row_of, documents) if (source, row) in self.rows)

    def others(self, source: str, documents: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the documents without those that are known to be bad; `source` as for `of`."""
        return [document for document in documents if (source, row_of(document)) not in self.rows]

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
        append_json_lines(self._path, [{"source": source, "row": bad.row, "reason": bad.reason[:500]}])
        log.warning("row %s (%s) is left out: %s", bad.row, source, bad.reason)
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
                log.warning("chats are read without %s, for instance row %s (%s)", part.what, part.row, source)
            elif len(str(count)) > len(str(before)):
                log.warning("chats are read without %s: %d so far", part.what, count)
