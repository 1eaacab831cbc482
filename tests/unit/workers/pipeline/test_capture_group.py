"""A teacher that dies while it writes its last targets is replaced, as long as the budget of restarts lasts."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from distill_rl.config.schema import Config
from distill_rl.errors import WorkerError
from distill_rl.workers.pipeline.capture_group import CaptureGroup


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
    return CaptureGroup(Config(), teachers, SimpleNamespace(gather=gather), pipeline, recovery)


def test_a_teacher_that_dies_while_writing_is_replaced():
    recovery = Recovery(budget=2)
    group = capture_group([WorkerError("big", "died"), WorkerError("other", "died"), [10, 20]], recovery)
    assert group.finish() == 30
    assert group.restarts == 2, "the caller goes through the documents again"
    assert recovery.found == ["writing the last targets"] * 2


def test_without_a_budget_the_capture_ends():
    group = capture_group([WorkerError("big", "died")], Recovery(budget=0))
    with pytest.raises(WorkerError, match="may be started again"):
        group.finish()
