"""Aligner → teachers → student, as chained references: the driver never waits between them.

Ray resolves an argument before a call runs, and runs the calls of a synchronous actor in the order of
submission, so look-ahead needs no threads: a batch is aligned and seen by the teachers while the
student still trains on an earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import ray

from distill_rl.config.schema import Config
from distill_rl.data.collate import BatchPlan
from distill_rl.observe.metrics import Metric, merge
from distill_rl.observe.timing import StepTimer
from distill_rl.types import AlignmentInfo, BatchInfo, Cursor, DocumentBatch
from distill_rl.workers.calls import Calls
from distill_rl.workers.group import WorkerGroup
from distill_rl.workers.pool import AlignerPool, Pending

Refs = dict[ray.ObjectRef, str]


@dataclass
class PendingBatch:
    """A batch on its way: references only. Nothing of it stays alive after `release`."""

    index: int
    cursor: Cursor
    place: int
    """in the teachers' rings"""
    aligned: Pending
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
        for references in (self.student, self.aligned.parts, *self.targets):
            references.clear()
        for named in (self.others, self.names):
            named.clear()


class Pipeline:
    """Submits batches to the aligner and the teachers.

    Slots: training batches use a ring of depth + 1 places, in turn; validation batches, never looked
    ahead, use one place more. A batch takes `slots_per_batch` slots of each teacher rank at its place.
    """

    def __init__(
        self,
        config: Config,
        aligners: AlignerPool,
        teachers: dict[str, WorkerGroup],
        plan: BatchPlan,
    ):
        self._config, self._aligners, self._teachers, self._plan = config, aligners, teachers, plan
        self._running = [teacher for teacher in config.teachers if teacher.name in teachers]
        self._submitted = 0

    def train(self, batch: DocumentBatch) -> PendingBatch:
        return self._submit(batch, place=batch.index % (self._config.prefetch.depth + 1))

    def validate(self, batch: DocumentBatch) -> PendingBatch:
        return self._submit(batch, place=self._config.prefetch.depth + 1)

    def settle(self, pending: PendingBatch) -> BatchInfo:
        """Waits for a batch's alignment; where that took a second try, the teachers are called again."""
        info, replaced = self._aligners.settle(pending.aligned)
        if replaced:
            self._chain(pending)
        return info

    def _submit(self, batch: DocumentBatch, *, place: int) -> PendingBatch:
        aligned = self._aligners.submit(batch)
        pending = PendingBatch(batch.index, batch.cursor, place, aligned, [], [], {}, {})
        self._chain(pending)
        return pending

    def _chain(self, pending: PendingBatch) -> None:
        """Calls the teachers on what the aligner will return."""
        self._submitted += 1
        generation = 2 * self._submitted
        parts, dp = pending.aligned.parts, self._plan.student.dp
        pending.student[:] = parts[:dp]
        teacher_parts = iter(parts[dp:])
        pending.targets.clear()
        pending.others.clear()
        pending.names.clear()
        for teacher in self._running:
            group, tp = self._teachers[teacher.name], teacher.parallel.tp
            first_slot = pending.place * slots_per_batch(self._config, self._plan, teacher.name)
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
                pending.names |= calls
                pending.others |= {follower: calls[follower] for follower in followers}
            pending.targets.append(published)


class StudentGroup:
    """The student's ranks, called as one."""

    def __init__(
        self,
        group: WorkerGroup,
        config: Config,
        calls: Calls,
        timer: StepTimer,
        settle: Callable[[PendingBatch], BatchInfo],
    ):
        self._group, self._config, self._calls, self._timer, self._settle = group, config, calls, timer, settle

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
        """Waits for the alignment, submits to all ranks, then waits for each stage in turn; `parts` are the names under
        which the waits are timed. The student is called only with a batch that exists, so that no fault before it can
        reach its state."""
        tp = self._config.student.parallel.tp
        with self._timer.part(parts[0]):
            info = self._settle(batch)
        sizes = [len(teacher) for teacher in targets]
        published = [ref for teacher in targets for ref in teacher]
        calls: Refs = {}
        for rank in range(len(self._group.actors)):
            calls |= self._group.submit(method, batch.student[rank // tp], sizes, *published, ranks=[rank])
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
    metrics = {
        "align/documents": Metric(info.num_documents, "sum"),
        "align/truncated": Metric(info.num_truncated, "sum"),
        "align/tokens": Metric(info.num_tokens, "sum"),
        "align/rows": Metric(info.num_rows, "sum"),
        "timing/aligner/align": Metric(info.seconds, "max"),
    }
    for found in info.alignments:
        metrics |= _describe_alignment(found, info, f"/{found.teacher}" if len(info.alignments) > 1 else "")
    return metrics


def _describe_alignment(found: AlignmentInfo, info: BatchInfo, suffix: str) -> dict[str, Metric]:
    chunks, labels, documents = found.num_chunks, info.num_labels, sum(found.methods.values())
    metrics = {
        f"align/chunks{suffix}": Metric(chunks, "sum"),
        f"align/one_to_one{suffix}": Metric(found.num_one_to_one / max(chunks, 1), "mean", chunks),
        f"align/coverage{suffix}": Metric(found.num_covered / max(labels, 1), "mean", labels),
        f"align/exact{suffix}": Metric(found.num_exact / max(documents, 1), "mean", documents),
    }
    return metrics | {
        f"align/method/{method}{suffix}": Metric(count, "sum") for method, count in sorted(found.methods.items())
    }


def slots_per_batch(config: Config, plan: BatchPlan, teacher: str) -> int:
    """Slots that one batch takes of one rank of this teacher: its micro-batches when no two documents share a row."""
    settings = next(candidate for candidate in config.teachers if candidate.name == teacher)
    rows = math.ceil(config.train.global_batch_size / plan.row_multiple) * plan.row_multiple
    micro_batch_size = settings.micro_batch_size or config.train.micro_batch_size
    return rows // (settings.parallel.dp * micro_batch_size)
