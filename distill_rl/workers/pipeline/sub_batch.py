"""A batch on its way through teachers and student, in one or more sub-batches: references and slots, never tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import ray

from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import DistillError
from distill_rl.observe.metrics import Metric
from distill_rl.transport.base import Slot
from distill_rl.types import BatchInfo, DocumentBatch
from distill_rl.workers.cluster.calls import Refs
from distill_rl.workers.cluster.group import WorkerGroup

FIRST_GENERATION = 2
"""Generation of every slot at the start; only the probe that is sent before the first step carries it."""

Teachers = Sequence[tuple[TeacherConfig, WorkerGroup]]
"""The running teachers, each with its ranks."""


def replicas_of(teacher: TeacherConfig) -> list[range]:
    """The ranks of each replica of a teacher, in its group's order."""
    size = teacher.ranks_per_replica
    return [range(first, first + size) for first in range(0, teacher.parallel.dp * size, size)]


@dataclass(frozen=True, slots=True)
class ReplicaCalls:
    """The calls of a teacher's replica on a sub-batch."""

    published: ray.ObjectRef
    """What its first rank publishes, for the student: it would take the driver long to open the handles inside."""
    calls: Refs
    """By rank, the first one first; each returns what it has measured."""

    @property
    def leader(self) -> ray.ObjectRef:
        """The call of the first rank."""
        return next(iter(self.calls))


class State(Enum):
    QUEUED = "waiting for free slots in every teacher's ring"
    TEACHING = "slots taken, teachers called"
    TRAINING = "student called"
    DONE = "the student's calls have returned"
    RELEASED = "slots given back, references dropped"


@dataclass
class SubBatch:
    """The rows of a batch that teachers and student each handle in one call.

    A sub-batch moves through its states by the methods below and in no other way:

        QUEUED ──call_teachers──► TEACHING ──call_student──► TRAINING ──finish──► DONE
                                                              └── call_student again, after a teacher was replaced

    and `release` ends it from any state. The pipeline calls the teachers and releases; the student group does the rest.
    """

    index: int
    student: list[ray.ObjectRef]
    """Rows for each data-parallel rank of the student: those of all sub-batches, of which this is the one at `index`."""
    teachers: list[list[ray.ObjectRef]]
    """The same for each replica of each teacher."""
    state: State = State.QUEUED
    slots: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    """Slots held, by teacher; every replica uses the same ones in its own ring."""
    teacher_calls: list[list[ReplicaCalls]] = field(default_factory=list)
    """Per teacher and replica. A lost teacher has no replicas."""
    student_calls: Refs = field(default_factory=dict)

    def call_teachers(self, slots: dict[str, tuple[Slot, ...]], calls: list[list[ReplicaCalls]]) -> None:
        """Notes the slots taken, by teacher, and the calls made, by teacher and replica: QUEUED becomes TEACHING."""
        assert self.state is State.QUEUED
        self.state, self.slots, self.teacher_calls = State.TEACHING, slots, calls

    def call_student(self, calls: Refs) -> None:
        """Notes the calls of the student's ranks, in place of earlier ones: TEACHING or TRAINING becomes TRAINING."""
        assert self.state in (State.TEACHING, State.TRAINING)
        self.state, self.student_calls = State.TRAINING, calls

    def finish(self) -> None:
        """Notes that the student's calls have returned: TRAINING becomes DONE."""
        assert self.state is State.TRAINING
        self.state = State.DONE

    def release(self) -> dict[str, tuple[Slot, ...]]:
        """Drops all references to rows and calls, and returns the slots that were held, by teacher.

        The caller gives these back. The sub-batch is RELEASED.
        """
        slots, self.slots, self.state = self.slots, {}, State.RELEASED
        for references in (self.student, self.teachers, self.teacher_calls, self.student_calls):
            references.clear()
        return slots

    @property
    def published(self) -> list[list[ray.ObjectRef]]:
        """Per teacher, what each replica publishes."""
        return [[replica.published for replica in teacher] for teacher in self.teacher_calls]

    @property
    def leaders(self) -> list[list[ray.ObjectRef]]:
        """Per teacher, the call of each replica's first rank."""
        return [[replica.leader for replica in teacher] for teacher in self.teacher_calls]

    @property
    def all_teacher_calls(self) -> Refs:
        """Every rank's call. Those that publish nothing are awaited for their errors."""
        return {
            ref: name for teacher in self.teacher_calls for replica in teacher for ref, name in replica.calls.items()
        }


@dataclass
class PendingBatch:
    """A submitted batch. `release` drops every reference it holds."""

    documents: DocumentBatch
    info: BatchInfo | None = None
    """Set once the batch is aligned."""
    rows: list[ray.ObjectRef] = field(default_factory=list)
    """Set with `info`: a reference for every rank of the student, then of each teacher, to its rows by sub-batch."""
    error: DistillError | None = None
    """Why the batch cannot be aligned."""
    sub_batches: list[SubBatch] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Keeps the batch while the block runs; its references are dropped when the block ends, whatever happens."""
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Drops the references to rows, targets and calls.

        Slots that sub-batches still held are not given back to their ledgers.
        """
        self.rows.clear()
        for sub_batch in self.sub_batches:
            sub_batch.release()


class SlotLedger:
    """The slots of one teacher. All its replicas use the same slots at the same time, each in its own ring.

    A slot is returned once every reader's call has returned. It is handed out again with the next generation, the slot
    that was returned first going first.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._generations = [FIRST_GENERATION] * num_slots
        self._peak = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.num_slots - self.free

    def take(self, count: int) -> tuple[Slot, ...]:
        """Takes `count` free slots, those that were returned first going first, with new generations.

        Raises:
            RuntimeError: fewer slots are free; check `free` first.
        """
        if count > self.free:
            raise RuntimeError(f"{count} slots of {self.num_slots} were asked for; {self.free} are free")
        taken = [self._free.popleft() for _ in range(count)]
        for i in taken:
            self._generations[i] += 2
        self._peak = max(self._peak, self.held)
        return tuple(Slot(i, self._generations[i]) for i in taken)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Frees slots whose readers are done."""
        self._free.extend(slot.index for slot in slots)

    def occupancy(self) -> float:
        """Returns the largest share (0 to 1) of the slots in use at once since the last call."""
        peak, self._peak = self._peak, self.held
        return peak / self.num_slots
