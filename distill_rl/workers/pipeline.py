"""Aligner → teachers → student, as chained references: the driver never waits between them.

Ray resolves an argument before a call runs, and runs the calls of a synchronous actor in the order of
submission, so look-ahead needs no threads: a batch is aligned and seen by the teachers while the
student still trains on an earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import ray

from distill_rl.config.schema import Config
from distill_rl.data.collate import BatchPlan
from distill_rl.observe.metrics import Metric, merge
from distill_rl.observe.timing import StepTimer
from distill_rl.types import BatchInfo, Cursor, DocumentBatch
from distill_rl.workers.calls import Calls
from distill_rl.workers.group import WorkerGroup

Refs = dict[ray.ObjectRef, str]


@dataclass
class PendingBatch:
    """A batch on its way: references only. Nothing of it stays alive after `release`."""

    index: int
    cursor: Cursor
    info: Refs
    student: list[ray.ObjectRef]
    targets: list[list[ray.ObjectRef]]
    """per teacher, one per data-parallel replica"""
    others: Refs
    """results of ranks that publish nothing, watched for their errors"""
    names: Refs
    metrics: dict[str, Metric] = field(default_factory=dict)

    @contextmanager
    def lease(self) -> Iterator[tuple[PendingBatch, list[list[ray.ObjectRef]]]]:
        """The batch and its targets for the length of one step; whatever happens, they are released after it."""
        try:
            yield self, self.targets
        finally:
            self.release()

    def release(self) -> None:
        for references in (self.student, *self.targets):
            references.clear()
        for named in (self.info, self.others, self.names):
            named.clear()


class Pipeline:
    """Submits batches to the aligner and the teachers.

    Slots: training batches use a ring of depth + 1 places, in turn; validation batches, never looked
    ahead, use one place more. A batch takes `slots_per_batch` slots of each teacher rank at its place.
    """

    def __init__(
        self, config: Config, aligners: WorkerGroup, teachers: dict[str, WorkerGroup], calls: Calls, plan: BatchPlan
    ):
        self._config, self._aligners, self._teachers, self._calls, self._plan = config, aligners, teachers, calls, plan
        self._running = [teacher for teacher in config.teachers if teacher.name in teachers]
        self._submitted = 0

    def train(self, batch: DocumentBatch) -> PendingBatch:
        return self._submit(batch, place=batch.index % (self._config.prefetch.depth + 1))

    def validate(self, batch: DocumentBatch) -> PendingBatch:
        return self._submit(batch, place=self._config.prefetch.depth + 1)

    def _submit(self, batch: DocumentBatch, *, place: int) -> PendingBatch:
        self._submitted += 1
        generation = 2 * self._submitted
        aligner = batch.index % len(self._aligners.actors)
        dp = self._plan.student.dp
        num_returns = 1 + dp + sum(share.dp for share in self._plan.teachers)
        info, *parts = self._aligners.actors[aligner].build.options(num_returns=num_returns).remote(batch, self._plan)
        teacher_parts = iter(parts[dp:])
        targets: list[list[ray.ObjectRef]] = []
        names: Refs = {info: self._aligners.names[aligner]}
        others: Refs = {}
        for teacher in self._running:
            group, tp = self._teachers[teacher.name], teacher.parallel.tp
            first_slot = place * slots_per_batch(self._config, self._plan, teacher.name)
            published = []
            for replica in range(teacher.parallel.dp):
                calls = group.submit(
                    "forward",
                    next(teacher_parts),
                    first_slot,
                    generation,
                    ranks=range(replica * tp, (replica + 1) * tp),
                )
                leader, *followers = calls
                published.append(leader)
                names |= calls
                others |= {follower: calls[follower] for follower in followers}
            targets.append(published)
        return PendingBatch(batch.index, batch.cursor, {info: names[info]}, parts[:dp], targets, others, names)


class StudentGroup:
    """The student's ranks, called as one."""

    def __init__(self, group: WorkerGroup, config: Config, calls: Calls, timer: StepTimer):
        self._group, self._config, self._calls, self._timer = group, config, calls, timer

    def train_step(self, batch: PendingBatch, targets: list[list[ray.ObjectRef]]) -> dict[str, Metric]:
        """forward_backward and optim_step, submitted together."""
        return self._run(
            "train_step", batch, targets, f"step {batch.index + 1}", ("wait_aligner", "wait_teachers", "student")
        )

    def evaluate(self, batch: PendingBatch, targets: list[list[ray.ObjectRef]]) -> dict[str, Metric]:
        return self._run("evaluate", batch, targets, f"validation batch {batch.index}", ("validation",) * 3)

    def collective(self, method: str, *arguments: object, what: str) -> None:
        """Calls a method in which all ranks take part: save, load, export."""
        self._group.call(method, *arguments, what=what, timeout_s=self._config.ray.step_timeout_s)

    def _run(
        self,
        method: str,
        batch: PendingBatch,
        targets: list[list[ray.ObjectRef]],
        what: str,
        parts: tuple[str, str, str],
    ) -> dict[str, Metric]:
        """Submits to all ranks, then waits for each stage in turn; `parts` are the names under which the waits are timed."""
        tp = self._config.student.parallel.tp
        sizes = [len(teacher) for teacher in targets]
        published = [ref for teacher in targets for ref in teacher]
        calls: Refs = {}
        for rank in range(len(self._group.actors)):
            calls |= self._group.submit(method, batch.student[rank // tp], sizes, *published, ranks=[rank])
        with self._timer.part(parts[0]):
            info = self._gather(batch.info, f"aligning the batch of {what}", self._config.aligner.deadline_s)[0]
        with self._timer.part(parts[1]):
            watched = {ref: batch.names[ref] for ref in (*published, *batch.others)}
            taught = self._gather(watched, f"teaching the batch of {what}", self._config.ray.step_timeout_s)
        with self._timer.part(parts[2]):
            trained = self._gather(calls, what, self._config.ray.step_timeout_s)
        batch.metrics = merge([_describe(info), *(result.metrics for result in taught)])
        return merge(trained)

    def _gather(self, calls: Refs, what: str, timeout_s: float) -> list:
        return self._calls.gather(calls, what=what, timeout_s=timeout_s)


def _describe(info: BatchInfo) -> dict[str, Metric]:
    return {
        "align/documents": Metric(info.num_documents, "sum"),
        "align/truncated": Metric(info.num_truncated, "sum"),
        "align/tokens": Metric(info.num_tokens, "sum"),
        "align/rows": Metric(info.num_rows, "sum"),
        "timing/aligner/align": Metric(info.seconds, "max"),
    }


def slots_per_batch(config: Config, plan: BatchPlan, teacher: str) -> int:
    """Slots that one batch takes of one rank of this teacher: its micro-batches when no two documents share a row."""
    settings = next(candidate for candidate in config.teachers if candidate.name == teacher)
    rows = math.ceil(config.train.global_batch_size / plan.row_multiple) * plan.row_multiple
    micro_batch_size = settings.micro_batch_size or config.train.micro_batch_size
    return rows // (settings.parallel.dp * micro_batch_size)
