"""Aligner → teachers → student, as chained references: the driver never waits between them.

Ray resolves an argument before a call runs, and runs the calls of a synchronous actor in the order of
submission, so look-ahead needs no threads: a batch is aligned and seen by the teachers while the
student still trains on an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import ray

from distill_rl.config.derive import RingPlan
from distill_rl.config.schema import TeacherConfig
from distill_rl.data.collate import BatchPlan
from distill_rl.observe.metrics import Metric
from distill_rl.transport.base import Slot
from distill_rl.types import BatchInfo, Cursor, DocumentBatch
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.pipeline.aligner_pool import AlignerPool, Pending
from distill_rl.workers.pipeline.slots import SlotLedger

Refs = dict[ray.ObjectRef, str]
"""calls, each with the name of the actor that was called"""
Teachers = Sequence[tuple[TeacherConfig, WorkerGroup]]
"""those that run, with their ranks"""


@dataclass
class Wave:
    """Rows of a batch that teachers and student work on in one call each: references and slots only."""

    index: int
    student: list[ray.ObjectRef]
    """parts for the student's data-parallel ranks"""
    teachers: list[list[ray.ObjectRef]]
    """parts for each teacher's"""
    taught: bool = False
    """whether the teachers have been called"""
    slots: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    """held, by teacher; the same in each of its replicas"""
    lessons: list[list[Refs]] = field(default_factory=list)
    """per teacher and data-parallel replica the calls of its ranks, of which the first publishes; empty before they
    are made, and for a teacher that was lost"""
    learning: Refs = field(default_factory=dict)
    """the student's calls"""
    learnt: bool = False
    """whether all of these are known to have ended well"""

    @property
    def published(self) -> list[list[ray.ObjectRef]]:
        """Per teacher what its replicas publish."""
        return [[next(iter(replica)) for replica in teacher] for teacher in self.lessons]

    @property
    def teaching(self) -> Refs:
        """All calls of teachers; those that publish nothing are watched for their errors."""
        return {ref: name for teacher in self.lessons for replica in teacher for ref, name in replica.items()}

    def drop(self) -> None:
        for references in (self.student, self.teachers, self.lessons, self.learning):
            references.clear()


@dataclass
class PendingBatch:
    """A batch on its way: references only. Nothing of it stays alive after `release`."""

    index: int
    cursor: Cursor
    aligned: Pending
    waves: list[Wave]
    metrics: dict[str, Metric] = field(default_factory=dict)

    @contextmanager
    def lease(self) -> Iterator[tuple[PendingBatch, list[Wave]]]:
        """The batch and its waves for the length of one step; whatever happens, they are released after it."""
        try:
            yield self, self.waves
        finally:
            self.release()

    def release(self) -> None:
        self.aligned.parts.clear()
        for wave in self.waves:
            wave.drop()


