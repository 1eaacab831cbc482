"""Which steps are skipped, and when the run ends."""

import math

import pytest

from distill_rl.config.schema import FaultsConfig
from distill_rl.errors import NumericsError
from distill_rl.student.optim import StepGuard


def skipped(guard: StepGuard, *steps: tuple[float, float]) -> list[bool]:
    return [guard.reason_to_skip(number, *step) is not None for number, step in enumerate(steps, start=1)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_non_finite_values_are_skipped_and_named(bad, place):
    values = [2.0, 3.0]
    values[place] = bad
    reason = StepGuard(FaultsConfig()).reason_to_skip(1, *values)
    assert reason == f"its {('loss', 'gradient norm')[place]} must be finite; got {bad}"


def test_only_consecutive_skips_count():
    guard = StepGuard(FaultsConfig(skipped_steps=2))
    bad, good = (math.nan, 1.0), (1.0, 1.0)
    assert skipped(guard, bad, bad, good, bad, bad) == [True, True, False, True, True]
    with pytest.raises(NumericsError, match=r"step 6: its loss must be finite; got nan after 2 steps skipped in a row"):
        guard.reason_to_skip(6, *bad)


def test_zero_allowed_skips():
    with pytest.raises(NumericsError, match=r"step 1: its loss must be finite; got nan; lower"):
        StepGuard(FaultsConfig(skipped_steps=0)).reason_to_skip(1, math.nan, 1.0)


def test_spike_exceeds_the_median_of_a_full_window():
    guard = StepGuard(FaultsConfig(spike_window=3, spike_factor=4.0, skipped_steps=9))
    calm = [(1.0, 2.0), (1.2, 2.2), (50.0, 2.4)]
    assert skipped(guard, *calm) == [False] * 3  # nothing is a spike before the window is full
    assert skipped(guard, (1.0, 8.9), (1.0, 8.7), (5.0, 1.0), (math.nan, 1.0)) == [True, False, True, True]
    reason = guard.reason_to_skip(9, 1.0, 99.0)
    assert reason == "its gradient norm must be at most 4 x 2.4, the median before it; got 99"


def test_a_loss_that_is_usually_negative_has_no_spikes():
    guard = StepGuard(FaultsConfig(spike_window=3, spike_factor=4.0, skipped_steps=9))
    usual = [(-0.2, 2.0), (-0.1, 2.0), (-0.3, 2.0)]
    assert skipped(guard, *usual, (-0.2, 2.0), (0.5, 2.0), (0.5, 9.0)) == [False] * 5 + [True]


def test_without_a_window_nothing_is_a_spike():
    assert skipped(StepGuard(FaultsConfig()), (1.0, 1.0), (1e30, 1e30)) == [False, False]


def test_steps_without_a_gradient_do_not_lower_the_median():
    guard = StepGuard(FaultsConfig(spike_window=2, spike_factor=2.0))
    assert skipped(guard, (1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0), (1.0, 1.5)) == [False] * 5


def test_error_names_the_teacher_whose_kd_is_not_finite():
    words = r"got nan, from the KD with teacher big \(.*\); check the weights and the dtype of teacher big"
    with pytest.raises(NumericsError, match=words):
        StepGuard(FaultsConfig(skipped_steps=0)).reason_to_skip(1, math.nan, 1.0, ["big"])


def test_guard_resumes_from_saved_state():
    config = FaultsConfig(spike_window=2, spike_factor=2.0, skipped_steps=1)
    first, second = StepGuard(config), StepGuard(config)
    skipped(first, (1.0, 1.0), (1.0, 1.0), (1.0, 9.0))
    second.restore(first.state())
    with pytest.raises(NumericsError, match="2 x 1, the median before it; got 9 after 1 steps"):
        second.reason_to_skip(4, 1.0, 9.0)
