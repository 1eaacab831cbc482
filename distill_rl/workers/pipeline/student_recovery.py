"""Starts the student again after one of its ranks has died or hangs, within a budget.

All ranks are replaced together, because they form one process group. The teachers are kept, and so are the aligners and the
evaluator. What the new ranks know is that of the models' files: the caller loads a checkpoint next, and submits again what comes
after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from distill_rl.config.schema import Config
from distill_rl.errors import DistillError
from distill_rl.observe.log import say
from distill_rl.observe.metrics import Metric
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.process_monitor import keep_logs
from distill_rl.workers.pipeline.connect import Connector
from distill_rl.workers.pipeline.pipeline import Pipeline
from distill_rl.workers.pipeline.teacher_recovery import TeacherRecovery, without_remedy


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

    def restart(self, error: DistillError, what: str) -> None:
        """Starts the student again after a call has failed with `error`, and opens all rings anew.

        The caller must have released all batches. Teachers that are dead, too, are replaced. Prints each restart; one that fails is
        repeated while the budget lasts.

        Args:
            what: what was being done, for messages.

        Raises:
            DistillError: `error`, if no rank of the student is dead or late, or the budget `faults.student_restarts` is spent;
                otherwise what a restart failed with, if the user has to fix it or a teacher cannot be replaced.
        """
        names = set(self._group.names)
        budget = self._config.faults.student_restarts
        while error.exit_code != 2 and self._restarts < budget:
            lost = self._calls.lost(error, names, what)
            if not lost.keys() & names:
                raise error
            cause = next(lost[name] for name in self._group.names if name in lost)
            self._restarts += 1
            say(
                f"restarting the student ({self._restarts} of faults.student_restarts={budget}): {without_remedy(cause)}"
            )
            try:
                return self._start()
            except DistillError as failure:
                error = failure
        raise error

    def _start(self) -> None:
        """Replaces all ranks, and dead teachers, and waits until they have loaded their models and opened the rings.

        Raises:
            DistillError: any of this fails, or takes longer than `ray.start_timeout_s`.
        """
        timeout_s, size = self._config.ray.start_timeout_s, len(self._group.actors)
        self._pipeline.abandon()
        if self._calls.monitor is not None:
            self._calls.monitor.dump_stacks()
            keep_logs(self._group.processes, self._calls.monitor.folder)
        self._group.renew(range(size), timeout_s)
        started = self._group.start(size=size, timeout_s=timeout_s)
        self._calls.gather(started, what="loading the student again", timeout_s=timeout_s)
        self._teachers.note_dead(self._calls.dead())
        self._teachers.replace_dead()
        self._connector.connect(self._pipeline.lost)
