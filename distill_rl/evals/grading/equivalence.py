"""Whether two answers are the same."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from fractions import Fraction

from distill_rl.evals.grading.normalize import normalize, without_delimiters

LONGEST_ANSWER = 2000
"""characters; what is longer, and not the same text, is not parsed: no answer of a suite comes near it"""

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?(?:/0*[1-9][0-9]*)?")
_MIXED_NUMBER = re.compile(r"([-+]?)([0-9]+) +([0-9]+/0*[1-9][0-9]*)")
_DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_BASED = re.compile(r"-?[0-9A-Za-z.]*[0-9]_\{?([0-9]+)\}?")
_THIN_THOUSANDS = re.compile(r"(?<=[0-9])\s*(?:,\s*\\!|\\,|\{,\})\s*(?=[0-9]{3})")
_MIXED = re.compile(r"(?<![\w.,^/\\})])([0-9]++)(?: |\\ |\\,|~)++([0-9]++)\s?/\s?([0-9]++)")
_MINUS = str.maketrans("\u2212\ufe63\uff0d", "---")


def same_math(gold: str, given: str) -> bool:
    r"""Whether a LaTeX answer (without `\boxed`) is the gold one: the same after `normalize`, or equal to math-verify.

    On hostile input this may run for hours, take all memory, or crash the process: call it where `grader` does.

    Raises:
        MemoryError, RecursionError: too much for this process; nothing is said about the answer.
    """
    gold, given = _tidied(gold), _tidied(given)
    if gold == given:
        return bool(gold)
    if len(given) > LONGEST_ANSWER:
        return False
    normal, normal_given = normalize(gold), normalize(given)
    if normal and normal == normal_given:
        return True
    # Two cases that math-verify takes too lightly: it drops the base of a number, and rounds to six decimals.
    if _base(given) not in (None, _base(gold)):
        return False
    if _DECIMAL.fullmatch(normal) and _DECIMAL.fullmatch(normal_given):
        return Fraction(normal) == Fraction(normal_given)
    parse, verify = _math_verify()
    try:
        return verify(parse(gold), parse(given))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # what math-verify makes of expressions that cannot be compared
        return False


def _tidied(answer: str) -> str:
    r"""Without delimiters, and without the separators of thousands that LaTeX writes as `,\!`, `\,` or `{,}`.

    `2 1/2` is spelled `2\frac{1}{2}`: without its blank it would be 21/2.
    """
    answer = _THIN_THOUSANDS.sub("", without_delimiters(answer).translate(_MINUS))
    return _MIXED.sub(r"\1\\frac{\2}{\3}", answer)


def _base(answer: str) -> str | None:
    """6 of 2112_6 or 2112_{6}."""
    found = _BASED.fullmatch(answer)
    return found[1] if found else None


@functools.cache
def _math_verify() -> tuple[Callable[[str], list], Callable[[list, list], bool]]:
    """math-verify's two halves without its time limits: an alarm works in a main thread only, and counts a time-out as
    a wrong answer. The grader's deadline does better."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from math_verify import LatexExtractionConfig, parse, verify

    only_box = (LatexExtractionConfig(boxed_match_priority=0),)

    def parsed(answer: str) -> list:
        return parse(f"\\boxed{{{answer}}}", only_box, parsing_timeout=None, raise_on_error=True)  # type: ignore[arg-type]

    def equal(gold: list, given: list) -> bool:
        return verify(gold, given, timeout_seconds=None, raise_on_error=True)

    return parsed, equal


def same_number(gold: str, given: str) -> bool:
    """Whether two numbers, written as `extract.last_number` gives them, are exactly equal: 18 and 18.00, 1,000 and
    1000, 1/2 and 0.5, 2 1/2 and 2.5. What is no number equals nothing."""
    left, right = _value(gold), _value(given)
    return left is not None and left == right


def _value(text: str) -> Fraction | None:
    text = re.sub(r"[,$%]", "", text.translate(_MINUS)).strip()
    if len(text) > LONGEST_ANSWER:
        return None
    if mixed := _MIXED_NUMBER.fullmatch(text):
        whole = int(mixed[2]) + Fraction(mixed[3])
        return -whole if mixed[1] == "-" else whole
    text = re.sub(r"\s", "", text)
    if not _NUMBER.fullmatch(text):
        return None
    number, _, divisor = text.partition("/")
    return Fraction(number) / Fraction(divisor or 1)
