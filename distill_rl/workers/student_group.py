"""The student's ranks, called as one."""

from __future__ import annotations

from collections import deque
from typing import Any

import ray

from distill_rl.config.schema import Config
from distill_rl.observe.metrics import Metric, merge
from distill_rl.observe.timing import StepTimer
from distill_rl.workers.calls import Calls
from distill_rl.workers.describe import describe_alignment, describe_transport
from distill_rl.workers.group import WorkerGroup
from distill_rl.workers.pipeline import PendingBatch, Pipeline, Refs, Wave
from distill_rl.workers.teacher import Taught


class StudentGroup:
    def __init__(self, group: WorkerGroup, config: Config, calls: Calls, timer: StepTimer, pipeline: Pipeline):
        self._group, self._config, self._calls, self._timer, self._pipeline = group, config, calls, timer, pipeline

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
        stage in turn; `parts` are the names under which the waits are timed. The student is called only with a batch
        that exists, so that no fault before it can reach its state."""
        with self._timer.part(parts[0]):
            info = self._pipeline.settle(batch)
        running: deque[tuple[Wave, Refs]] = deque()
        taught: list[list[list[Taught]]] = []
        trained: list[dict[str, Metric]] = []
        for wave in waves:
            while not wave.taught:  # the rings are full: what the student reads now must end first
                self._finish(*running.popleft(), what, parts, taught, trained)
            running.append((wave, self._call(method, wave, last=wave is waves[-1])))
        while running:
            self._finish(*running.popleft(), what, parts, taught, trained)
        batch.metrics = merge(
            [describe_alignment(info), describe_transport(self._config, taught, self._pipeline.occupancy())]
        )
        return merge(trained)

    def _call(self, method: str, wave: Wave, *, last: bool) -> Refs:
        tp = self._config.student.parallel.tp
        sizes = [len(teacher) for teacher in wave.published]
        published = [ref for teacher in wave.published for ref in teacher]
        calls: Refs = {}
        for rank in range(len(self._group.actors)):
            arguments = (wave.student[rank // tp], wave.index, last, sizes, *published)
            calls |= self._group.submit(method, *arguments, ranks=[rank])
        return calls

    def _finish(
        self,
        wave: Wave,
        calls: Refs,
        what: str,
        parts: tuple[str, str, str],
        taught: list[list[list[Taught]]],
        trained: list[dict[str, Metric]],
    ) -> None:
        """Waits for the teachers of a wave, then for the student; adds what they return to `taught` and `trained`."""
        with self._timer.part(parts[1]):
            watched = {ref: name for calls in (*wave.published, wave.others) for ref, name in calls.items()}
            results = dict(zip(watched, self._gather(watched, f"teaching the batch of {what}")))
            # Not what was published: its handles would keep the objects of all waves alive.
            taught.append([[results[ref].measured for ref in teacher] for teacher in wave.published])
            results.clear()
        with self._timer.part(parts[2]):
            trained += self._gather(calls, what)
        self._pipeline.finish(wave)

    def _gather(self, calls: dict[ray.ObjectRef, str], what: str) -> list[Any]:
        return self._calls.gather(calls, what=what, timeout_s=self._config.ray.step_timeout_s)