class Pipeline:
    """Submits batches to the aligner and, as far as the rings have room, to the teachers.

    Nothing ever waits for a slot inside a call: a wave is submitted when its slots are free, in order, and slots are
    free when the student's call that read them has returned. The batch that is being trained on comes first, and the
    others leave it room for one wave, so that it can always go on; validation needs no room of its own.

    Args:
        rings: how many slots they have, and what a wave takes of them.
    """

    def __init__(
        self,
        aligners: AlignerPool,
        teachers: Teachers,
        plan: BatchPlan,
        rings: RingPlan,
    ):
        self._aligners, self._teachers, self._plan, self._rings = aligners, list(teachers), plan, rings
        self._ledgers = {teacher.name: SlotLedger(rings.slots[teacher.name]) for teacher, _ in self._teachers}
        self._current: PendingBatch | None = None
        self._waiting: list[tuple[PendingBatch, Wave]] = []
        """in the order in which they will be called, but that those of the current batch come first"""
        self._open: list[Wave] = []
        """those that were taught and not finished, in the order of teaching"""
        self._ahead: list[PendingBatch] = []
        """those whose alignment nobody has waited for"""
        self.lost: set[str] = set()
        """teachers that the run goes on without"""

    def submit(self, batch: DocumentBatch) -> PendingBatch:
        """Hands a batch to the aligner and, when there is room, to the teachers."""
        pending = PendingBatch(batch.index, batch.cursor, self._aligners.submit(batch), [])
        self._ahead.append(pending)
        self._lay_out(pending)
        self._pump()
        return pending

    def settle(self, pending: PendingBatch) -> BatchInfo:
        """Makes a batch the current one and waits for its alignment; where that took a second try, the teachers are
        called again."""
        self._current = pending
        self._pump()
        return self._aligned(pending)

    def look_after(self) -> None:
        """Replaces an aligner that hangs on a batch to come: a teacher that was called on it would work on nothing else."""
        for pending in list(self._ahead):
            if self._aligners.overdue(pending.aligned):
                self._aligned(pending)

    @property
    def aligner_restarts(self) -> int:
        return self._aligners.restarts

    def _aligned(self, pending: PendingBatch) -> BatchInfo:
        self._ahead = [each for each in self._ahead if each is not pending]
        info, replaced = self._aligners.settle(pending.aligned)
        if replaced:
            self._withdraw(pending, pending.waves)
            self._lay_out(pending)
        needed = -(-info.num_rows // self._rings.rows_per_wave)
        self._withdraw(pending, pending.waves[needed:])
        del pending.waves[needed:]
        self._pump()
        return info

    def finish(self, wave: Wave) -> None:
        """Takes back the slots of a wave whose readers have all returned, and lets go of what was in them."""
        self._give_back(wave)
        wave.drop()
        self._pump()

    @property
    def queue(self) -> int:
        """Batches that the aligners have yet to answer."""
        return self._aligners.queue

    def occupancy(self) -> dict[str, float]:
        """By teacher the largest share of a ring in use since this was last asked."""
        return {name: ledger.occupancy() for name, ledger in self._ledgers.items()}

    def teach_again(self, name: str, replica: int) -> None:
        """Calls a replica that took the place of another on all that the student has still to learn, in the same order and
        into the same slots of its new ring."""
        index = self._index(name)
        for wave in self._open:
            if wave.learnt:  # what its first rank published was enough, whatever became of the others
                leader = next(iter(wave.lessons[index][replica].items()))
                wave.lessons[index][replica] = dict([leader])
            else:
                wave.lessons[index][replica] = self._call(index, replica, wave)

    def lose(self, name: str) -> None:
        """Goes on without a teacher: what it was called on counts as taught by the others alone."""
        self.lost.add(name)
        index = self._index(name)
        for wave in self._open:
            if not wave.learnt:
                wave.lessons[index] = []
            self._ledgers[name].give_back(wave.slots.pop(name, ()))
        self._pump()

    def _index(self, name: str) -> int:
        return [teacher.name for teacher, _ in self._teachers].index(name)

    def _lay_out(self, pending: PendingBatch) -> None:
        """Cuts what the aligner will return into waves, and queues them."""
        parts = iter(pending.aligned.parts)
        plan = self._plan

        def take(dp: int) -> list[list[ray.ObjectRef]]:
            return [[next(parts) for _ in range(dp)] for _ in range(plan.waves)]

        student = take(plan.student.dp)
        teachers = [take(share.dp) for share in plan.teachers]
        pending.waves[:] = [
            Wave(index, student[index], [teacher[index] for teacher in teachers]) for index in range(plan.waves)
        ]
        self._waiting += [(pending, wave) for wave in pending.waves]

    def _withdraw(self, pending: PendingBatch, waves: Sequence[Wave]) -> None:
        """Forgets waves of which nothing is or will be published: their arguments failed, or hold no rows."""
        gone = {id(wave) for wave in waves}
        self._waiting = [entry for entry in self._waiting if id(entry[1]) not in gone]
        for wave in waves:
            self._give_back(wave)

    def _give_back(self, wave: Wave) -> None:
        self._open = [each for each in self._open if each is not wave]
        for name, slots in wave.slots.items():
            self._ledgers[name].give_back(slots)
        wave.slots = {}

    def _pump(self) -> None:
        """Calls the teachers on every wave that there is room for."""
        self._waiting.sort(key=lambda entry: entry[0] is not self._current)
        while self._waiting and self._has_room(self._waiting[0][0]):
            self._teach(self._waiting.pop(0)[1])

    def _has_room(self, pending: PendingBatch) -> bool:
        current = self._current.waves if self._current else []
        for name, ledger in self._ledgers.items():
            if name in self.lost:
                continue
            wave = self._rings.slots_per_wave[name]
            if ledger.free < wave:
                return False
            ahead = ledger.held - sum(len(each.slots.get(name, ())) for each in current)
            if pending is not self._current and ahead + wave > ledger.num_slots - wave:
                return False
        return True

    def _teach(self, wave: Wave) -> None:
        wave.taught = True
        self._open.append(wave)
        for index, (teacher, _) in enumerate(self._teachers):
            if teacher.name in self.lost:
                wave.lessons.append([])
                continue
            wave.slots[teacher.name] = self._ledgers[teacher.name].take(self._rings.slots_per_wave[teacher.name])
            wave.lessons.append([self._call(index, replica, wave) for replica in range(teacher.parallel.dp)])

    def _call(self, index: int, replica: int, wave: Wave) -> Refs:
        """Has the ranks of one replica teach a wave."""
        teacher, group = self._teachers[index]
        ranks = range(replica * teacher.parallel.tp, (replica + 1) * teacher.parallel.tp)
        return group.submit("forward", wave.teachers[index][replica], wave.slots[teacher.name], ranks=ranks)
