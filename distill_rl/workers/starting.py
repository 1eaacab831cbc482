"""Waits until the actors of a run have loaded their models, and starts again what dies meanwhile.

The budgets are those of the run (`faults.*_restarts`; an evaluator has as many as the student), and so are the parts
that are replaced together: all ranks of the student, a replica of a teacher, one aligner. What is alive goes on loading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeVar

from distill_rl.config.schema import Config
from distill_rl.errors import WorkerError
from distill_rl.observe.log import say
from distill_rl.workers.cluster.calls import Calls, Overdue, Refs
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.hosts import HostLost
from distill_rl.workers.cluster.relay import DIRECT
from distill_rl.workers.pipeline.sub_batch import Teachers
from distill_rl.workers.pipeline.teacher_recovery import without_remedy

Role = Literal["student", "teacher", "aligner", "evaluator"]
Made = TypeVar("Made")


@dataclass(eq=False)
class _Part:
    """Actors that are started together."""

    role: Role
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
    """See the top of this module.

    Attributes:
        restarts: by role, how often it was started again.
    """

    config: Config
    calls: Calls
    student: WorkerGroup | None
    teachers: Teachers
    aligners: WorkerGroup
    evaluator: WorkerGroup | None
    restarts: Counter[str] = field(default_factory=Counter)
    _are_loaded: bool = False

    def __post_init__(self) -> None:
        self._parts = [_Part("aligner", self.aligners, [rank]) for rank in range(len(self.aligners.actors))]
        for teacher, group in self.teachers:
            size = teacher.ranks_per_replica
            starts = range(0, len(group.actors), size)
            self._parts += [_Part("teacher", group, range(first, first + size)) for first in starts]
        whole: list[tuple[Role, WorkerGroup | None]] = [("student", self.student), ("evaluator", self.evaluator)]
        self._parts += [_Part(role, group, range(len(group.actors))) for role, group in whole if group is not None]
        self._groups = list(dict.fromkeys(part.group for part in self._parts))

    def load(self) -> None:
        """Waits until all actors run, then starts them all at the same time, and waits until the models are loaded.

        Raises:
            DistillError: an actor fails, does not answer within `ray.start_timeout_s`, or dies once more than its budget
                allows.
        """
        self._until_alive(self._identify, "the start")
        self._open_relays()
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
        ranks = [rank for part in parts for rank in part.ranks]
        calls: Refs = {}
        if parts and parts[0].role == "aligner":
            calls = group.submit("start", ranks=ranks)
        elif parts and not (parts[0].role == "evaluator" and len(ranks) == 1):
            size, timeout_s = len(parts[0].ranks), self.config.ray.start_timeout_s
            calls = group.start(size=size, timeout_s=timeout_s, ranks=ranks)
        in_order = iter(calls.items())
        for part in parts:
            part.calls = dict(islice(in_order, len(part.ranks)))

    def _identify(self) -> None:
        for group in self._groups:
            group.identify(self.config.ray.start_timeout_s)

    def _open_relays(self) -> None:
        """Gives the ranks of student and teachers relays, if there are many of them."""
        models = [(group, teacher.ranks_per_replica) for teacher, group in self.teachers]
        if self.student is not None:
            models.append((self.student, len(self.student.actors)))
        relays = self.config.ray.relays
        if relays == "on" or (relays == "auto" and sum(len(group.actors) for group, _ in models) > DIRECT):
            for group, size in models:
                group.open_relays(size)

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
        lost = {} if isinstance(error, Overdue | HostLost) else self.calls.lost(error, self.calls.names.values(), what)
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
