"""The result of one check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    """what must hold"""
    passed: bool | None
    """None: there was nothing to look at, so it says nothing"""
    detail: str
    """how it was found: how many were looked at, the worst value beside its bound, the first that breaks it"""


def every(name: str, outcomes: Iterable[str | None], what: str) -> Check:
    """A check of many things: an outcome is None, or says what is wrong. It neither passes nor fails where there are none."""
    listed = list(outcomes)
    wrong = [(number, outcome) for number, outcome in enumerate(listed) if outcome is not None]
    if wrong:
        number, outcome = wrong[0]
        return Check(name, False, f"{len(wrong)} of {len(listed)} {what}, first number {number}: {outcome}")
    return Check(name, True if listed else None, f"{len(listed)} {what}")


def within(name: str, value: float, bound: float, what: str) -> Check:
    """A check that a measured number is at most `bound`; NaN is not."""
    return Check(name, value <= bound, f"{what} {value:.1e}, at most {bound:.0e}")
