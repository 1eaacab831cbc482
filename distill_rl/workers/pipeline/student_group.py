"""The student's ranks, called as one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distill_rl.config.schema import Config
from distill_rl.errors import DistillError, WorkerError
from distill_rl.observe.log import say
from distill_rl.observe.metrics import Metric, merge
from distill_rl.observe.timing import StepTimer
from distill_rl.workers.actors.student import Retryable
from distill_rl.workers.actors.teacher import TeacherStats
from distill_rl.workers.cluster.calls import Calls, Overdue, Refs
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.hosts import HostLost
from distill_rl.workers.cluster.process_monitor import keep_logs
from distill_rl.workers.cluster.relay import each
from distill_rl.workers.pipeline.connect import Connector
from distill_rl.workers.pipeline.pipeline import Pipeline
from distill_rl.workers.pipeline.step_metrics import describe_alignment, describe_transport
from distill_rl.workers.pipeline.sub_batch import PendingBatch, State, SubBatch
from distill_rl.workers.pipeline.teacher_recovery import TeacherRecovery, without_remedy


@dataclass
class _Progress:
    """One batch on its way through the student, in training or in validation."""

    method: str
    """Of StudentWorker."""
    what: str
    """For messages."""
    timers: tuple[str, str, str]
    """Names under which the waits for the aligner, the teachers and the student are timed."""
    last: SubBatch | None = None
    """The batch's last sub-batch, known once it is aligned."""
    running: deque[SubBatch] = field(default_factory=deque)
    """TRAINING: the student has been called and not yet waited for."""
    teacher_stats: list[list[list[TeacherStats]]] = field(default_factory=list)
    results: list[dict[str, Metric]] = field(default_factory=list)


