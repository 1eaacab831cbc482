"""What a run says about steps that were skipped or had no labels, and when it has learnt nothing."""

import math

import pytest

from distill_rl.errors import DistillError, NumericsError
from distill_rl.observe.metrics import Metric, values
from distill_rl.run.steps import Learning, teachers_to_blame


def step(*, skipped=0.0, unlabelled=0.0, nll=2.0, **kd):
    numbers = {"skipped": skipped, "unlabelled": unlabelled, "loss": 1.0, "nll_loss": nll, "grad_norm": 1.0}
    numbers |= {f"kl_loss/{name}" if len(kd) > 1 else "kl_loss": value for name, value in kd.items()}
    return {f"train/{name}": Metric(value) for name, value in numbers.items()}


def noted(learning: Learning, *steps) -> list[str]:
    aligned = {"align/documents": Metric(4), "align/unlabelled": Metric(1)}
    return [line for i, metrics in enumerate(steps, start=1) for line in learning.note(i, metrics, aligned, range(9))]


def test_only_the_teacher_without_finite_kd_is_blamed():
    assert teachers_to_blame(step(a=math.nan), ["a"]) == ["a"]
    assert teachers_to_blame(step(a=1.0, b=math.inf), ["a", "b"]) == ["b"]
    assert teachers_to_blame(step(a=math.nan, nll=math.nan), ["a"]) == [], "the student itself may be at fault"
    assert teachers_to_blame(step(), []) == []


def test_one_step_with_labels_that_is_not_skipped_is_enough():
    learning = Learning(["a"])
    noted(learning, step(a=1.0, unlabelled=1.0), step(a=math.nan, skipped=1.0))
    with pytest.raises(
        NumericsError, match="one of the 2 steps must change the weights; got the rest skipped: the KD with teacher a"
    ):
        learning.require_learnt()
    noted(learning, step(a=1.0))
    learning.require_learnt()
    assert values(learning.metrics) == {"faults/skipped_steps": 1.0, "faults/unlabelled_steps": 1.0}


def test_a_run_without_labels_has_learnt_nothing_unless_an_earlier_start_did():
    for learnt in (False, True):
        learning = Learning([], learnt=learnt)
        lines = noted(learning, *[step(unlabelled=1.0)] * 5)
        assert len(lines) == 4, "three steps, and that there are more"
        assert (
            lines[0]
            == "no labels step 1: nothing in its documents is trained on (rows 0, 1, 2, 3, 4, 5, 6, 7, … of the data)"
        )
        assert learning.summary() == [
            "no labels 5 of 20 documents had no token to train on",
            "no labels 5 of 5 steps had nothing to train on",
        ]
        if learnt:
            learning.require_learnt()
        else:
            with pytest.raises(DistillError, match="at least one row must have a token to train on") as raised:
                learning.require_learnt()
            assert raised.value.exit_code == 1


def test_nothing_is_said_about_a_run_without_incidents():
    learning = Learning([])
    assert learning.note(1, step(), {"align/documents": Metric(4), "align/unlabelled": Metric(0)}, range(4)) == []
    assert (learning.summary(), learning.metrics) == ([], {})
