"""Aligners → teachers → student. The driver moves references, and calls a stage once it knows that the one before is done.

So look-ahead needs no threads: the driver waits for the student alone, and whenever aligners finish something meanwhile,
its wait is interrupted for `advance`, which gives the next stage its work.

How one batch moves (`SubBatch` lists the states):

1. `submit` hands the batch to the aligners.
2. `advance` takes batches that are aligned and queues their sub-batches: as many as their rows need.
3. It takes queued sub-batches in order. As soon as every teacher's ring has room, it assigns slots and calls the
   teachers. No call ever waits for a slot, so a full ring cannot deadlock a forward pass.
4. `settle` makes the batch the current one and waits for its alignment. The current batch comes first in the queue.
5. The student group calls the student on each sub-batch whose teachers have been called, and waits for it. Ray runs the
   call once the targets exist.
6. `finish` gives the slots back: every reader has returned, so they can be overwritten. That makes room for step 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import ray

from distill_rl.config.derive import RingPlan
from distill_rl.data.batch.collate import BatchPlan
from distill_rl.transport.base import Slot
from distill_rl.types import BatchInfo, DocumentBatch
from distill_rl.workers.pipeline.aligner_pool import AlignerPool
from distill_rl.workers.pipeline.sub_batch import PendingBatch, ReplicaCalls, SlotLedger, State, SubBatch, Teachers


class Pipeline:
    """Submits batches to the aligners and, as far as their rings have room, to the teachers.

    The batch being trained on has priority. Later batches always leave it room for one sub-batch, so it can always
    continue; a validation batch becomes the current one and needs no ring of its own.

    Args:
        rings: the number of slots per ring, and how many of them a sub-batch takes.
        method: of the teachers. `store_targets` publishes nothing: slots then bound how many calls wait, and nothing else.
    """

    def __init__(
        self,
        aligners: AlignerPool,
        teachers: Teachers,
        plan: BatchPlan,
        rings: RingPlan,
        method: Literal["forward", "store_targets"] = "forward",
    ):
        self._method = method
        self.aligners, self._teachers, self._plan, self._rings = aligners, list(teachers), plan, rings
        self._ledgers = self._new_ledgers()
        self._current: PendingBatch | None = None
        self._queue: list[tuple[PendingBatch, SubBatch]] = []
        """QUEUED sub-batches in the order in which their teachers will be called."""
        self._open: list[SubBatch] = []
        """Sub-batches that hold slots, in the order in which their teachers were called."""
        self.lost: set[str] = set()
        """Teachers that the run continues without."""

    def submit(self, batch: DocumentBatch) -> PendingBatch:
        """Hands a batch to the aligners, and to the teachers as soon as `advance` finds it aligned. Does not wait.

        The caller must release the returned batch in the end (`PendingBatch.lease`).
        """
        pending = self.aligners.submit(batch)
        self.advance()
        return pending

    def settle(self, pending: PendingBatch) -> BatchInfo:
        """Makes a batch the current one, which goes first from now on, and waits for its alignment.

        Raises:
            DistillError: as for `AlignerPool.settle`.
        """
        self._current = pending
        self.advance()
        return self.aligners.settle(pending, self.advance)

    def awaited(self) -> Sequence[ray.ObjectRef]:
        """Returns the calls after which there is something to do for `advance`."""
        return self.aligners.awaited()

    def advance(self) -> None:
        """Calls the teachers on what is aligned, as far as their rings have room, and lets the aligners go on.

        Call it in every long wait, at intervals and when one of `awaited` has ended: it also finds aligners that hang.
        """
        for pending in self.aligners.advance():
            self._split(pending)
        self._queue.sort(key=lambda entry: entry[0] is not self._current)  # current batch first; the sort is stable
        while self._queue and self._has_room(self._queue[0][0]):
            self._call_teachers(self._queue.pop(0)[1])

    def finish(self, sub_batch: SubBatch) -> None:
        """Gives back the slots of a sub-batch whose readers have all returned, and drops its references.

        Then calls the teachers on queued sub-batches that there is room for.
        """
        self._open = [other for other in self._open if other is not sub_batch]
        for name, slots in sub_batch.release().items():
            self._ledgers[name].give_back(slots)
        self.advance()

    def resubmit(self, name: str, replica: int) -> None:
        """Calls the replacement of a teacher's replica on every open sub-batch that the student is not done with.

        The calls keep their order and slots, which exist in the new ring too. Of sub-batches that the student is done
        with, only the call of the replica's first rank is kept; it had succeeded.

        Args:
            name: of the teacher.
        """
        t = self._index(name)
        for sub_batch in self._open:
            if sub_batch.state is State.DONE:
                sub_batch.teacher_calls[t][replica] = _of_leader(sub_batch.teacher_calls[t][replica])
            else:
                sub_batch.teacher_calls[t][replica] = self._call(t, replica, sub_batch, sub_batch.slots[name])

    def lose(self, name: str) -> None:
        """Continues without a teacher: it is not called any more, and its slots are free.

        Sub-batches that the student is not done with keep the other teachers' targets; the student must be called on
        them again. Of the others only the calls of the replicas' first ranks are kept, as in `resubmit`.
        """
        self.lost.add(name)
        t = self._index(name)
        for sub_batch in self._open:
            done = sub_batch.state is State.DONE
            sub_batch.teacher_calls[t] = [_of_leader(calls) for calls in sub_batch.teacher_calls[t]] if done else []
            self._ledgers[name].give_back(sub_batch.slots.pop(name, ()))
        self.advance()

    def abandon(self) -> None:
        """Forgets all batches, which the caller has released. Every ring must be opened anew before the next `submit`.

        Teachers that have been called go on, and nobody reads what they publish.
        """
        self.aligners.abandon()
        self._queue, self._open, self._current, self._ledgers = [], [], None, self._new_ledgers()

    def _new_ledgers(self) -> dict[str, SlotLedger]:
        """The account of every teacher's ring with all slots free."""
        return {teacher.name: SlotLedger(self._rings.slots[teacher.name]) for teacher, _ in self._teachers}

    def occupancy(self) -> dict[str, float]:
        """Returns, by teacher, the largest share (0 to 1) of its ring in use since the last call."""
        return {name: ledger.occupancy() for name, ledger in self._ledgers.items()}

    def _split(self, pending: PendingBatch) -> None:
        """Makes the sub-batches of a batch that is aligned, and queues them."""
        assert pending.info is not None
        rows = iter(pending.rows)
        student = [next(rows) for _ in range(self._plan.student.dp)]
        teachers = [[next(rows) for _ in range(sharding.dp)] for sharding in self._plan.teachers]
        pending.sub_batches = [
            SubBatch(i, list(student), [list(replicas) for replicas in teachers])
            for i in range(-(-pending.info.num_rows // self._rings.rows_per_sub_batch))
        ]
        self._queue += [(pending, sub_batch) for sub_batch in pending.sub_batches]

    def _has_room(self, pending: PendingBatch) -> bool:
        """Returns whether every ring has free slots for one more sub-batch of this batch."""
        # For a batch other than the current one, room for a sub-batch of the current one must remain. Lost teachers do
        # not count.
        current = self._current.sub_batches if self._current else []
        for name, ledger in self._ledgers.items():
            if name in self.lost:
                continue
            needed = self._rings.slots_per_sub_batch[name]
            if ledger.free < needed:
                return False
            held_by_later = ledger.held - sum(len(sub_batch.slots.get(name, ())) for sub_batch in current)
            if pending is not self._current and held_by_later + needed > ledger.num_slots - needed:
                return False  # the current batch must always find room for one sub-batch
        return True

    def _call_teachers(self, sub_batch: SubBatch) -> None:
        """Takes slots for a sub-batch, calls all teachers that are not lost on it, and adds it to the open ones."""
        # Every ring must have room (`_has_room`).
        slots: dict[str, tuple[Slot, ...]] = {}
        calls: list[list[ReplicaCalls]] = []
        for t, (teacher, _) in enumerate(self._teachers):
            if teacher.name in self.lost:
                calls.append([])
                continue
            taken = self._ledgers[teacher.name].take(self._rings.slots_per_sub_batch[teacher.name])
            slots[teacher.name] = taken
            calls.append([self._call(t, replica, sub_batch, taken) for replica in range(teacher.parallel.dp)])
        sub_batch.call_teachers(slots, calls)
        self._open.append(sub_batch)

    def _call(self, t: int, replica: int, sub_batch: SubBatch, slots: Sequence[Slot]) -> ReplicaCalls:
        """Calls the ranks of one replica of teacher `t`, without waiting."""
        teacher, group = self._teachers[t]
        size = teacher.ranks_per_replica
        ranks = range(replica * size, (replica + 1) * size)
        rows = sub_batch.teachers[t][replica]
        return ReplicaCalls(*group.submit_replica(self._method, rows, sub_batch.index, slots, ranks=ranks))

    def _index(self, name: str) -> int:
        return [teacher.name for teacher, _ in self._teachers].index(name)


def _of_leader(calls: ReplicaCalls) -> ReplicaCalls:
    """The call of the first rank alone: it has published, and the other ranks' calls, which may have failed, are not needed."""
    return replace(calls, calls={calls.leader: calls.calls[calls.leader]})
