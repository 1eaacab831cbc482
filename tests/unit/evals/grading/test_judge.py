"""Odd and hostile completions, judged by a real suite in real processes."""

from __future__ import annotations

import pytest

from distill_rl.evals.grading.grader import Graded, Grader
from distill_rl.evals.suites.base import Item

TOO_MUCH = {"grader_timeout", "grader_failed"}

HOSTILE = {
    "nested boxes": ("\\boxed{\\boxed{\\frac{1}{2}}}", "\\frac{1}{2}", "right"),
    "unit": ("\\boxed{12\\text{ cm}^2}", "12", "right"),
    "fraction": ("\\boxed{\\dfrac12}", "0.5", "right"),
    "interval": ("\\boxed{\\left[ 1, \\infty \\right)}", "[1,\\infty)", "right"),
    "open interval": ("\\boxed{(1,\\infty)}", "[1,\\infty)", "wrong"),
    "matrix": ("\\boxed{\\begin{bmatrix}1&0\\\\0&1\\end{bmatrix}}", "\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}", "right"),
    "unclosed": ("\\boxed{5", "5", "unparsable"),
    "no box": ("It is 5.", "5", "unparsable"),
    "empty": ("", "5", "unparsable"),
    "unicode minus": ("\\boxed{−5}", "-5", "right"),
    "ANSI": ("\x1b[1m\\boxed{\x1b[31m5\x1b[0m}", "5", "right"),
    "HTML": ("\\boxed{<img src=x onerror=alert(5)>}", "5", "wrong"),
    "words": ("\\boxed{the number five}", "5", "wrong"),
    "parentheses": ("\\boxed{" + "(" * 900 + "5" + ")" * 900 + "}", "6", TOO_MUCH | {"wrong"}),
    "roots": ("\\boxed{" + "\\sqrt{" * 300 + "5" + "}" * 300 + "}", "6", TOO_MUCH | {"wrong"}),
    "megabytes": ("\\boxed{" + "9" * (1 << 22) + "}", "5", "wrong"),
    "power tower": ("\\boxed{9^{9^{9^{9}}}}", "5", TOO_MUCH),
    "10^9 terms": ("\\boxed{\\sum_{k=1}^{1000000000} \\frac{1}{k^2}}", "5", TOO_MUCH),
    "10^9 factors": ("\\boxed{1000000000!}", "5", TOO_MUCH),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Little time and memory, so that the worst items end soon; which limit ends them depends on the machine."""
    with Grader(deadline_s=2.0, memory_bytes=1 << 30) as pool:
        futures = {name: pool.submit("math", Item(name, "", gold), text) for name, (text, gold, _) in HOSTILE.items()}
        return {name: outcome(future.result(timeout=300)) for name, future in futures.items()}


@pytest.mark.parametrize("name", HOSTILE)
def test_every_hostile_answer_has_its_outcome(name: str, outcomes: dict[str, str]) -> None:
    expected = HOSTILE[name][2]
    assert outcomes[name] in ({expected} if isinstance(expected, str) else expected)


def outcome(graded: Graded) -> str:
    if graded.verdict is None:
        return graded.outcome
    if graded.verdict.extracted is None:
        return "unparsable"
    return "right" if graded.verdict.score == 1 else "wrong"
