"""What is started again when it dies, each within a budget of the run (`faults.*_restarts`): teachers, the student, and all while they load.

A teacher's replica is replaced as a whole, because its ranks form one process group. The replacement gets a new ring and is
called on every sub-batch that the student is not done with, in the original order. Weights and rows are the same, so
its targets are too. If the budget is spent, the run ends or continues without the teacher.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import DistillError, WorkerError
from distill_rl.observe.log import say
from distill_rl.observe.metrics import Metric
from distill_rl.workers.cluster.calls import Calls, Overdue, Refs
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.hosts import HostLost
from distill_rl.workers.cluster.process_monitor import keep_logs
from distill_rl.workers.cluster.relay import DIRECT
from distill_rl.workers.pipeline.pipeline import Connector, Pipeline
from distill_rl.workers.pipeline.sub_batch import Teachers, replicas_of

Made = TypeVar("Made")

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
    restarts: int = 0
    """Number of teachers' replicas that were replaced."""
    _dead: list[tuple[TeacherConfig, WorkerGroup, range, DistillError]] = field(default_factory=list)
    """Replicas with a dead rank, each with its ranks and why it died."""

    def counts(self) -> dict[str, Metric]:
        """Returns the metrics of restarts and losses since this start of the run; those that are 0 are left out.

        Logs a warning if teachers have been lost.
        """
        counts = {
            "faults/teacher_restarts": self.restarts,
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
            for ranks in replicas_of(teacher)
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
        budget, timeout_s = self._config.faults.teacher_restarts, self._config.ray.start_timeout_s
        while self.restarts < budget:
            self.restarts += 1
            names = ", ".join(group.names[rank] for rank in ranks)
            say(f"restarting {names} ({self.restarts} of faults.teacher_restarts={budget}): {without_remedy(cause)}")
            try:
                group.renew(ranks, timeout_s)
                started = group.start(size=len(ranks), timeout_s=timeout_s, ranks=ranks)
                self._calls.gather(started, what=f"loading {teacher.name} again", timeout_s=timeout_s)
                if self._connector is not None:
                    self._connector.reconnect(teacher, group, ranks[0])
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


def without_remedy(error: DistillError) -> str:
    """The error's message without its remedy."""
    return str(DistillError(error.what, error.rule, error.value))


@dataclass
class StudentRecovery:
    """Starts the student again after one of its ranks has died or hangs: replaces all of them."""

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

    def restart(self, lost: Mapping[str, DistillError], load: Callable[[], Made]) -> Made:
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
                lost = self._calls.lost(failure, self._calls.everyone, "the restart")
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


@dataclass(eq=False)
class _Part:
    """Actors that are started together."""

    role: str
    """`student`, `teacher`, `aligner` or `evaluator`."""
    group: WorkerGroup
    ranks: Sequence[int]
    calls: Refs | None = None
    """Of its start, as long as it is not done; None: not called yet."""
    is_dead: bool = False

    @property
    def names(self) -> list[str]:
        return [self.group.names[rank] for rank in self.ranks]


@dataclass
class Starting:
    """The actors of a run, by role: waits until they have loaded their models, and starts again what dies meanwhile.

    The budgets are those of the run (an evaluator has as many as the student), and so are the parts that are replaced
    together: all ranks of the student, a replica of a teacher, one aligner. What is alive goes on loading.

    Attributes:
        restarts: by role, how often it was started again.
    """

    config: Config
    calls: Calls
    student: WorkerGroup | None
    """None for a capture."""
    teachers: Teachers
    aligners: WorkerGroup
    evaluator: WorkerGroup | None
    restarts: Counter[str] = field(default_factory=Counter)
    _are_loaded: bool = False

    def __post_init__(self) -> None:
        self._parts = [_Part("aligner", self.aligners, [rank]) for rank in range(len(self.aligners.actors))]
        for teacher, group in self.teachers:
            self._parts += [_Part("teacher", group, ranks) for ranks in replicas_of(teacher)]
        for role, whole in ("student", self.student), ("evaluator", self.evaluator):
            if whole is not None:
                self._parts.append(_Part(role, whole, range(len(whole.actors))))
        self._groups = list(dict.fromkeys(part.group for part in self._parts))

    @property
    def groups(self) -> list[WorkerGroup]:
        """All groups of actors."""
        groups = [self.student, *(group for _, group in self.teachers), self.aligners, self.evaluator]
        return [group for group in groups if group is not None]

    def load(self) -> None:
        """Waits until all actors run, then starts them all at the same time, and waits until the models are loaded.

        Raises:
            DistillError: an actor fails, does not answer within `ray.start_timeout_s`, or dies once more than its budget
                allows.
        """

        def identify() -> None:
            for group in self._groups:
                group.identify(self.config.ray.start_timeout_s)

        self._until_alive(identify, "the start")
        # Many ranks of student and teachers have relays.
        models = [(group, teacher.ranks_per_replica) for teacher, group in self.teachers]
        if self.student is not None:
            models.append((self.student, len(self.student.actors)))
        relays = self.config.ray.relays
        if relays == "on" or (relays == "auto" and sum(len(group.actors) for group, _ in models) > DIRECT):
            for group, size in models:
                group.open_relays(size)
        say("loading   the models")
        self.then(lambda: None)

    def then(self, action: Callable[[], Made]) -> Made:
        """Returns what an action on loaded actors returns, once all of them have lived through it.

        It is repeated with a new student: what an old one has opened of a dead teacher would be in the way.

        Raises:
            DistillError: as for `load`, or from the action.
        """

        def loaded() -> Made:
            for group in self._groups:
                self._call(group)
            started: Refs = {call: name for part in self._parts for call, name in (part.calls or {}).items()}
            self.calls.gather(started, what="loading the models", timeout_s=self.config.ray.start_timeout_s)
            for part in self._parts:
                part.calls = {}  # done; references would keep the results for the whole run
            self._are_loaded = True
            return action()

        return self._until_alive(loaded, "loading the models")

    def _call(self, group: WorkerGroup) -> None:
        """Makes the actors of a group that have not been called load their models, if they have any yet."""
        parts = [part for part in self._parts if part.group is group and part.calls is None]
        if not parts:
            return
        role, size, ranks = parts[0].role, len(parts[0].ranks), [rank for part in parts for rank in part.ranks]
        calls: Refs = {}
        if role == "aligner":
            calls = group.submit("start", ranks=ranks)
        elif role != "evaluator" or size > 1:
            calls = group.start(size=size, timeout_s=self.config.ray.start_timeout_s, ranks=ranks)
        in_order = iter(calls.items())
        for part in parts:
            part.calls = dict(islice(in_order, len(part.ranks)))

    def _until_alive(self, action: Callable[[], Made], what: str) -> Made:
        """Repeats an action, each time with new actors in place of those that have died in it."""
        while True:
            try:
                for part in self._parts:
                    if part.is_dead:
                        part.group.renew(part.ranks, self.config.ray.start_timeout_s)
                        part.is_dead, part.calls = False, None
                return action()
            except WorkerError as error:
                self._note_dead(error, what)

    def _note_dead(self, error: WorkerError, what: str) -> None:
        """Finds the parts with a dead actor after a call has failed with `error`, and prints that they start again."""
        lost = {} if isinstance(error, Overdue | HostLost) else self.calls.lost(error, self.calls.everyone, what)
        dead = [part for part in self._parts if lost.keys() & set(part.names)]
        if not dead:
            raise error
        for part in dead:
            cause = next(lost[name] for name in part.names if name in lost)
            setting = f"{'student' if part.role == 'evaluator' else part.role}_restarts"
            budget = getattr(self.config.faults, setting)
            if self.restarts[part.role] >= budget:
                raise cause from error
            self.restarts[part.role] += 1
            part.is_dead = True
            times = f"{self.restarts[part.role]} of faults.{setting}={budget}"
            say(f"restarting {', '.join(part.names)} ({times}): {without_remedy(cause)}")
        for part in self._parts:
            part.is_dead |= self._are_loaded and part.role == "student"
