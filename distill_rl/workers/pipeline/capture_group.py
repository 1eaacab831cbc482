"""The teachers of a capture, called as one: they store what they compute, and no student reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from distill_rl.config.schema import Config
from distill_rl.errors import DistillError
from distill_rl.types import BatchInfo
from distill_rl.workers.actors.teacher import TeacherStats
from distill_rl.workers.cluster.calls import Calls, Refs
from distill_rl.workers.pipeline.pipeline import Pipeline
from distill_rl.workers.pipeline.sub_batch import PendingBatch, State, SubBatch, Teachers
from distill_rl.workers.pipeline.teacher_recovery import TeacherRecovery


@dataclass
class CaptureGroup:
    """Waits for the teachers' calls on a batch, and recovers from the deaths of teachers on the way."""

    _config: Config
    _teachers: Teachers
    _calls: Calls
    _pipeline: Pipeline
    _recovery: TeacherRecovery

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
        what = "writing the last targets"
        while True:
            calls: Refs = {}
            for _, group in self._teachers:
                calls |= group.submit("finish_store")
            try:
                return sum(self._gather(calls, what))
            except DistillError as error:
                self._recovery.find_dead(error, what)
                self._recovery.replace_dead()

    def _finish(self, sub_batch: SubBatch, what: str) -> list[TeacherStats]:
        """Waits for the teachers' calls on a sub-batch, replaces teachers that die, and frees its slots."""
        while True:
            calls = sub_batch.all_teacher_calls
            try:
                returned = dict(zip(calls, self._gather(calls, what)))
                break
            except DistillError as error:
                self._recovery.find_dead(error, what)
                self._recovery.replace_dead()
        stats = [returned[ref] for teacher in sub_batch.leaders for ref in teacher]
        sub_batch.call_student({})
        sub_batch.finish()
        self._pipeline.finish(sub_batch)
        return stats

    def _gather(self, calls: Refs, what: str) -> list:
        """Waits for calls while the pipeline goes on with later batches, and returns their results in order."""
        pipeline = self._pipeline
        timeout_s = self._config.ray.step_timeout_s
        return self._calls.gather(
            calls, what=what, timeout_s=timeout_s, meanwhile=pipeline.advance, also=pipeline.awaited
        )
