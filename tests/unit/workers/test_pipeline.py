"""The order in which teachers are called and slots are given out; the actors are stood in for by lists of calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_rl.config.derive import ring_plan
from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.data.collate import BatchPlan
from distill_rl.prefetch import Lookahead
from distill_rl.types import BatchInfo, Cursor, DocumentBatch
from distill_rl.workers.pipeline import PendingBatch, Pipeline
from distill_rl.workers.pool import Pending


@dataclass
class Aligners:
    """Every batch fills `rows` rows; the batches in `mended` need a second try."""

    num_parts: int
    rows: int
    mended: set[int] = field(default_factory=set)

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

    def submit(self, method: str, *arguments: Any, ranks: range) -> dict[str, str]:
        assert method == "forward"
        self.calls.append(arguments)
        return {f"{self.name} call {len(self.calls)} rank {rank}": f"{self.name}/{rank}" for rank in ranks}


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
    parts = plan.waves * (plan.student.dp + sum(share.dp for share in plan.teachers))
    aligners = Aligners(parts, rows or made.train.global_batch_size, set(mended))
    teachers = [Teacher(teacher.name) for teacher in made.teachers]
    return Pipeline(aligners, list(zip(made.teachers, teachers)), plan, rings), teachers


def documents(index: int) -> DocumentBatch:
    return DocumentBatch(index, (), Cursor())


def train(pipeline: Pipeline, batch: PendingBatch) -> None:
    """What StudentGroup does: a wave is called when the teachers have been, and the oldest is waited for."""
    pipeline.settle(batch)
    running = []
    for wave in batch.waves:
        while not wave.taught:
            pipeline.finish(running.pop(0))
        running.append(wave)
    for wave in running:
        pipeline.finish(wave)


def test_teachers_see_depth_batches_ahead_and_no_more():
    pipeline, (teacher,) = build(config(depth=2))
    batches = [pipeline.submit(documents(index)) for index in range(3)]
    pipeline.settle(batches[0])
    assert [part for part, _ in teacher.calls] == [f"batch {index} part 1" for index in range(3)]
    held = [slot.index for _, slots in teacher.calls for slot in slots]
    assert sorted(held) == list(range(12))


def test_a_whole_ring_holds_each_batch_in_one_wave_and_two_batches_never_share_a_slot():
    pipeline, (teacher,) = build(config(depth=1))
    with Lookahead((documents(i) for i in range(5)), pipeline.submit, PendingBatch.release, 1) as items:
        for batch in items:
            with batch.lease():
                train(pipeline, batch)
    assert [len(slots) for _, slots in teacher.calls] == [4] * 5
    for (_, earlier), (_, later) in zip(teacher.calls, teacher.calls[1:]):
        assert not {slot.index for slot in earlier} & {slot.index for slot in later}


def test_a_logits_ring_of_two_slots_takes_a_batch_in_waves_and_validation_goes_between():
    pipeline, (teacher,) = build(config(depth=1, teachers=({"export": "logits"},)))
    first, second = pipeline.submit(documents(0)), pipeline.submit(documents(1))
    train(pipeline, first)
    assert len(teacher.calls) == 5  # and one of the next batch: the other slot is kept free for whatever comes first
    train(pipeline, pipeline.submit(documents(77)))
    train(pipeline, second)
    assert [part for part, _ in teacher.calls] == [
        *(f"batch 0 part {4 + wave}" for wave in range(4)),
        "batch 1 part 4",
        *(f"batch 77 part {4 + wave}" for wave in range(4)),
        *(f"batch 1 part {4 + wave}" for wave in range(1, 4)),
    ]


def test_a_batch_that_is_aligned_again_is_taught_again_in_the_same_slots():
    pipeline, (teacher,) = build(config(), mended=[0])
    batch = pipeline.submit(documents(0))
    train(pipeline, batch)
    (_, failed), (part, again) = teacher.calls
    assert part == "mended batch 0 part 1"
    assert [slot.generation for slot in again] == [4 + 2 * (slot.index in {s.index for s in failed}) for slot in again]


def test_waves_without_rows_are_left_out():
    pipeline, (teacher,) = build(config(slots=2), rows=2)
    batch = pipeline.submit(documents(0))
    train(pipeline, batch)
    assert len(batch.waves) == 1
    train(pipeline, pipeline.submit(documents(1)))
    assert sum(part.startswith("batch 1") for part, _ in teacher.calls) >= 1


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
    return made, draw(st.lists(st.booleans(), min_size=1, max_size=6)), draw(st.integers(1, 2)) * 8


@given(runs())
def test_no_ring_stops_a_run_and_no_slot_is_held_twice(case):
    made, validates, rows = case
    pipeline, teachers = build(made, rows=rows)
    jobs = (documents(index) for index in range(len(validates)))
    with Lookahead(jobs, pipeline.submit, PendingBatch.release, made.prefetch.depth) as items:
        for batch, validate in zip(items, validates):
            with batch.lease():
                train(pipeline, batch)
            if validate:
                train(pipeline, pipeline.submit(documents(1000 + batch.index)))
    for teacher in teachers:
        for name, seen in _generations(teacher).items():
            assert seen == sorted(set(seen)), name
    assert set(pipeline.occupancy()) == {teacher.name for teacher in made.teachers}


def _generations(teacher: Teacher) -> dict[int, list[int]]:
    """Slot → its generations, in the order of the calls of one replica."""
    seen: dict[int, list[int]] = {}
    for _, slots in dict.fromkeys(teacher.calls):
        for slot in slots:
            if not seen.get(slot.index) or seen[slot.index][-1] != slot.generation:
                seen.setdefault(slot.index, []).append(slot.generation)
    return seen


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize(("slots", "export"), [(None, "topk"), (None, "logits"), (4, "topk"), (9, "topk")])
def test_the_waves_of_a_batch_do_not_depend_on_the_depth(depth, slots, export):
    plans = {ring_plan(config(depth=d, slots=slots, teachers=({"export": export},))).rows_per_wave for d in (depth, 0)}
    assert len(plans) == 1
