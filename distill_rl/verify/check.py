"""The result of one check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, whether it holds, and how this was found."""

    name: str
    """What must hold"""
    passed: bool | None
    """None: there was nothing to check"""
    detail: str
    """How many items were checked, the first one that failed, or the worst value and its bound"""


def check_each(name: str, problems: Iterable[str | None], items: str) -> Check:
    """The result of a check of many items, which passes if none has a problem.

    Without items it neither passes nor fails (`passed` is None). `detail` names the first problem and its index.

    Args:
        name: what must hold.
        problems: for each item, what is wrong with it, or None.
        items: what to call the items in `detail`.
    """
    results = list(problems)
    failed = [(i, problem) for i, problem in enumerate(results) if problem is not None]
    if failed:
        i, problem = failed[0]
        return Check(name, False, f"{len(failed)} of {len(results)} {items} fail, first at index {i}: {problem}")
    return Check(name, True if results else None, f"{len(results)} {items}")


def check_bound(name: str, values: Sequence[float], bound: float, what: str) -> Check:
    """The result of a check that all measured numbers are at most `bound`. NaN fails.

    Args:
        name: what must hold.
        values: at least one.
        what: put before the largest value in `detail`.
    """
    value = float(np.max(values))
    return Check(name, value <= bound, f"{what} {value:.1e}, at most {bound:.0e}")
