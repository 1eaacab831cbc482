"""When the student is started again, and when an error ends the run. Lists stand in for the actors."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, DistillError, NumericsError, WorkerError
from distill_rl.workers.pipeline.recovery import StudentRecovery

RANKS = ["student-dp0-tp0", "student-dp1-tp0"]
DIED = WorkerError("student-dp1-tp0", "its process died during step 3", "killed", "resume")


@dataclass
class Parts:
    """Everything around the recovery: what is lost each time it asks, and what it did."""

    lost: list[dict[str, DistillError]]
    done: list[Any] = field(default_factory=list)
    fails: list[DistillError] = field(default_factory=list)
    """What loading the ranks fails with, time after time."""

    def recovery(self, restarts: int = 3) -> StudentRecovery:
        config = Config()
        config.faults.student_restarts = restarts
        return StudentRecovery(config, self._group(), self._calls(), self, self, self)  # type: ignore[arg-type]

    def _calls(self) -> Any:
        def gather(calls: object, **_: object) -> list[Any]:
            if self.fails:
                raise self.fails.pop(0)
            return []

        return SimpleNamespace(
            everyone={*RANKS, "big/dp0-tp0"},
            monitor=None,
            gather=gather,
            dead=dict,
            lost=lambda error, among, what: self.lost.pop(0),
        )

    def _group(self) -> Any:
        renew = lambda ranks, timeout_s: self.done.append(("renew", list(ranks)))  # noqa: E731
        return SimpleNamespace(names=RANKS, actors=RANKS, renew=renew, start=lambda **_: {})

    # The pipeline and the recovery of teachers.
    def abandon(self) -> None:
        self.done.append("abandon")

    def note_dead(self, lost: dict[str, DistillError]) -> None:
        self.done.append(("note", sorted(lost)))

    def replace_dead(self) -> None: ...

    def settle(self, timeout_s: float) -> None: ...

    def connect(self, lost: set[str]) -> None:
        self.done.append("connect")


@pytest.mark.parametrize("error", [ConfigError("data.path", "must exist"), NumericsError("the run", "must be finite")])
def test_an_error_of_another_kind_is_raised_at_once(error):
    parts = Parts(lost=[])
    with pytest.raises(type(error)) as caught:
        parts.recovery().lost(error, "step 3")
    assert caught.value is error


@pytest.mark.parametrize(("lost", "restarts"), [({}, 3), ({"big/dp0-tp0": DIED}, 3), ({RANKS[0]: DIED}, 0)])
def test_an_error_without_a_lost_rank_or_a_budget_is_raised(lost, restarts):
    with pytest.raises(WorkerError) as caught:
        Parts(lost=[lost]).recovery(restarts).lost(DIED, "step 3")
    assert caught.value is DIED


def test_all_ranks_are_replaced_and_rings_opened_before_the_checkpoint_is_loaded(capsys):
    parts = Parts(lost=[])
    recovery = parts.recovery()
    assert recovery.counts() == {}
    assert recovery.restart({RANKS[1]: DIED}, lambda: parts.done.append("load") or "step 2") == "step 2"
    assert parts.done == ["abandon", ("renew", [0, 1]), ("note", [RANKS[1]]), "connect", "load"]
    assert recovery.counts()["faults/student_restarts"].value == 1
    assert "restarting the student (1 of faults.student_restarts=3): student-dp1-tp0" in capsys.readouterr().out


def test_a_restart_that_fails_because_a_teacher_is_late_replaces_it_in_the_next():
    late = WorkerError("big/dp0-tp0", "must end within 1 s", "no answer")
    parts = Parts(lost=[{"big/dp0-tp0": late}], fails=[late])
    recovery = parts.recovery()
    recovery.restart({RANKS[0]: DIED}, lambda: None)
    assert ("note", ["big/dp0-tp0"]) in parts.done
    assert recovery.counts()["faults/student_restarts"].value == 2


def test_a_restart_that_fails_for_another_reason_ends_the_run():
    failure = WorkerError("student-dp0-tp0", "loading failed", "OSError")
    parts = Parts(lost=[{}], fails=[failure])
    with pytest.raises(WorkerError) as caught:
        parts.recovery().restart({RANKS[0]: DIED}, lambda: None)
    assert caught.value is failure


def test_the_budget_ends():
    parts = Parts(lost=[{RANKS[0]: DIED}] * 3, fails=[DIED] * 3)
    recovery = parts.recovery(restarts=2)
    with pytest.raises(WorkerError):
        recovery.restart({RANKS[0]: DIED}, lambda: None)
    assert parts.done.count("abandon") == 2
    with pytest.raises(WorkerError):
        recovery.lost(DIED, "step 3")
