"""The student's ranks, called as one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from distill_rl.config.schema import Config
from distill_rl.errors import DistillError, WorkerError
from distill_rl.observe.metrics import Metric, merge
from distill_rl.observe.timing import StepTimer
from distill_rl.workers.actors.student import NotRun
from distill_rl.workers.actors.teacher import Taught
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.pipeline.pipeline import PendingBatch, Pipeline, Refs, Wave
from distill_rl.workers.pipeline.step_metrics import describe_alignment, describe_transport
from distill_rl.workers.pipeline.teacher_recovery import Repair


@dataclass
class _Pass:
    """One batch's way through the student.

    `parts` are the names under which the waits for the aligner, the teachers and the student are timed.
    """

    method: str
    what: str
    parts: tuple[str, str, str]
    last: Wave
    running: deque[Wave] = field(default_factory=deque)
    """called, and not yet waited for"""
    taught: list[list[list[Taught]]] = field(default_factory=list)
    results: list[dict[str, Metric]] = field(default_factory=list)


class StudentGroup:
    def __init__(
        self,
        group: WorkerGroup,
        config: Config,
        calls: Calls,
        timer: StepTimer,
        pipeline: Pipeline,
        repair: Repair,
    ):
        self._group, self._config, self._calls, self._timer = group, config, calls, timer
        self._pipeline, self._repair = pipeline, repair

    def train_step(self, batch: PendingBatch, waves: list[Wave]) -> dict[str, Metric]:
        """forward_backward of every wave and optim_step, submitted together."""
        return self._run("train", batch, waves, f"step {batch.index + 1}", ("wait_aligner", "wait_teachers", "student"))

    def evaluate(self, batch: PendingBatch, waves: list[Wave]) -> dict[str, Metric]:
        return self._run("evaluate", batch, waves, f"validation batch {batch.index}", ("validation",) * 3)

    def collective(self, method: str, *arguments: object, what: str) -> list[Any]:
        """Calls a method in which all ranks take part: save, load, export. What they return, in rank order."""
        return self._group.call(method, *arguments, what=what, timeout_s=self._config.ray.step_timeout_s)

    def _run(
        self, method: str, batch: PendingBatch, waves: list[Wave], what: str, parts: tuple[str, str, str]
    ) -> dict[str, Metric]:
        """Waits for the alignment, submits to all ranks as far as the teachers have been called, then waits for each
        stage in turn. The student is called only with a batch that exists, so that no fault before it can reach its
        state."""
        queue = self._pipeline.queue
        with self._timer.part(parts[0]):
            info = self._pipeline.settle(batch)
        run = _Pass(method, what, parts, waves[-1])
        for wave in waves:
            while not wave.taught:  # the rings are full: what the student reads now must end first
                self._finish(run)
            self._call(run, wave)
            run.running.append(wave)
        while run.running:
            self._finish(run)
        transport = describe_transport(self._config, run.taught, self._pipeline.occupancy(), self._pipeline.lost)
        batch.metrics = merge([describe_alignment(info, queue), transport, self._repair.counts()])
        return merge(run.results)

    def _call(self, run: _Pass, wave: Wave) -> None:
        tp, published = self._config.student.parallel.tp, wave.published
        sizes = [len(teacher) for teacher in published]
        wave.learning.clear()
        for rank in range(len(self._group.actors)):
            arguments = (wave.student[rank // tp], wave.index, wave is run.last, sizes)
            refs = (ref for teacher in published for ref in teacher)
            wave.learning.update(self._group.submit(run.method, *arguments, *refs, ranks=[rank]))

    def _finish(self, run: _Pass) -> None:
        """Waits for the teachers of the first wave that runs, then for the student; again after what can be mended."""
        wave = run.running[0]
        while True:
            try:
                taught, results = self._wait(run, wave)
                break
            except DistillError as error:
                self._mend(run, error)
        run.running.popleft()
        run.taught.append(taught)
        run.results += results
        self._pipeline.finish(wave)

    def _wait(self, run: _Pass, wave: Wave) -> tuple[list[list[Taught]], list[dict[str, Metric]]]:
        with self._timer.part(run.parts[1]):
            results = dict(zip(wave.teaching, self._gather(wave.teaching, f"teaching the batch of {run.what}")))
            # Not what was published: its handles would keep the objects of all waves alive.
            taught = [[results[ref].measured for ref in teacher] for teacher in wave.published]
            results.clear()
        with self._timer.part(run.parts[2]):
            learnt = self._gather(wave.learning, run.what)
        for result in learnt:
            if isinstance(result, NotRun):
                raise WorkerError("the student", f"{run.what} must reach its targets", result.reason)
        return taught, learnt

    def _mend(self, run: _Pass, error: DistillError) -> None:
        """Has dead teachers replaced, and calls the student again on the waves that it could not begin.

        Raises:
            DistillError: `error`, where nothing can be mended: no teacher is dead, somebody else is, or the student failed
                on its own; or what went wrong in mending.
        """
        with self._timer.part("recovery"):
            self._repair.begin(error)
            for wave in run.running:
                wave.learnt = self._learnt(run, wave, error)
            self._repair.mend(error)
            for wave in run.running:
                if not wave.learnt:
                    self._call(run, wave)

    def _learnt(self, run: _Pass, wave: Wave, error: DistillError) -> bool:
        """Whether the student has done a wave, or not begun it; nothing between the two can be mended."""
        published = {ref: "a teacher" for teacher in wave.published for ref in teacher}
        if any(isinstance(outcome, BaseException) for outcome in self._outcomes(published, run.what)):
            return False  # Ray runs no call whose arguments failed
        outcomes = self._outcomes(wave.learning, run.what)
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            raise error
        return not any(isinstance(outcome, NotRun) for outcome in outcomes)

    def _outcomes(self, calls: Refs, what: str) -> list[Any]:
        timeout_s = self._config.ray.step_timeout_s
        return list(self._calls.outcomes(calls, what=what, timeout_s=timeout_s).values())

    def _gather(self, calls: Refs, what: str) -> list[Any]:
        return self._calls.gather(
            calls, what=what, timeout_s=self._config.ray.step_timeout_s, meanwhile=self._pipeline.look_after
        )
