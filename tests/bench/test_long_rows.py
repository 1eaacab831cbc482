"""The benchmark of divided rows: which results miss its targets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.long_rows import verdict


def figures(**last: int) -> dict[str, Any]:
    """Figures of two cases, of which `last` changes the second."""
    cases = [
        {"sp": 1, "estimate": 1000, "measured": 1000, "short_rows": 200, "positions": 800},
        {"sp": 2, "estimate": 600, "measured": 600, "short_rows": 200, "positions": 400},
    ]
    return {"mib": [cases[0], cases[1] | last]}


@pytest.mark.parametrize(
    ("last", "missed"),
    [
        ({}, []),
        ({"estimate": 400}, ["sp 2: estimate 400 MiB, measured 600 MiB"]),
        ({"positions": 521}, ["sp 2: the positions take 521 of 800 MiB"]),
    ],
)
def test_an_estimate_that_is_off_or_positions_that_are_not_divided_miss_the_target(last, missed):
    assert verdict(figures(**last)) == missed
