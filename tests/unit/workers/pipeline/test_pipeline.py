"""The order in which teachers are called and slots are given out; the actors are stood in for by lists of calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_rl.config.derive import ring_plan
from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.data.collate import BatchPlan
from distill_rl.run.prefetch import Lookahead
from distill_rl.types import BatchInfo, Cursor, DocumentBatch
from distill_rl.workers.pipeline.aligner_pool import Pending
from distill_rl.workers.pipeline.pipeline import Pipeline
from distill_rl.workers.pipeline.sub_batch import PendingBatch, State, SubBatch


@dataclass
class Aligners:
    """Every batch fills `rows` rows; the batches in `mended` need a second try."""

    num_parts: int
    rows: int
    mended: set[int] = field(default_factory=set)
    hanging: set[int] = field(default_factory=set)
    """batches on which an aligner hangs until somebody settles them"""
    restarts: int = 0

    def overdue(self, pending: Pending) -> bool:
        return pending.batch.index in self.hanging

    def submit(self, batch: DocumentBatch) -> Pending:
        return Pending(batch, 0, "info", [f"batch {batch.index} part {part}" for part in range(self.num_parts)])

    def settle(self, pending: Pending) -> tuple[BatchInfo, bool]:
        again = pending.batch.index in self.mended
        if again:
            pending.parts[:] = [f"mended {part}" for part in pending.parts]
        return BatchInfo(pending.batch.index, Cursor(), 0, self.rows, 0, 0, 0, 0.0), again


@dataclass
class Teacher:
    name: str
    calls: list[tuple[Any, tuple]] = field(default_factory=list)
    unread: dict[tuple[int, int], str] = field(default_factory=dict)
    """(first rank of a replica, slot) → the part in it that the student is not done with"""

    def submit(self, method: str, *arguments: Any, ranks: range) -> dict[str, str]:
        assert method == "forward"
        self.calls.append(arguments)
        part, slots = arguments
        for slot in slots:
            assert (ranks[0], slot.index) not in self.unread, f"slot {slot.index} was given out before it was read"
            self.unread[ranks[0], slot.index] = part
        return {f"{self.name} call {len(self.calls)} rank {rank}": f"{self.name}/{rank}" for rank in ranks}

    def read(self, parts: Sequence[str]) -> None:
        """The student is done with what was made of these parts."""
        self.unread = {place: part for place, part in self.unread.items() if part not in parts}


def config(*, batch=8, micro=2, depth=1, slots=None, teachers=({},)) -> Config:
    made = Config()
    made.train.global_batch_size, made.train.micro_batch_size = batch, micro
    made.prefetch.depth, made.prefetch.slots = depth, slots
    made.teachers = [
        TeacherConfig(name=f"t{n}", parallel=ParallelConfig(*each.get("parallel", (1, 1))),
                      micro_batch_size=each.get("micro"), export=each.get("export", "topk"))
        for n, each in enumerate(teachers)
    ]  # fmt: skip
    return made


def build(made: Config, *, rows: int | None = None, mended=()) -> tuple[Pipeline, list[Teacher]]:
    plan, rings = BatchPlan.from_config(made, 0), ring_plan(made)
    parts = plan.sub_batches * (plan.student.dp + sum(share.dp for share in plan.teachers))
    aligners = Aligners(parts, rows or made.train.global_batch_size, set(mended))
    teachers = [Teacher(teacher.name) for teacher in made.teachers]
    return Pipeline(aligners, list(zip(made.teachers, teachers)), plan, rings), teachers


def documents(index: int) -> DocumentBatch:
    return DocumentBatch(index, (), Cursor())


def train(pipeline: Pipeline, teachers: Sequence[Teacher], batch: PendingBatch) -> None:
    """What StudentGroup does: a sub-batch is called when the teachers have been, and the oldest is waited for."""
    submitted = [(sub_batch, [list(parts) for parts in sub_batch.teachers]) for sub_batch in batch.sub_batches]
    pipeline.settle(batch)
    for sub_batch, parts in submitted:
        if sub_batch.state is State.RELEASED:  # it had no rows, or was aligned again
            _read(teachers, parts)
    running = deque()
    for sub_batch in batch.sub_batches:
        while sub_batch.state is State.QUEUED:
            _finish(pipeline, teachers, running.popleft())
        running.append(sub_batch)
    while running:
        _finish(pipeline, teachers, running.popleft())


def _finish(pipeline: Pipeline, teachers: Sequence[Teacher], sub_batch: SubBatch) -> None:
    _read(teachers, sub_batch.teachers)
    pipeline.finish(sub_batch)
    assert sub_batch.published == [], "references would keep alive what was in the slots"


def _read(teachers: Sequence[Teacher], parts_by_teacher: Sequence[Sequence[str]]) -> None:
    for teacher, parts in zip(teachers, parts_by_teacher):
        teacher.read(parts)


def test_teachers_see_depth_batches_ahead_and_no_more():
    pipeline, (teacher,) = build(config(depth=2))
    batches = [pipeline.submit(documents(index)) for index in range(3)]
    pipeline.settle(batches[0])
    assert [part for part, _ in teacher.calls] == [f"batch {index} part 1" for index in range(3)]
    held = [slot.index for _, slots in teacher.calls for slot in slots]
    assert sorted(held) == list(range(12))


def test_a_whole_ring_holds_each_batch_in_one_wave():
    pipeline, teachers = build(config(depth=1))
    with Lookahead((documents(i) for i in range(5)), pipeline.submit, PendingBatch.release, 1) as items:
        for batch in items:
            with batch.lease():
                train(pipeline, teachers, batch)
    assert [len(slots) for _, slots in teachers[0].calls] == [4] * 5


def test_a_logits_ring_of_two_slots_takes_a_batch_in_waves_and_validation_goes_between():
    pipeline, teachers = build(config(depth=1, teachers=({"export": "logits"},)))
    (teacher,) = teachers
    first, second = pipeline.submit(documents(0)), pipeline.submit(documents(1))
    train(pipeline, teachers, first)
    assert len(teacher.calls) == 5  # and one of the next batch: the other slot is kept free for whatever comes first
    train(pipeline, teachers, pipeline.submit(documents(77)))
    train(pipeline, teachers, second)
    assert [part for part, _ in teacher.calls] == [
        *(f"batch 0 part {4 + sub_batch}" for sub_batch in range(4)),
        "batch 1 part 4",
        *(f"batch 77 part {4 + sub_batch}" for sub_batch in range(4)),
        *(f"batch 1 part {4 + sub_batch}" for sub_batch in range(1, 4)),
    ]


def test_the_student_waits_for_nothing_but_the_wave_before_the_last_of_a_ring():
    pipeline, (teacher,) = build(config(depth=0, slots=2))
    batch = pipeline.submit(documents(0))
    pipeline.settle(batch)
    assert [sub_batch.state is not State.QUEUED for sub_batch in batch.sub_batches] == [True, True, False, False]
    teacher.read(batch.sub_batches[0].teachers[0])
    pipeline.finish(batch.sub_batches[0])
    assert [sub_batch.state is not State.QUEUED for sub_batch in batch.sub_batches] == [True, True, True, False]


def test_a_batch_that_is_aligned_again_is_taught_again_in_slots_that_were_given_back():
    pipeline, (teacher,) = build(config(), mended=[0])
    batch = pipeline.submit(documents(0))
    failed = {slot.index: slot.generation for _, slots in teacher.calls for slot in slots}
    teacher.unread.clear()  # a call whose argument failed has written nothing
    pipeline.settle(batch)
    part, again = teacher.calls[-1]
    assert part == "mended batch 0 part 1"
    assert len(teacher.calls) == 2
    for slot in again:
        assert slot.generation == failed.get(slot.index, 2) + 2


def test_waves_without_rows_are_left_out_and_cost_the_next_batch_nothing():
    pipeline, teachers = build(config(depth=0, slots=2), rows=2)
    for index in range(3):
        batch = pipeline.submit(documents(index))
        train(pipeline, teachers, batch)
        assert len(batch.sub_batches) == 1
    assert pipeline.occupancy() == {"t0": 1.0}
    assert pipeline.occupancy() == {"t0": 0.0}


def test_a_replica_that_took_anothers_place_is_called_on_all_that_is_open_in_the_old_order_and_slots():
    pipeline, teachers = build(config(depth=2, teachers=({"parallel": (2, 2)}, {})))
    batches = [pipeline.submit(documents(index)) for index in range(3)]
    train(pipeline, teachers, batches[0])
    other, calls = teachers[1].calls.copy(), teachers[0].calls.copy()
    kept = [list(sub_batch.teacher_calls[0][0]) for batch in batches[1:] for sub_batch in batch.sub_batches]
    teachers[0].unread.clear()  # the new ring is empty
    pipeline.resubmit("t0", 1)
    assert teachers[0].calls[len(calls) :] == [
        call for call in calls if call[0] in ("batch 1 part 2", "batch 2 part 2")
    ]
    assert teachers[1].calls == other
    for batch, before in zip(batches[1:], kept):
        (sub_batch,) = batch.sub_batches
        assert list(sub_batch.teacher_calls[0][0]) == before, "the living replica is left alone"
        assert [ref.rpartition(" ")[2] for ref in sub_batch.teacher_calls[0][1]] == ["2", "3"]
        assert [len(teacher) for teacher in sub_batch.published] == [2, 1]


def test_a_wave_that_was_learnt_is_not_taught_again_by_a_new_replica():
    pipeline, (teacher,) = build(config(depth=1, teachers=({"parallel": (1, 2)},)))
    first, second = pipeline.submit(documents(0)), pipeline.submit(documents(1))
    pipeline.settle(first)
    (sub_batch,) = first.sub_batches
    leader, _ = sub_batch.teacher_calls[0][0]
    sub_batch.state = State.DONE  # the first rank had published when the second died
    teacher.unread.clear()
    called = len(teacher.calls)
    pipeline.resubmit("t0", 0)
    assert [part for part, _ in teacher.calls[called:]] == [second.sub_batches[0].teachers[0][0]]
    assert list(sub_batch.all_teacher_calls) == [leader]


def test_a_teacher_that_is_lost_is_called_no_more_and_its_ring_stops_nobody():
    pipeline, teachers = build(config(depth=1, teachers=({"export": "logits"}, {})))
    first, second = pipeline.submit(documents(0)), pipeline.submit(documents(1))
    pipeline.settle(first)
    assert first.sub_batches[-1].state is State.QUEUED, "the small ring holds it up"
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


def test_a_batch_to_come_on_which_an_aligner_hangs_is_looked_after_while_another_is_waited_for():
    pipeline, (teacher,) = build(config(), mended=[1])
    first, second = pipeline.submit(documents(0)), pipeline.submit(documents(1))
    pipeline.settle(first)
    pipeline.check_aligners()
    assert len(teacher.calls) == 2, "nobody hangs"
    pipeline._aligners.hanging.add(1)
    teacher.read(second.sub_batches[0].teachers[0])  # a call whose argument failed has written nothing
    pipeline.check_aligners()
    assert [part for part, _ in teacher.calls] == ["batch 0 part 1", "batch 1 part 1", "mended batch 1 part 1"]
    pipeline.check_aligners()
    assert len(teacher.calls) == 3, "once is enough"


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
    made = config(batch=16, micro=draw(st.sampled_from([1, 2])), depth=draw(st.integers(0, 3)), teachers=teachers)
    least = max(8 // (each["parallel"][0] * each["micro"]) for each in teachers)
    made.prefetch.slots = draw(st.none() | st.integers(least, 40))
    return made, draw(st.lists(st.booleans(), min_size=1, max_size=6))


@given(runs())
def test_no_ring_stops_a_run_and_no_slot_is_given_out_twice(case):
    made, validates = case
    pipeline, teachers = build(made)
    jobs = (documents(index) for index in range(len(validates)))
    with Lookahead(jobs, pipeline.submit, PendingBatch.release, made.prefetch.depth) as items:
        for batch, validate in zip(items, validates):
            with batch.lease():
                train(pipeline, teachers, batch)
            if validate:
                train(pipeline, teachers, pipeline.submit(documents(1000 + batch.index)))
    for teacher in teachers:
        trained = {part for part, _ in teacher.calls}
        assert all(any(part.startswith(f"batch {index} ") for part in trained) for index in range(len(validates)))


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize(("slots", "export"), [(None, "topk"), (None, "logits"), (4, "topk"), (9, "topk")])
def test_the_waves_of_a_batch_do_not_depend_on_the_depth(depth, slots, export):
    plans = {
        ring_plan(config(depth=d, slots=slots, teachers=({"export": export},))).rows_per_sub_batch for d in (depth, 0)
    }
    assert len(plans) == 1
