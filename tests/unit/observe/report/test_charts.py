from __future__ import annotations

import math

import pytest

from distill_rl.observe.report import report
from distill_rl.observe.report.report import Chart, Curve, StepLists, decimate, line_chart, number, stacked_chart, thin


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.03188123, "0.03188"),
        (1.0, "1"),
        (614400, "614,400"),
        (1234.5, "1,234"),
        (2e-5, "2e-5"),
        (0.000734, "7.34e-4"),
        (1.5e9, "1.5e9"),
        (-3e12, "-3e12"),
        (-2, "-2"),
        (math.nan, "—"),
        (math.inf, "—"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_values_that_are_not_finite_make_gaps() -> None:
    chart = line_chart("t", [Curve("a", [(1, 1.0), (2, math.nan), (3, 2.0), (4, math.inf)])])
    assert chart is not None
    assert chart.notes == ["2 not finite"]
    (curve,) = chart.data({}, 100)["curves"]
    assert curve["values"] == [1, None, 2, None]


def test_values_over_several_decades_get_a_log_axis() -> None:
    curve = Curve("a", [(step, 10.0**-step) for step in range(5)])
    for linear in (False, True):
        chart = line_chart("t", [curve], linear=linear)
        assert chart is not None
        assert chart.logarithmic is not linear


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_values_that_are_not_positive_get_a_linear_axis(low: float) -> None:
    chart = line_chart("t", [Curve("a", [(1, low), (2, 1000.0)])])
    assert chart is not None
    assert not chart.logarithmic


@pytest.mark.parametrize("points", [[], [(1, math.nan)]])
def test_nothing_to_draw_gives_no_chart(points: list[report.Point]) -> None:
    assert line_chart("t", [Curve("a", points)]) is None


@pytest.mark.parametrize("limit", [4, 5, 100, 2000])
@pytest.mark.parametrize("length", [3, 101, 10_001])
def test_decimation_keeps_ends_order_and_extremes(length: int, limit: int) -> None:
    points = [(float(step), math.sin(step * 12.9898) * 43.7) for step in range(length)]
    points[length // 2] = (float(length // 2), 1e6)
    points[length // 3] = (float(length // 3), -1e6)
    kept = decimate(points, limit)
    assert len(kept) <= max(limit, 4)
    assert kept == sorted(kept)
    assert {points[0], points[-1], points[length // 2], points[length // 3]} <= set(kept)
    assert set(kept) <= set(points)


def test_decimation_keeps_a_gap_that_fills_a_stretch() -> None:
    points = [(float(step), math.nan if 400 <= step < 600 else 1.0) for step in range(1000)]
    kept = decimate(points, 50)
    assert any(math.isnan(value) for _, value in kept)
    assert sum(math.isnan(value) for _, value in kept) < 20


def test_curves_with_the_same_steps_share_them() -> None:
    steps: StepLists = {}
    chart = Chart("t", [Curve("a", [(step, 0.5) for step in of]) for of in ((1.0, 2.0), (1.0, 3.0), (1.0, 2.0))])
    assert [curve["steps"] for curve in chart.data(steps, 100)["curves"]] == [0, 1, 0]
    assert list(steps) == [(1, 2), (1, 3)]


def test_stacked_curves_show_their_shares_and_are_thinned_to_means() -> None:
    a = Curve("a", [(step, 1.0) for step in range(10_000)])
    b = Curve("b", [(step, 2.0 + 2 * (step % 2)) for step in range(10_000)])
    chart = stacked_chart("t", [a, b], "s")
    assert chart is not None
    assert [curve.label for curve in chart.curves] == ["a 25%", "b 75%"]
    assert len(chart.curves[1].points) <= report.MAX_AREA_POINTS
    assert chart.curves[1].points[0][1] == pytest.approx(3.0)


def test_thinned_means_leave_out_what_is_not_finite() -> None:
    assert thin([(0, 1.0), (1, math.nan), (2, 5.0), (3, 7.0)], 2) == [(0.5, 1.0), (2.5, 6.0)]


def test_a_slow_first_step_does_not_flatten_the_stack() -> None:
    chart = stacked_chart("t", [Curve("a", [(1, 100.0)] + [(step, 1.0) for step in range(2, 11)])], "s")
    assert chart is not None
    assert chart.notes == ["step 1: 100 s, cut off"]
    assert chart.ceiling == 2.0


@pytest.mark.parametrize("curves", [[], [Curve("a", [])], [Curve("a", [(1, 0.0)])]])
def test_no_time_gives_no_stack(curves: list[Curve]) -> None:
    assert stacked_chart("t", curves, "s") is None
