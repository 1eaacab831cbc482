"""Restarts teachers that die, within a budget. If that fails, the run ends or continues without the teacher.

A replica is replaced as a whole, because its ranks form one process group. The replacement gets a new ring and is
called on every sub-batch that the student is not done with, in the original order. Weights and rows are the same, so
its targets are too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import DistillError, WorkerError
from distill_rl.observe.log import say
from distill_rl.observe.metrics import Metric
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.hosts import HostLost
from distill_rl.workers.pipeline.connect import Connector
from distill_rl.workers.pipeline.pipeline import Pipeline
from distill_rl.workers.pipeline.sub_batch import Teachers

log = logging.getLogger(__name__)


@dataclass
class TeacherRecovery:
    """Finds dead teachers and replaces them, or gives them up; see the top of this module."""

    _config: Config
    _teachers: Teachers
    _student: AbstractSet[str]
    """Names of the student's ranks; the death of one of them cannot be recovered from here."""
    _calls: Calls
    _connector: Connector | None
    """None: nobody reads what the teachers publish."""
    _pipeline: Pipeline
    _restarts: int = 0
    _dead: list[tuple[TeacherConfig, WorkerGroup, range, DistillError]] = field(default_factory=list)
    """Replicas with a dead rank, each with its ranks and why it died."""

    @property
    def restarts(self) -> int:
        """Number of teachers' replicas that were replaced."""
        return self._restarts

    def counts(self) -> dict[str, Metric]:
        """Returns the metrics of restarts and losses since this start of the run; those that are 0 are left out.

        Logs a warning if teachers have been lost.
        """
        counts = {
            "faults/teacher_restarts": self._restarts,
            "faults/teachers_lost": len(self._pipeline.lost),
            "faults/aligner_restarts": self._pipeline.aligners.restarts,
        }
        if self._pipeline.lost:
            log.warning("lost, and without targets from now on: %s", ", ".join(sorted(self._pipeline.lost)))
        return {name: Metric(float(count), "last") for name, count in counts.items() if count}

    def find_dead(self, error: DistillError, what: str) -> None:
        """Finds the teacher replicas with a dead rank after a call has failed with `error`, and ends their other ranks.

        Waits a few seconds for a death to become known. An overdue teacher counts as dead. `replace_dead` must follow.

        Args:
            what: what was being done, for messages.

        Raises:
            DistillError: `error`, if the user has to fix its cause, no teacher is dead, or a rank of the student is
                dead too.
        """
        teacher_ranks = {name for _, group in self._teachers for name in group.names}
        if error.exit_code == 2 or not teacher_ranks:  # the user has to fix the cause, or there is nothing to recover
            raise error
        lost = self._calls.lost(error, teacher_ranks | self._student, what)
        if not lost.keys() & teacher_ranks or lost.keys() & self._student:
            raise error
        self.note_dead(lost)

    def note_dead(self, lost: Mapping[str, DistillError]) -> None:
        """Ends what is left of the replicas that have a rank among `lost`, for `replace_dead` to replace them.

        Args:
            lost: why each actor is lost, by name; those of other groups are passed over.
        """
        self._dead = [
            (teacher, group, ranks, next(lost[group.names[rank]] for rank in ranks if group.names[rank] in lost))
            for teacher, group in self._teachers
            for ranks in _replicas(teacher)
            if lost.keys() & {group.names[rank] for rank in ranks}
        ]
        for _, group, ranks, _ in self._dead:
            for rank in ranks:
                group.end(rank)  # the survivors would wait for the dead rank, and the student for them

    def replace_dead(self) -> None:
        """Replaces the replicas that `find_dead` has noted, or gives their teacher up.

        Replacements are called again on the open sub-batches.

        Raises:
            WorkerError: the budget `faults.teacher_restarts` is spent, and `faults.lost_teacher` is `fail` or no other
                teacher with a weight is left.
            DistillError: a replacement failed for a cause that the user has to fix, or because the student died.
        """
        for teacher, group, ranks, cause in self._dead:
            if teacher.name not in self._pipeline.lost:
                self._replace(teacher, group, ranks, cause)

    def settle(self, timeout_s: float) -> None:
        """Waits until the teachers have ended all calls that were made so far.

        Raises:
            DistillError: one dies, or takes longer than `timeout_s` seconds.
        """
        for teacher, group in self._teachers:
            if teacher.name not in self._pipeline.lost:
                group.settle(timeout_s)

    def _replace(self, teacher: TeacherConfig, group: WorkerGroup, ranks: range, cause: DistillError) -> None:
        """Starts a replica again and resubmits its calls; gives its teacher up if the budget of restarts is spent."""
        # Prints each restart. A restart that fails is repeated while the budget lasts.
        while self._restarts < self._config.faults.teacher_restarts:
            self._restarts += 1
            budget = f"{self._restarts} of faults.teacher_restarts={self._config.faults.teacher_restarts}"
            say(f"restarting {', '.join(group.names[rank] for rank in ranks)} ({budget}): {without_remedy(cause)}")
            try:
                self._start(teacher, group, ranks)
            except DistillError as failure:
                if failure.exit_code == 2 or self._calls.hosts.lost or self._student & set(self._calls.dead()):
                    raise
                cause = failure
                if isinstance(failure, HostLost):  # no node has room
                    break
                continue
            self._pipeline.resubmit(teacher.name, ranks[0] // len(ranks))
            return
        self._give_up(teacher, group, cause)

    def _start(self, teacher: TeacherConfig, group: WorkerGroup, ranks: Sequence[int]) -> None:
        """Replaces the actors of a replica, waits until they have loaded the model, and opens their ring."""
        timeout_s = self._config.ray.start_timeout_s
        group.renew(ranks, timeout_s)
        started = group.start(size=teacher.ranks_per_replica, timeout_s=timeout_s, ranks=ranks)
        self._calls.gather(started, what=f"loading {teacher.name} again", timeout_s=timeout_s)
        if self._connector is not None:
            self._connector.reconnect(teacher, group, ranks[0])

    def _give_up(self, teacher: TeacherConfig, group: WorkerGroup, cause: DistillError) -> None:
        """Kills all ranks of a teacher and makes the run continue without it, the others' weights scaled up."""
        gone = {*self._pipeline.lost, teacher.name}
        left = [other.name for other, _ in self._teachers if other.name not in gone and other.weight > 0]
        if self._config.faults.lost_teacher == "fail" or not left:
            remedies = ["raise faults.teacher_restarts, or fix what kills it", self._calls.after_death]
            if left and self._connector is not None:  # a capture needs all its teachers
                remedies.append("or set faults.lost_teacher=drop_and_reweight to go on without it")
            remedy = "; ".join(filter(None, remedies))
            rule = f"may be started again faults.teacher_restarts={self._config.faults.teacher_restarts} times"
            raise WorkerError(f"teacher {teacher.name}", rule, without_remedy(cause), remedy) from cause
        group.kill()
        for actor in group.actors:
            self._calls.forget(actor)
        self._pipeline.lose(teacher.name)
        say(f"lost      teacher {teacher.name}; going on with {', '.join(left)}, whose weights are scaled up")


def _replicas(teacher: TeacherConfig) -> list[range]:
    """Returns the ranks of each replica of a teacher, in its group's order."""
    size = teacher.ranks_per_replica
    return [range(replica * size, (replica + 1) * size) for replica in range(teacher.parallel.dp)]


def without_remedy(error: DistillError) -> str:
    """The error's message without its remedy."""
    return str(DistillError(error.what, error.rule, error.value))
