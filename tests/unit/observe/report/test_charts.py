from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest

from distill_rl.observe.report import charts
from distill_rl.observe.report.charts import Series, line_chart, number, stacked_chart, thin


def coordinates(d: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", d)]


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


def test_a_curve_spans_the_plot() -> None:
    chart = line_chart("t", [Series("a", [(1, 1.0), (2, 3.0), (3, 2.0)], 0)])
    assert chart is not None
    (x1, y1), (x2, y2), (x3, y3) = coordinates(chart.marks[0].d)
    assert (x1, x2, x3) == (charts.LEFT, (charts.LEFT + charts.RIGHT) / 2, charts.RIGHT)
    assert y2 == charts.TOP
    assert y1 > y3 > y2


def test_values_that_are_not_finite_make_gaps() -> None:
    chart = line_chart("t", [Series("a", [(1, 1.0), (2, math.nan), (3, 2.0), (4, math.inf)], 0)])
    assert chart is not None
    assert chart.marks[0].d.count("M") == 2
    assert chart.notes == ["2 not finite"]
    assert "nan" not in chart.marks[0].d


def test_values_over_several_decades_get_a_log_axis() -> None:
    chart = line_chart("t", [Series("a", [(step, 10.0**-step) for step in range(5)], 0)])
    assert chart is not None
    assert "log scale" in chart.notes
    heights = [y for _, y in coordinates(chart.marks[0].d)]
    assert heights == sorted(heights)
    drops = [b - a for a, b in pairwise(heights)]
    assert max(drops) - min(drops) < 0.3
    assert [label for _, label in chart.y_ticks] == ["1e-4", "0.001", "0.01", "0.1", "1"]


def test_linear_axis_on_request() -> None:
    chart = line_chart("t", [Series("a", [(1, 1.0), (2, 50.5), (3, 100.0)], 0)], linear=True)
    assert chart is not None
    assert chart.notes == []
    assert [y for _, y in coordinates(chart.marks[0].d)][1] == pytest.approx((charts.TOP + charts.BOTTOM) / 2, abs=1)


@pytest.mark.parametrize("points", [[], [(1, math.nan)]])
def test_nothing_to_draw_gives_no_chart(points: list[charts.Point]) -> None:
    assert line_chart("t", [Series("a", points, 0)]) is None


@pytest.mark.parametrize("value", [0.0, 5.0, -1.0, 1e-12, 1e12])
def test_constant_curves_stay_inside_the_plot(value: float) -> None:
    for points in ([(7, value)], [(1, value), (2, value)]):
        chart = line_chart("t", [Series("a", points, 0)])
        assert chart is not None
        for x, y in coordinates(chart.marks[0].d):
            assert charts.LEFT <= x <= charts.RIGHT
            assert charts.TOP <= y <= charts.BOTTOM
        assert chart.x_ticks
        assert chart.y_ticks


def test_long_curves_are_thinned_to_means() -> None:
    points = [(float(step), float(step)) for step in range(1, 10_001)]
    thinned = thin(points, 400)
    assert len(thinned) <= 400
    assert thinned[0] == (13.0, 13.0)
    chart = line_chart("t", [Series("a", points, 0)])
    assert chart is not None
    assert len(chart.probes) <= charts.MAX_PROBES
    assert sum(probe.width for probe in chart.probes) == pytest.approx(charts.RIGHT - charts.LEFT)


def test_noisy_curves_get_a_moving_average() -> None:
    points = [(float(step), float(step % 2)) for step in range(100)]
    chart = line_chart("t", [Series("a", points, 3, noisy=True)])
    assert chart is not None
    assert [mark.classes for mark in chart.marks] == ["raw", "line"]
    smooth = [y for _, y in coordinates(chart.marks[1].d)][2:-2]
    assert max(smooth) - min(smooth) < 0.3 * (charts.BOTTOM - charts.TOP)


def test_a_probe_lists_only_series_with_a_value() -> None:
    train, validation = Series("train", [(1, 1.0), (2, 2.0)], 0), Series("validation", [(2, 5.0)], 1)
    chart = line_chart("t", [train, validation])
    assert chart is not None
    assert [probe.lines for probe in chart.probes] == [
        ("step 1 · train 1",),
        ("step 2 · train 2 · validation 5",),
    ]


def test_stacked_areas_add_up_and_show_shares() -> None:
    a = Series("a", [(1, 1.0), (2, 1.0)], 0)
    b = Series("b", [(1, 3.0), (2, 3.0)], 1)
    chart = stacked_chart("t", [a, b], "s")
    assert chart is not None
    assert [label for label, *_ in chart.legend] == ["a 25%", "b 75%"]
    top_of_a, top_of_b = (coordinates(mark.d)[0][1] for mark in chart.marks)
    assert top_of_b == charts.TOP
    assert top_of_a == pytest.approx(charts.BOTTOM - (charts.BOTTOM - charts.TOP) / 4, abs=0.1)
    assert coordinates(chart.marks[1].d)[-1][1] == top_of_a, "the second area stands on the first"


def test_a_slow_first_step_does_not_flatten_the_stack() -> None:
    chart = stacked_chart("t", [Series("a", [(1, 100.0)] + [(step, 1.0) for step in range(2, 11)], 0)], "s")
    assert chart is not None
    assert chart.notes == ["step 1: 100 s, cut off"]
    heights = [y for _, y in coordinates(chart.marks[0].d)]
    assert min(heights) == charts.TOP
    assert heights[5] == pytest.approx((charts.TOP + charts.BOTTOM) / 2, abs=0.1)


@pytest.mark.parametrize("series", [[], [Series("a", [], 0)], [Series("a", [(1, 0.0)], 0)]])
def test_no_time_gives_no_stack(series: list[Series]) -> None:
    assert stacked_chart("t", series, "s") is None
