"""Starts the student again after one of its ranks has died or hangs, within a budget.

All ranks are replaced together, because they form one process group. The teachers are kept, and so are the aligners and the
evaluator. The new ranks have the weights of the model's files until a checkpoint is loaded; the caller then submits again what comes
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from distill_rl.config.schema import Config
from distill_rl.errors import DistillError, WorkerError
from distill_rl.observe.log import say
from distill_rl.observe.metrics import Metric
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.hosts import HostLost
from distill_rl.workers.cluster.process_monitor import keep_logs
from distill_rl.workers.pipeline.connect import Connector
from distill_rl.workers.pipeline.pipeline import Pipeline
from distill_rl.workers.pipeline.teacher_recovery import TeacherRecovery, without_remedy

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
