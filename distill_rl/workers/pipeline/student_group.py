"""The student's ranks, called as one; the teachers of a capture, which no student reads; and the metrics of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray

from distill_rl.config.schema import Config
from distill_rl.errors import DistillError, WorkerError
from distill_rl.observe.metrics import Metric, merge
from distill_rl.observe.timing import StepTimer
from distill_rl.types import AlignmentInfo, BatchInfo
from distill_rl.workers.actors.student import Retryable
from distill_rl.workers.actors.teacher import TeacherStats
from distill_rl.workers.cluster.calls import Calls, Overdue, Refs
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.relay import each
from distill_rl.workers.pipeline.pipeline import Pipeline
from distill_rl.workers.pipeline.recovery import TeacherRecovery
from distill_rl.workers.pipeline.sub_batch import PendingBatch, State, SubBatch, Teachers

AHEAD_S = 5.0
"""Seconds before the expected end of a step from which on the student is called on the next one: a request to stop waits for both."""

Following = Callable[[], PendingBatch | None]
"""Returns the batch that the student may be called on next, if there is any."""


def _nothing() -> None:
    return None


@dataclass
class _Group:
    """Waits for calls on batches, while the pipeline goes on with later ones."""

    _config: Config
    _calls: Calls
    _pipeline: Pipeline
    _recovery: TeacherRecovery

    def _gather(self, calls: Refs, what: str, then: Callable[[], object] = _nothing) -> list[Any]:
        """Waits for calls while the pipeline goes on with later batches, and `then` is called; returns their results in order."""
        timeout_s, pipeline = self._config.ray.step_timeout_s, self._pipeline

        def meanwhile() -> None:
            pipeline.advance()
            then()

        return self._calls.gather(calls, what=what, timeout_s=timeout_s, meanwhile=meanwhile, also=pipeline.awaited)


@dataclass
class _Progress:
    """One batch on its way through the student, in training or in validation."""

    batch: PendingBatch
    method: str
    """Of StudentWorker."""
    what: str
    """For messages."""
    timers: tuple[str, str, str]
    """Names under which the waits for the aligner, the teachers and the student are timed."""
    following: Following = _nothing
    ahead: _Progress | None = None
    """The next batch, once the student has been called on a part of it."""
    began: float = field(default_factory=time.monotonic)
    running: deque[SubBatch] = field(default_factory=deque)
    """TRAINING: the student has been called and not yet waited for."""
    teacher_stats: list[list[list[TeacherStats]]] = field(default_factory=list)
    results: list[dict[str, Metric]] = field(default_factory=list)

    @classmethod
    def of_step(cls, batch: PendingBatch) -> _Progress:
        step = f"step {batch.documents.index + 1}"
        return cls(batch, "train", step, ("wait_aligner", "wait_teachers", "student"))


@dataclass
class StudentGroup(_Group):
    """The student's ranks, called as one. Recovers from the deaths of teachers on the way."""

    _group: WorkerGroup
    _timer: StepTimer
    is_within_step: bool = False
    """Whether the ranks may be somewhere in a step, so that their state is none to save."""
    _ahead: _Progress | None = None
    """The batch that the student was called on when the results of the last one were read."""
    _took_s: float = 0.0
    """The last step."""

    def train_step(self, batch: PendingBatch, following: Following = _nothing) -> dict[str, Metric]:
        """Trains the student on a batch, in one optimizer step, and waits for all that this needs.

        Dead teachers are recovered from on the way. `batch.metrics` is set to the metrics of alignment, transport and
        faults. On return the ranks may be in the next step already (`is_within_step`).

        Args:
            following: returns the next batch if the student may be called on it before the results of this one are read. It is
                asked until the student has been; then the next call has to be with that batch.

        Returns:
            The student's metrics, merged over ranks and sub-batches.

        Raises:
            DistillError: a worker failed and cannot be recovered from.
        """
        ahead = self._ahead
        progress = ahead if ahead is not None and ahead.batch is batch else _Progress.of_step(batch)
        progress.following, progress.began = following, time.monotonic()
        results = self._run(progress)
        self._took_s = time.monotonic() - progress.began
        return results

    def evaluate(self, batch: PendingBatch) -> dict[str, Metric]:
        """Returns the validation losses of one batch, without training on it; otherwise like `train_step`."""
        what = f"validation batch {batch.documents.index}"
        return self._run(_Progress(batch, "evaluate", what, ("validation",) * 3))

    def collective(self, method: str, *arguments: object, what: str) -> list[Any]:
        """Calls a method in which all ranks take part (save, load, export), and waits for it.

        Waits `ray.step_timeout_s` at most.

        Returns:
            The results in rank order.

        Raises:
            DistillError: a rank failed, died or is late.
        """
        return self._gather(self._group.submit(method, *arguments), what)

    def _run(self, progress: _Progress) -> dict[str, Metric]:
        """Waits for a batch's alignment, calls the student on every sub-batch as its teachers are called, and waits."""
        # The student is called only after the alignment is known to exist: no earlier fault can reach its state. Sets
        # `batch.metrics`.
        batch, queue = progress.batch, self._pipeline.aligners.queue
        with self._timer.part(progress.timers[0]):
            info = self._pipeline.settle(batch)
        self.is_within_step = progress.method == "train"
        with self._calls.hosts.finishing():
            for sub_batch in batch.sub_batches[len(progress.running) :]:
                while sub_batch.state is State.QUEUED:  # the rings are full: finishing a running one frees its slots
                    self._finish_first(progress)
                self._call_student(progress, sub_batch)
                progress.running.append(sub_batch)
            self._call_ahead(progress)
            while progress.running:
                self._finish_first(progress)
        self._ahead = progress.ahead
        self.is_within_step = progress.ahead is not None
        transport = describe_transport(
            self._config, progress.teacher_stats, self._pipeline.occupancy(), self._pipeline.lost
        )
        batch.metrics = merge([describe_alignment(info, queue), transport, self._recovery.counts()])
        return merge(progress.results)

    def _call_ahead(self, progress: _Progress) -> None:
        """Calls the student on what the teachers have been called on of the next batch, if it may be by now."""
        # Its ranks run the calls in this order, and none of them if the one before did not succeed.
        waits = any(part.state in (State.QUEUED, State.TEACHING) for part in progress.batch.sub_batches)
        if waits or time.monotonic() - progress.began < self._took_s - AHEAD_S:
            return
        batch = progress.ahead.batch if progress.ahead else progress.following()
        if (
            batch is None or batch.info is None or batch.info.bad_rows
        ):  # bad rows are counted first: they may be too many
            return
        ahead = progress.ahead or _Progress.of_step(batch)
        for sub_batch in batch.sub_batches[len(ahead.running) :]:
            if sub_batch.state is not State.TEACHING:
                break
            self._call_student(ahead, sub_batch)
            ahead.running.append(sub_batch)
            progress.ahead = ahead

    def _call_student(self, progress: _Progress, sub_batch: SubBatch) -> None:
        """Calls every rank with its rows and the targets that all teachers publish, without waiting."""
        # Ray starts each call once its targets exist. The sub-batch is then TRAINING, with these calls in place of
        # earlier ones.
        per_row, published = self._config.student.parallel.ranks_per_row, sub_batch.published
        sizes = [len(teacher) for teacher in published]
        targets = self._group.collect([ref for teacher in published for ref in teacher])
        ranks, is_last = range(len(self._group.actors)), sub_batch is progress.batch.sub_batches[-1]
        rows = [sub_batch.student[rank // per_row] for rank in ranks]
        calls = self._group.submit_each(progress.method, rows, sub_batch.index, is_last, sizes, *targets, ranks=ranks)
        sub_batch.call_student(calls)

    def _finish_first(self, progress: _Progress) -> None:
        """Waits for the oldest running sub-batch, collects its results in `progress`, and frees its slots."""
        # Recovers from teachers' deaths, as often as the budget allows.
        sub_batch = progress.running[0]
        while True:
            try:
                calls, then = sub_batch.all_teacher_calls, partial(self._call_ahead, progress)
                with self._timer.part(progress.timers[1]):
                    returned = dict(zip(calls, self._gather(calls, f"the teachers' forward of {progress.what}", then)))
                with self._timer.part(progress.timers[2]):
                    results = self._gather(sub_batch.student_calls, progress.what, then)
                for result in results:
                    if isinstance(result, Retryable):
                        raise WorkerError("the student", f"{progress.what} must reach its targets", result.reason)
                break
            except DistillError as error:
                self._recover(progress, error)
        progress.teacher_stats.append([[returned[ref] for ref in teacher] for teacher in sub_batch.leaders])
        if sub_batch.state is State.TRAINING:
            sub_batch.finish()
        progress.running.popleft()
        progress.results += results
        self._pipeline.finish(sub_batch)

    def _recover(self, progress: _Progress, error: DistillError) -> None:
        """Replaces dead teachers or gives one up, and calls the student again on sub-batches that it could not begin."""
        # Sub-batches that the student has finished are marked DONE.
        with self._timer.part("recovery"):
            self._recovery.find_dead(error, progress.what)
            called = [(of, sub_batch) for of in (progress, progress.ahead) if of for sub_batch in of.running]
            for of, sub_batch in called:
                if sub_batch.state is State.TRAINING and self._is_done(of, sub_batch, error):
                    sub_batch.finish()
            self._recovery.replace_dead()
            for of, sub_batch in called:
                if sub_batch.state is State.TRAINING:
                    self._call_student(of, sub_batch)

    def _is_done(self, progress: _Progress, sub_batch: SubBatch, error: DistillError) -> bool:
        """Waits until a sub-batch's calls have ended; True: the student has finished it, False: never began."""
        names = sub_batch.all_teacher_calls
        leaders: Refs = {ref: names[ref] for teacher in sub_batch.leaders for ref in teacher}
        while True:
            try:
                if any(isinstance(outcome, BaseException) for outcome in self._outcomes(leaders, progress.what)):
                    return False  # Ray does not run a call whose arguments failed
                outcomes = self._outcomes(sub_batch.student_calls, progress.what)
                if any(isinstance(outcome, BaseException) for outcome in outcomes):
                    raise error
                return not any(isinstance(outcome, Retryable) for outcome in outcomes)
            except Overdue as late:  # ends teachers that die or hang meanwhile, each of which may leave others waiting
                self._recovery.find_dead(late, progress.what)

    def _outcomes(self, calls: Refs, what: str) -> list[Any]:
        """Waits until all calls have ended, and returns each one's result or Ray's error (not raised), in order."""
        timeout_s = self._config.ray.step_timeout_s
        return each(self._calls.outcomes(calls, what=what, timeout_s=timeout_s).values())


@dataclass
class CaptureGroup(_Group):
    """The teachers of a capture, called as one: they store what they compute, and no student reads it.

    Recovers from the deaths of teachers on the way.
    """

    _teachers: Teachers

    @property
    def restarts(self) -> int:
        """Teachers that were replaced. What one had not written when it died is not in the store."""
        return self._recovery.restarts

    def capture(self, batch: PendingBatch) -> tuple[BatchInfo, Sequence[TeacherStats]]:
        """Waits until a batch is aligned and all teachers have stored its targets, or will with their next shard.

        Returns:
            What the batch holds, and what every replica of every teacher measured, by sub-batch.

        Raises:
            DistillError: a worker failed and cannot be recovered from.
        """
        what = f"the capture of batch {batch.documents.index + 1}"
        info = self._pipeline.settle(batch)
        running: deque[SubBatch] = deque()
        stats: list[TeacherStats] = []
        for sub_batch in batch.sub_batches:
            while sub_batch.state is State.QUEUED:  # others are running: finishing the first gives room for this one
                stats += self._finish(running.popleft(), what)
            running.append(sub_batch)
        while running:
            stats += self._finish(running.popleft(), what)
        return info, stats

    def finish(self) -> int:
        """Makes all teachers write what is waiting, and returns the bytes that they have written since the start.

        A teacher that dies meanwhile is replaced; what it had not written is then missing (`restarts`).

        Raises:
            DistillError: a teacher failed and cannot be recovered from, or cannot write.
        """

        def calls() -> Refs:
            return {call: name for _, group in self._teachers for call, name in group.submit("finish_store").items()}

        return sum(self._returned(calls, "writing the last targets").values())

    def _finish(self, sub_batch: SubBatch, what: str) -> list[TeacherStats]:
        """Waits for the teachers' calls on a sub-batch, and frees its slots."""
        returned = self._returned(lambda: sub_batch.all_teacher_calls, what)
        stats = [returned[ref] for teacher in sub_batch.leaders for ref in teacher]
        sub_batch.call_student({})
        sub_batch.finish()
        self._pipeline.finish(sub_batch)
        return stats

    def _returned(self, make_calls: Callable[[], Refs], what: str) -> dict[ray.ObjectRef, Any]:
        """The result of each call; makes the calls again after it has replaced teachers that died."""
        while True:
            calls = make_calls()
            try:
                return dict(zip(calls, self._gather(calls, what)))
            except DistillError as error:
                self._recovery.find_dead(error, what)
                self._recovery.replace_dead()


# A step's metrics about alignment, teachers and transport, computed from what the workers returned.


def describe_transport(
    config: Config,
    stats: Sequence[Sequence[Sequence[TeacherStats]]],
    occupancy: Mapping[str, float],
    lost: Collection[str] = (),
) -> dict[str, Metric]:
    """Returns the metrics of one batch about the transport and the teachers' times, by name; empty without teachers.

    These are bytes, bytes per position of the rows (padding included), the share of tokens whose targets came from a
    store (where teachers have one), and by teacher the use of its ring and the
    seconds of `forward` and `publish` of its slowest replica, and the peak memory of its largest, in GiB.

    Args:
        stats: what was measured, by sub-batch, running teacher and replica.
        occupancy: by teacher, the largest share of its ring in use.
        lost: teachers that the run continues without; they get no metrics.
    """
    teachers = config.running_teachers
    if not teachers:
        return {}
    flat = [replica for sub_batch in stats for teacher in sub_batch for replica in teacher]
    num_bytes = sum(replica.num_bytes for replica in flat)
    positions = sum(replica.num_positions for replica in flat)
    metrics = {
        "transport/bytes": Metric(float(num_bytes), "sum"),
        "transport/bytes_per_token": Metric(num_bytes / max(positions, 1), "mean", positions),
    }
    if looked_up := sum(replica.tokens_read + replica.tokens_computed for replica in flat):
        read = sum(replica.tokens_read for replica in flat)
        metrics["store/read"] = Metric(read / looked_up, "mean", looked_up)
    for t, teacher in enumerate(teachers):
        if teacher.name in lost:
            continue
        suffix = f"/{teacher.name}" if len(teachers) > 1 else ""
        metrics[f"transport/slot_occupancy{suffix}"] = Metric(occupancy[teacher.name], "max")
        # A replica's time is the sum over its sub-batches; a teacher's time is that of its slowest replica.
        replicas = list(zip(*(sub_batch[t] for sub_batch in stats)))
        forward_s = max(sum(call.forward_s for call in replica) for replica in replicas)
        publish_s = max(sum(call.publish_s for call in replica) for replica in replicas)
        metrics[f"timing/{teacher.name}/forward"] = Metric(forward_s, "per_step")
        metrics[f"timing/{teacher.name}/publish"] = Metric(publish_s, "per_step")
        metrics[f"memory/{teacher.name}"] = Metric(max(c.peak_gib for replica in replicas for c in replica), "max")
    return metrics


def describe_alignment(info: BatchInfo, queue: int = 0) -> dict[str, Metric]:
    """Returns the metrics of one batch about its alignment, by name.

    These are counts of documents, of those truncated, split, incompletely rendered, left out and without labels, of tokens and
    rows, the shares of positions that hold a token and of tokens with a label, the queue, seconds, the aligner's peak
    memory in GiB, and per teacher with another tokenizer those about its chunks.

    Args:
        queue: batches that the aligners had not finished when the student was ready for this one.
    """
    metrics = {
        "align/documents": Metric(info.num_documents, "sum"),
        "align/truncated": Metric(info.num_truncated, "sum"),
        "align/split": Metric(info.num_split, "sum"),
        "align/unlabelled": Metric(info.num_unlabelled, "sum"),
        "align/tokens": Metric(info.num_tokens, "sum"),
        "align/rows": Metric(info.num_rows, "sum"),
        "align/bad_rows": Metric(info.num_left_out, "sum"),
        "align/efficiency": Metric(info.num_tokens / max(info.num_positions, 1), "mean", info.num_positions),
        "align/labelled": Metric(info.num_labels / max(info.num_tokens, 1), "mean", info.num_tokens),
        "align/queue": Metric(queue, "max"),
        "timing/aligner/align": Metric(info.seconds, "per_step"),
        "memory/aligner": Metric(info.peak_gib, "max"),
    }
    if info.num_not_stored:
        metrics["align/not_stored"] = Metric(info.num_not_stored, "sum")
    if info.num_incomplete:
        metrics["align/incomplete"] = Metric(info.num_incomplete, "sum")
    for alignment in info.alignments:
        suffix = f"/{alignment.teacher}" if len(info.alignments) > 1 else ""
        metrics |= _describe_pair(alignment, info.num_labels, suffix)
    return metrics


def _describe_pair(alignment: AlignmentInfo, num_labels: int, suffix: str) -> dict[str, Metric]:
    """Returns the metrics about the chunks of one teacher with another tokenizer, by name."""
    # These are their number, the shares of one-to-one chunks, of labels covered and of documents aligned exactly, and
    # documents by alignment method.
    chunks, documents = alignment.num_chunks, sum(alignment.methods.values())
    num_labels = num_labels if alignment.num_labels is None else alignment.num_labels
    metrics = {
        f"align/chunks{suffix}": Metric(chunks, "sum"),
        f"align/one_to_one{suffix}": Metric(alignment.num_one_to_one / max(chunks, 1), "mean", chunks),
        f"align/coverage{suffix}": Metric(alignment.num_covered / max(num_labels, 1), "mean", num_labels),
        f"align/exact{suffix}": Metric(alignment.num_exact / max(documents, 1), "mean", documents),
    }
    for method, count in sorted(alignment.methods.items()):
        metrics[f"align/method/{method}{suffix}"] = Metric(count, "sum")
    return metrics