@dataclass
class StudentGroup:
    """The student's ranks, called as one. Recovers from the deaths of teachers on the way."""

    _group: WorkerGroup
    _config: Config
    _calls: Calls
    _timer: StepTimer
    _pipeline: Pipeline
    _recovery: TeacherRecovery
    is_within_step: bool = False
    """Whether the ranks may be somewhere in a step, so that their state is none to save."""

    def train_step(self, batch: PendingBatch) -> dict[str, Metric]:
        """Trains the student on a batch, in one optimizer step, and waits for all that this needs.

        Dead teachers are recovered from on the way. `batch.metrics` is set to the metrics of alignment, transport and
        faults.

        Returns:
            The student's metrics, merged over ranks and sub-batches.

        Raises:
            DistillError: a worker failed and cannot be recovered from.
        """
        step = f"step {batch.documents.index + 1}"
        return self._run(_Progress("train", step, ("wait_aligner", "wait_teachers", "student")), batch)

    def evaluate(self, batch: PendingBatch) -> dict[str, Metric]:
        """Returns the validation losses of one batch, without training on it; otherwise like `train_step`."""
        what = f"validation batch {batch.documents.index}"
        return self._run(_Progress("evaluate", what, ("validation",) * 3), batch)

    def collective(self, method: str, *arguments: object, what: str) -> list[Any]:
        """Calls a method in which all ranks take part (save, load, export), and waits for it.

        Waits `ray.step_timeout_s` at most.

        Returns:
            The results in rank order.

        Raises:
            DistillError: a rank failed, died or is late.
        """
        return self._gather(self._group.submit(method, *arguments), what)

    def _run(self, progress: _Progress, batch: PendingBatch) -> dict[str, Metric]:
        """Waits for a batch's alignment, calls the student on every sub-batch as its teachers are called, and waits."""
        # The student is called only after the alignment is known to exist: no earlier fault can reach its state. Sets
        # `batch.metrics`.
        queue = self._pipeline.aligners.queue
        with self._timer.part(progress.timers[0]):
            info = self._pipeline.settle(batch)
        progress.last = batch.sub_batches[-1]
        self.is_within_step = progress.method == "train"
        with self._calls.hosts.finishing():
            for sub_batch in batch.sub_batches:
                while sub_batch.state is State.QUEUED:  # the rings are full: finishing a running one frees its slots
                    self._finish_first(progress)
                self._call_student(progress, sub_batch)
                progress.running.append(sub_batch)
            while progress.running:
                self._finish_first(progress)
        self.is_within_step = False
        transport = describe_transport(
            self._config, progress.teacher_stats, self._pipeline.occupancy(), self._pipeline.lost
        )
        batch.metrics = merge([describe_alignment(info, queue), transport, self._recovery.counts()])
        return merge(progress.results)

    def _call_student(self, progress: _Progress, sub_batch: SubBatch) -> None:
        """Calls every rank with its rows and the targets that all teachers publish, without waiting."""
        # Ray starts each call once its targets exist. The sub-batch is then TRAINING, with these calls in place of
        # earlier ones.
        per_row, published = self._config.student.parallel.ranks_per_row, sub_batch.published
        sizes = [len(teacher) for teacher in published]
        targets = self._group.collect([ref for teacher in published for ref in teacher])
        ranks, is_last = range(len(self._group.actors)), sub_batch is progress.last
        rows = [sub_batch.student[rank // per_row] for rank in ranks]
        calls = self._group.submit_each(progress.method, rows, sub_batch.index, is_last, sizes, *targets, ranks=ranks)
        sub_batch.call_student(calls)

    def _finish_first(self, progress: _Progress) -> None:
        """Waits for the oldest running sub-batch, collects its results in `progress`, and frees its slots."""
        # Recovers from teachers' deaths, as often as the budget allows.
        sub_batch = progress.running[0]
        while True:
            try:
                stats, results = self._wait(progress, sub_batch)
                break
            except DistillError as error:
                self._recover(progress, error)
        if sub_batch.state is State.TRAINING:
            sub_batch.finish()
        progress.running.popleft()
        progress.teacher_stats.append(stats)
        progress.results += results
        self._pipeline.finish(sub_batch)

    def _wait(
        self, progress: _Progress, sub_batch: SubBatch
    ) -> tuple[list[list[TeacherStats]], list[dict[str, Metric]]]:
        """Waits for the teachers' and then the student's calls of a sub-batch, timing both."""
        calls = sub_batch.all_teacher_calls
        with self._timer.part(progress.timers[1]):
            returned = dict(zip(calls, self._gather(calls, f"the teachers' forward of {progress.what}")))
            stats = [[returned[ref] for ref in teacher] for teacher in sub_batch.leaders]
        with self._timer.part(progress.timers[2]):
            results = self._gather(sub_batch.student_calls, progress.what)
        for result in results:
            if isinstance(result, Retryable):
                raise WorkerError("the student", f"{progress.what} must reach its targets", result.reason)
        return stats, results

    def _recover(self, progress: _Progress, error: DistillError) -> None:
        """Replaces dead teachers or gives one up, and calls the student again on sub-batches that it could not begin."""
        # Sub-batches that the student has finished are marked DONE.
        with self._timer.part("recovery"):
            self._recovery.find_dead(error, progress.what)
            for sub_batch in progress.running:
                if sub_batch.state is State.TRAINING and self._find_whether_done(progress, sub_batch, error):
                    sub_batch.finish()
            self._recovery.replace_dead()
            for sub_batch in progress.running:
                if sub_batch.state is State.TRAINING:
                    self._call_student(progress, sub_batch)

    def _find_whether_done(self, progress: _Progress, sub_batch: SubBatch, error: DistillError) -> bool:
        """Like `_is_done`, and ends teachers that die or hang meanwhile, each of which may leave others waiting."""
        while True:
            try:
                return self._is_done(progress, sub_batch, error)
            except Overdue as late:
                self._recovery.find_dead(late, progress.what)

    def _is_done(self, progress: _Progress, sub_batch: SubBatch, error: DistillError) -> bool:
        """Waits until a sub-batch's calls have ended; True: the student has finished it, False: never began."""
        names = sub_batch.all_teacher_calls
        leaders: Refs = {ref: names[ref] for teacher in sub_batch.leaders for ref in teacher}
        if any(isinstance(outcome, BaseException) for outcome in self._outcomes(leaders, progress.what)):
            return False  # Ray does not run a call whose arguments failed
        outcomes = self._outcomes(sub_batch.student_calls, progress.what)
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            raise error
        return not any(isinstance(outcome, Retryable) for outcome in outcomes)

    def _outcomes(self, calls: Refs, what: str) -> list[Any]:
        """Waits until all calls have ended, and returns each one's result or Ray's error (not raised), in order."""
        timeout_s = self._config.ray.step_timeout_s
        return each(self._calls.outcomes(calls, what=what, timeout_s=timeout_s).values())

    def _gather(self, calls: Refs, what: str) -> list[Any]:
        """Waits for calls while the pipeline goes on with later batches, and returns their results in order."""
        timeout_s, pipeline = self._config.ray.step_timeout_s, self._pipeline
        return self._calls.gather(
            calls, what=what, timeout_s=timeout_s, meanwhile=pipeline.advance, also=pipeline.awaited
        )


# Starts the student again after one of its ranks has died or hangs, within a budget.

Loaded = TypeVar("Loaded")


@dataclass
class StudentRecovery:
    """Replaces the student's ranks; see the top of this module."""

    _config: Config
    _group: WorkerGroup
    _calls: Calls
    _connector: Connector
    _pipeline: Pipeline
    _teachers: TeacherRecovery
    _restarts: int = 0

    def counts(self) -> dict[str, Metric]:
        """Returns the metric of restarts since this start of the run; empty if there were none."""
        return {"faults/student_restarts": Metric(float(self._restarts), "last")} if self._restarts else {}

    def lost(self, error: DistillError, what: str) -> dict[str, DistillError]:
        """Returns which actors are lost after a call has failed with `error`, ranks of the student among them.

        Args:
            what: what was being done, for messages.

        Raises:
            DistillError: `error`, if no rank of the student is dead or late, or none may be restarted any more.
        """
        if not isinstance(error, WorkerError) or self._restarts >= self._config.faults.student_restarts:
            raise error
        lost = self._calls.lost(error, self._group.names, what)
        if not lost.keys() & set(self._group.names):
            raise error
        return lost

    def restart(self, lost: Mapping[str, DistillError], load: Callable[[], Loaded]) -> Loaded:
        """Starts the student again, opens all rings anew, and returns what `load` does.

        The caller must have released all batches. Teachers that are lost, too, are replaced. Prints each restart; one that fails
        because an actor died or did not answer is repeated while the budget lasts.

        Args:
            lost: why each lost actor is lost, by name.
            load: makes the new ranks those of a checkpoint.

        Raises:
            DistillError: what a restart failed with, if it may not be repeated.
        """
        budget = self._config.faults.student_restarts
        while True:
            self._restarts += 1
            names = [name for name in self._group.names if name in lost] or sorted(lost)
            cause = without_remedy(lost[names[0]])
            say(f"restarting the student ({self._restarts} of faults.student_restarts={budget}): {cause}")
            try:
                self._start(lost)
                return load()
            except WorkerError as failure:
                lost = self._calls.lost(failure, self._calls.names.values(), "the restart")
                if not lost or self._restarts >= budget or isinstance(failure, HostLost):
                    raise

    def _start(self, lost: Mapping[str, DistillError]) -> None:
        """Replaces all ranks and the lost teachers, and waits until they have loaded their models and opened the rings."""
        ray, size = self._config.ray, len(self._group.actors)
        self._pipeline.abandon()
        if self._calls.monitor is not None:
            self._calls.monitor.dump_stacks(self._group.names)
            keep_logs(self._group.processes, self._calls.monitor.folder)
        self._group.renew(range(size), ray.start_timeout_s)
        started = self._group.start(size=size, timeout_s=ray.start_timeout_s)
        self._calls.gather(started, what="loading the student again", timeout_s=ray.start_timeout_s)
        self._teachers.note_dead({**lost, **self._calls.dead()})
        self._teachers.replace_dead()
        self._teachers.settle(ray.step_timeout_s)
        self._connector.connect(self._pipeline.lost)
