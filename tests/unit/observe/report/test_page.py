"""The vendored chart library, and what is inlined into pages."""

from __future__ import annotations

import hashlib
import json
from importlib import resources

import pytest

from distill_rl.observe.report import report
from distill_rl.observe.report.report import SCRIPTS

UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""sha256 of the files of release 1.6.32 (docs/decisions)."""
ASSETS = resources.files("distill_rl.observe.report") / "assets"


@pytest.mark.parametrize("name", UPLOT)
def test_the_chart_library_is_the_released_file(name: str) -> None:
    assert hashlib.sha256((ASSETS / "uplot" / name).read_bytes()).hexdigest() == UPLOT[name]


def test_pages_carry_the_licence_of_the_library() -> None:
    assert "Permission is hereby granted" in report._library()


@pytest.mark.parametrize("name", [*SCRIPTS, "uplot/uPlot.iife.min.js", "page.css", "charts.css"])
def test_assets_fit_into_their_elements(name: str) -> None:
    text = (ASSETS / name).read_text("utf-8")
    assert "</s" not in text.lower()
    assert "\r" not in text, "a browser would hash another text"
    assert len(text.splitlines()) <= 400


def test_data_read_back_unchanged_and_hold_no_markup() -> None:
    data = {"</script><!--": ["&amp;", "\u2028", "é\ud800", 1.5, None]}
    text = report._json(data)
    assert text.isascii()
    assert not {"<", ">", "&"} & set(text)
    assert json.loads(text) == data
