"""A teacher that dies during a batch or while it writes its last targets is replaced, as long as the budget of restarts lasts."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace

import pytest

from distill_rl.config.schema import Config
from distill_rl.errors import WorkerError
from distill_rl.workers.pipeline.student_group import CaptureGroup
from distill_rl.workers.pipeline.sub_batch import State


@dataclass
class Recovery:
    """Replaces dead teachers `budget` times."""

    budget: int
    restarts: int = 0
    found: list[str] = field(default_factory=list)

    def find_dead(self, error: WorkerError, what: str) -> None:
        self.found.append(what)

    def replace_dead(self) -> None:
        if self.restarts == self.budget:
            raise WorkerError("teacher big", "may be started again")
        self.restarts += 1


def capture_group(outcomes: list, recovery: Recovery) -> CaptureGroup:
    """The group of two teachers whose calls have these outcomes: the bytes that each has written, or an error."""

    def gather(calls: dict, **_: object) -> list:
        assert list(calls) == ["finish_store of big", "finish_store of other"]
        outcome = outcomes.pop(0)
        if isinstance(outcome, WorkerError):
            raise outcome
        return outcome

    def teacher(name: str) -> SimpleNamespace:
        return SimpleNamespace(submit=lambda method: {f"{method} of {name}": name})

    teachers = [(SimpleNamespace(name=name), teacher(name)) for name in ("big", "other")]
    pipeline = SimpleNamespace(advance=None, awaited=None)
    return CaptureGroup(Config(), SimpleNamespace(gather=gather), pipeline, recovery, teachers)


def test_a_teacher_that_dies_while_writing_is_replaced():
    recovery = Recovery(budget=2)
    group = capture_group([WorkerError("big", "died"), WorkerError("other", "died"), [10, 20]], recovery)
    assert group.finish() == 30
    assert group.restarts == 2, "the caller goes through the documents again"
    assert recovery.found == ["writing the last targets"] * 2


class PlayedSubBatch:
    """Two replicas of a teacher, whose calls both have to end."""

    state, leaders = State.TEACHING, (("leader 0",), ("leader 1",))
    all_teacher_calls = MappingProxyType(dict.fromkeys(("leader 0", "other rank 0", "leader 1", "other rank 1"), "big"))

    def __init__(self):
        self.ended = []

    def call_student(self, calls):
        self.ended.append(dict(calls))

    def finish(self):
        self.ended.append("finished")


def test_a_teacher_that_dies_during_a_batch_is_replaced():
    outcomes = [WorkerError("big", "died"), ["stats 0", None, "stats 1", None]]
    recovery, sub_batch, finished = Recovery(budget=1), PlayedSubBatch(), []
    batch = SimpleNamespace(documents=SimpleNamespace(index=6), sub_batches=[sub_batch])

    def gather(calls: dict, **_: object) -> list:
        assert len(calls) == 4
        if isinstance(outcome := outcomes.pop(0), WorkerError):
            raise outcome
        return outcome

    pipeline = SimpleNamespace(advance=None, awaited=None, settle=lambda _: "info", finish=finished.append)
    group = CaptureGroup(Config(), SimpleNamespace(gather=gather), pipeline, recovery, [])
    assert group.capture(batch) == ("info", ["stats 0", "stats 1"])
    assert (group.restarts, recovery.found) == (1, ["the capture of batch 7"])
    assert sub_batch.ended == [{}, "finished"]
    assert finished == [sub_batch]


def test_without_a_budget_the_capture_ends():
    group = capture_group([WorkerError("big", "died")], Recovery(budget=0))
    with pytest.raises(WorkerError, match="may be started again"):
        group.finish()
