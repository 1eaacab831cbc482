"""The order in which teachers are called and slots are handed out. Lists of calls stand in for the actors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_rl.config.derive import ring_plan
from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan
from distill_rl.run.prefetch import Lookahead
from distill_rl.types import BatchInfo, Cursor, DocumentBatch
from distill_rl.workers.pipeline.pipeline import Pipeline
from distill_rl.workers.pipeline.sub_batch import PendingBatch, State, SubBatch


@dataclass
class Aligners:
    """Every batch fills `rows` rows, and is aligned at once, except those in `slow`."""

    num_ranks: int
    rows: int
    slow: set[int] = field(default_factory=set)
    """Batches that are aligned only when they are waited for."""
    restarts: int = 0
    aligned: list[PendingBatch] = field(default_factory=list)

    def submit(self, batch: DocumentBatch) -> PendingBatch:
        pending = PendingBatch(batch)
        if batch.index not in self.slow:
            self.finish(pending)
        return pending

    def advance(self) -> list[PendingBatch]:
        aligned, self.aligned = self.aligned, []
        return aligned

    def settle(self, pending: PendingBatch, advance: Callable[[], None]) -> BatchInfo:
        if pending.info is None:
            self.finish(pending)
        advance()
        return pending.info

    def abandon(self) -> None:
        self.aligned.clear()

    def finish(self, pending: PendingBatch) -> None:
        index = pending.documents.index
        pending.info = BatchInfo(index, Cursor(), 0, self.rows, 0, 0, 0, 0.0)
        pending.rows = [f"batch {index} rank {rank}" for rank in range(self.num_ranks)]
        self.aligned.append(pending)


@dataclass
class Teacher:
    name: str
    calls: list[tuple[Any, tuple]] = field(default_factory=list)
    unread: dict[tuple[int, int], str] = field(default_factory=dict)
    """Parts that the student has not finished reading, by (first rank of the replica, slot)."""

    def submit_replicas(
        self, method: str, rows: dict[int, str], sub_batch: int, slots: Any, *, size: int
    ) -> dict[int, tuple[str, dict[str, str]]]:
        assert method == "forward"
        made = {}
        for replica, of_replica in rows.items():
            part, ranks = _part(of_replica, sub_batch), range(replica * size, (replica + 1) * size)
            self.calls.append((part, slots))
            for slot in slots:
                assert (ranks[0], slot.index) not in self.unread, f"slot {slot.index} was handed out before it was read"
                self.unread[ranks[0], slot.index] = part
            call = f"{self.name} call {len(self.calls)}"
            made[replica] = f"{call} published", {f"{call} rank {rank}": f"{self.name}/{rank}" for rank in ranks}
        return made

    def read(self, parts: Sequence[str]) -> None:
        """The student has finished reading the targets of these parts."""
        self.unread = {place: part for place, part in self.unread.items() if part not in parts}


def config(*, batch=8, micro=2, depth=1, slots=None, teachers=({},)) -> Config:
    settings = Config()
    settings.train.global_batch_size, settings.train.micro_batch_size = batch, micro
    settings.prefetch.depth, settings.prefetch.slots = depth, slots
    settings.teachers = [
        TeacherConfig(
            name=f"t{i}",
            parallel=ParallelConfig(*teacher.get("parallel", (1, 1))),
            micro_batch_size=teacher.get("micro"),
            export=teacher.get("export", "topk"),
        )
        for i, teacher in enumerate(teachers)
    ]
    return settings


def build(settings: Config, *, rows: int | None = None, slow=()) -> tuple[Pipeline, list[Teacher]]:
    plan, rings = BatchPlan.from_config(settings, 0), ring_plan(settings)
    num_ranks = plan.student.dp + sum(sharding.dp for sharding in plan.teachers)
    aligners = Aligners(num_ranks, rows or settings.train.global_batch_size, set(slow))
    teachers = [Teacher(teacher.name) for teacher in settings.teachers]
    return Pipeline(aligners, list(zip(settings.teachers, teachers)), plan, rings), teachers


def documents(index: int) -> DocumentBatch:
    return DocumentBatch(index, (), Cursor())


def train(pipeline: Pipeline, teachers: Sequence[Teacher], batch: PendingBatch) -> None:
    """Does what StudentGroup does: calls a sub-batch after its teachers, and waits for the oldest one."""
    pipeline.settle(batch)
    running = deque()
    for sub_batch in batch.sub_batches:
        while sub_batch.state is State.QUEUED:
            _finish(pipeline, teachers, running.popleft())
        running.append(sub_batch)
    while running:
        _finish(pipeline, teachers, running.popleft())


def _finish(pipeline: Pipeline, teachers: Sequence[Teacher], sub_batch: SubBatch) -> None:
    for teacher, replicas in zip(teachers, sub_batch.teachers):
        teacher.read([_part(rows, sub_batch.index) for rows in replicas])
    pipeline.finish(sub_batch)
    assert sub_batch.published == [], "a reference would keep the content of the slots alive"


def _part(rows: str, sub_batch: int) -> str:
    return f"{rows} sub-batch {sub_batch}"


def test_teachers_are_called_depth_batches_ahead():
    pipeline, (teacher,) = build(config(depth=2))
    batches = [pipeline.submit(documents(index)) for index in range(3)]
    pipeline.settle(batches[0])
    assert [part for part, _ in teacher.calls] == [f"batch {index} rank 1 sub-batch 0" for index in range(3)]
    held = [slot.index for _, slots in teacher.calls for slot in slots]
    assert sorted(held) == list(range(12))


def test_whole_ring_takes_each_batch_in_one_sub_batch():
    pipeline, teachers = build(config(depth=1))
    with closing(Lookahead((documents(i) for i in range(5)), pipeline.submit, PendingBatch.release, 1)) as items:
        for batch in items:
            with batch.lease():
                train(pipeline, teachers, batch)
    assert [len(slots) for _, slots in teachers[0].calls] == [4] * 5


def test_small_ring_takes_sub_batches_with_validation_between():
    pipeline, teachers = build(config(depth=1, teachers=({"export": "logits"},)))
    (teacher,) = teachers
    first, second = pipeline.submit(documents(0)), pipeline.submit(documents(1))
    train(pipeline, teachers, first)
    assert len(teacher.calls) == 5  # four, and one of the next batch: the other slot is reserved for the current batch
    train(pipeline, teachers, pipeline.submit(documents(77)))
    train(pipeline, teachers, second)
    assert [part for part, _ in teacher.calls] == [
        *(f"batch 0 rank 1 sub-batch {i}" for i in range(4)),
        "batch 1 rank 1 sub-batch 0",
        *(f"batch 77 rank 1 sub-batch {i}" for i in range(4)),
        *(f"batch 1 rank 1 sub-batch {i}" for i in range(1, 4)),
    ]


def test_finished_sub_batch_makes_room_for_the_next():
    pipeline, (teacher,) = build(config(depth=0, slots=2))
    batch = pipeline.submit(documents(0))
    pipeline.settle(batch)
    assert [sub_batch.state is not State.QUEUED for sub_batch in batch.sub_batches] == [True, True, False, False]
    _finish(pipeline, [teacher], batch.sub_batches[0])
    assert [sub_batch.state is not State.QUEUED for sub_batch in batch.sub_batches] == [True, True, True, False]


def test_teachers_are_not_called_before_the_alignment_has_ended():
    pipeline, (teacher,) = build(config(depth=2), slow=[1])
    first, second, third = (pipeline.submit(documents(index)) for index in range(3))
    pipeline.settle(first)
    assert [part for part, _ in teacher.calls] == ["batch 0 rank 1 sub-batch 0", "batch 2 rank 1 sub-batch 0"]
    assert (second.sub_batches, len(third.sub_batches)) == ([], 1)
    pipeline.aligners.finish(second)
    pipeline.advance()
    assert teacher.calls[-1][0] == "batch 1 rank 1 sub-batch 0"
    pipeline.advance()
    assert len(teacher.calls) == 3, "once is enough"


@pytest.mark.parametrize("rows", [2, 8, 14])
def test_a_batch_has_as_many_sub_batches_as_its_rows_need(rows):
    pipeline, teachers = build(config(depth=0, slots=2), rows=rows)
    for index in range(3):
        batch = pipeline.submit(documents(index))
        train(pipeline, teachers, batch)
        assert len(batch.sub_batches) == rows // 2
    assert len(teachers[0].calls) == 3 * rows // 2
    assert pipeline.occupancy() == {"t0": 1.0 if rows > 2 else 0.5}
    assert pipeline.occupancy() == {"t0": 0.0}


def test_replacement_is_resubmitted_open_sub_batches_in_order():
    pipeline, teachers = build(config(depth=2, teachers=({"parallel": (2, 2)}, {})))
    batches = [pipeline.submit(documents(index)) for index in range(3)]
    train(pipeline, teachers, batches[0])
    other, calls = teachers[1].calls.copy(), teachers[0].calls.copy()
    kept = [sub_batch.teacher_calls[0][0] for batch in batches[1:] for sub_batch in batch.sub_batches]
    teachers[0].unread.clear()  # the new ring is empty
    pipeline.resubmit("t0", 1)
    assert teachers[0].calls[len(calls) :] == [
        call for call in calls if call[0].startswith(("batch 1 rank 2 ", "batch 2 rank 2 "))
    ]
    assert teachers[1].calls == other
    for batch, before in zip(batches[1:], kept):
        (sub_batch,) = batch.sub_batches
        assert sub_batch.teacher_calls[0][0] == before, "the other replica is not called again"
        assert [ref.rpartition(" ")[2] for ref in sub_batch.teacher_calls[0][1].calls] == ["2", "3"]
        assert [len(teacher) for teacher in sub_batch.published] == [2, 1]


def test_finished_sub_batch_is_not_resubmitted():
    pipeline, (teacher,) = build(config(depth=1, teachers=({"parallel": (1, 2)},)))
    first, second = pipeline.submit(documents(0)), pipeline.submit(documents(1))
    pipeline.settle(first)
    (sub_batch,) = first.sub_batches
    leader, _ = sub_batch.teacher_calls[0][0].calls
    sub_batch.state = State.DONE  # the first rank had published when the second died
    teacher.unread.clear()
    called = len(teacher.calls)
    pipeline.resubmit("t0", 0)
    assert [part for part, _ in teacher.calls[called:]] == [_part(second.sub_batches[0].teachers[0][0], 0)]
    assert list(sub_batch.all_teacher_calls) == [leader]


def test_lost_teacher_is_not_called_and_blocks_nothing():
    pipeline, teachers = build(config(depth=1, teachers=({"export": "logits"}, {})))
    first, second = pipeline.submit(documents(0)), pipeline.submit(documents(1))
    pipeline.settle(first)
    assert first.sub_batches[-1].state is State.QUEUED, "the small ring delays it"
    called = len(teachers[0].calls)
    pipeline.lose("t0")
    assert all(sub_batch.state is State.TEACHING for sub_batch in first.sub_batches)
    assert [len(teacher) for sub_batch in first.sub_batches for teacher in sub_batch.published] == [0, 1] * len(
        first.sub_batches
    )
    for batch in (first, second):
        train(pipeline, teachers, batch)
    assert len(teachers[0].calls) == called
    assert pipeline.lost == {"t0"}


def test_an_abandoned_pipeline_begins_anew():
    settings = config(depth=1, teachers=({"export": "logits"},))
    (pipeline, teachers), (other, others) = build(settings), build(settings)
    dropped = [pipeline.submit(documents(index)) for index in (5, 6)]
    pipeline.settle(dropped[0])
    assert dropped[0].sub_batches[-1].state is State.QUEUED, "the ring is full"
    for batch in dropped:
        batch.release()
    pipeline.abandon()
    teachers[0].unread.clear()  # the rings are opened anew
    before = len(teachers[0].calls)
    for line, group in ((pipeline, teachers), (other, others)):
        batches = [line.submit(documents(index)) for index in range(3)]
        for batch in batches:
            train(line, group, batch)
    assert teachers[0].calls[before:] == others[0].calls


@st.composite
def runs(draw):
    teachers = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "parallel": st.sampled_from([(1, 1), (2, 1), (1, 2)]),
                    "micro": st.sampled_from([1, 2, 4]),
                    "export": st.sampled_from(["topk", "logits", "hidden"]),
                }
            ),
            min_size=1,
            max_size=3,
        )
    )
    settings = config(batch=16, micro=draw(st.sampled_from([1, 2])), depth=draw(st.integers(0, 3)), teachers=teachers)
    least = max(8 // (teacher["parallel"][0] * teacher["micro"]) for teacher in teachers)
    settings.prefetch.slots = draw(st.none() | st.integers(least, 40))
    validates = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    return settings, validates, 8 * draw(st.integers(1, 4)), draw(st.sets(st.integers(0, 5)))


@given(runs())
def test_no_ring_blocks_a_run_or_hands_out_a_slot_twice(case):
    settings, validates, rows, slow = case
    pipeline, teachers = build(settings, rows=rows, slow=slow)
    jobs = (documents(index) for index in range(len(validates)))
    with closing(Lookahead(jobs, pipeline.submit, PendingBatch.release, settings.prefetch.depth)) as items:
        for batch, validate in zip(items, validates):
            with batch.lease():
                train(pipeline, teachers, batch)
            if validate:
                train(pipeline, teachers, pipeline.submit(documents(1000 + batch.documents.index)))
    for teacher in teachers:
        trained = {part for part, _ in teacher.calls}
        assert all(any(part.startswith(f"batch {index} ") for part in trained) for index in range(len(validates)))


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize(("slots", "export"), [(None, "topk"), (None, "logits"), (4, "topk"), (9, "topk")])
def test_sub_batches_do_not_depend_on_the_depth(depth, slots, export):
    plans = {
        ring_plan(config(depth=d, slots=slots, teachers=({"export": export},))).rows_per_sub_batch for d in (depth, 0)
    }
    assert len(plans) == 1
