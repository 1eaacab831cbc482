"""Figures for Markdown."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_rl.observe.report.report import Chart, Curve, Dots, dots_svg, lines_svg, ticks_between

SVG = "{http://www.w3.org/2000/svg}"


def circles(picture: ET.Element) -> list[tuple[float, float]]:
    return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in picture.iter(f"{SVG}circle")]


def texts(picture: ET.Element) -> list[str]:
    return [one.text or "" for one in picture.iter(f"{SVG}text")]


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_are_few_and_enclose_the_values(low: float, span: float) -> None:
    ticks = ticks_between(low, low + span)
    tolerance = 1e-6 * max(abs(low), span, 1.0)
    assert ticks[0] <= low + tolerance
    assert ticks[-1] >= low + span - tolerance
    assert 2 <= len(ticks) <= 8


def test_dots_lie_on_one_scale() -> None:
    rows = [Dots("a < b", [0.2, 0.4], 0.3), Dots("CE", [0.0, 0.1], 0.05, marked=True)]
    picture = ET.fromstring(dots_svg("Score & seed", rows, "exact match"))
    assert {"Score & seed", "a < b", "CE", "exact match"} <= set(texts(picture))
    first, second, *below = circles(picture)
    bars = [bar for bar in picture.iter(f"{SVG}rect") if "x" in bar.attrib]
    mean, lower = (float(bar.attrib["x"]) + float(bar.attrib["width"]) / 2 for bar in bars)
    assert first[1] == second[1] < below[0][1]
    assert mean == pytest.approx((first[0] + second[0]) / 2, abs=0.2)
    assert below[0][0] < lower < below[1][0] < first[0]


def test_lines_grow_upwards_over_a_logarithmic_axis() -> None:
    chart = Chart("Score", [Curve("KD", [(125, 0.1), (250, 0.2), (500, 0.4)]), Curve("CE", [(125, 0.0), (500, 0.1)])])
    picture = ET.fromstring(lines_svg(chart, x_name="rows", y_name="score"))
    assert {"KD", "CE", "rows", "score", "125", "500"} <= set(texts(picture))
    places = circles(picture)[:3]
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[0][1] - places[1][1] == pytest.approx((places[1][1] - places[2][1]) / 2, abs=0.2)
    assert len(list(picture.iter(f"{SVG}polyline"))) == 2


def test_more_curves_than_colours_are_told_apart_by_dashes() -> None:
    chart = Chart("Score", [Curve(f"{i}", [(1, 0.1 * i), (2, 0.2)]) for i in range(10)])
    lines = list(ET.fromstring(lines_svg(chart, x_name="rows", y_name="score")).iter(f"{SVG}polyline"))
    styles = [(line.attrib["stroke"], line.attrib.get("stroke-dasharray")) for line in lines]
    assert len(set(styles)) == 10
    assert [dash is not None for _, dash in styles] == [False] * 8 + [True] * 2
