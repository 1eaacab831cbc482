"""Decides whether two answers are equivalent: LaTeX by `same_math`, numbers by `same_number`."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from fractions import Fraction

from distill_rl.evals.grading.normalize import normalize, without_delimiters

MAX_ANSWER_CHARACTERS = 2000
"""A longer answer that is not the same text counts as wrong without parsing; no suite has answers of this length."""

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?(?:/0*[1-9][0-9]*)?")
_MIXED_NUMBER = re.compile(r"([-+]?)([0-9]+) +([0-9]+/0*[1-9][0-9]*)")
_DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_BASED = re.compile(r"-?[0-9A-Za-z.]*[0-9]_\{?([0-9]+)\}?")
_THIN_THOUSANDS = re.compile(r"(?<=[0-9])\s*(?:,\s*\\!|\\,|\{,\})\s*(?=[0-9]{3})")
_MIXED = re.compile(r"(?<![\w.,^/\\})])([0-9]++)(?: |\\ |\\,|~)++([0-9]++)\s?/\s?([0-9]++)")
_MINUS = str.maketrans("\u2212\ufe63\uff0d", "---")


def same_math(gold: str, answer: str) -> bool:
    r"""Whether a LaTeX answer (without `\boxed`) equals the gold answer. The first test that applies decides:

    1. the same text, without delimiters and thousands separators; two empty texts are not equal;
    2. different if the answer is longer than MAX_ANSWER_CHARACTERS;
    3. the same text after `normalize`;
    4. different if the answer is written in a base that the gold answer is not: math-verify drops the base of a number;
    5. exact comparison if both are decimals: math-verify rounds to six decimals;
    6. math-verify; what it cannot parse or compare is different.

    Hostile input may take hours or all memory, or crash the process, so call this only in a grading process.

    Raises:
        MemoryError, RecursionError: the resources of this process were exceeded; the answer is not judged.
    """
    gold, answer = _clean(gold), _clean(answer)
    if gold == answer:
        return bool(gold)
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    normal_gold, normal_answer = normalize(gold), normalize(answer)
    if normal_gold and normal_gold == normal_answer:
        return True
    if _base(answer) not in (None, _base(gold)):
        return False
    if _DECIMAL.fullmatch(normal_gold) and _DECIMAL.fullmatch(normal_answer):
        return Fraction(normal_gold) == Fraction(normal_answer)
    parse, verify = _math_verify()
    try:
        return verify(parse(gold), parse(answer))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # math-verify raises many types for expressions that it cannot compare
        return False


def _clean(answer: str) -> str:
    r"""The answer without delimiters and without thousands separators, which LaTeX writes as `,\!`, `\,` or `{,}`, and
    with `-` for any minus sign.

    `2 1/2` becomes `2\frac{1}{2}`, because it would read as 21/2 once its blank is removed.
    """
    answer = _THIN_THOUSANDS.sub("", without_delimiters(answer).translate(_MINUS))
    return _MIXED.sub(r"\1\\frac{\2}{\3}", answer)


def _base(answer: str) -> str | None:
    """The base of a number: 6 for 2112_6 or 2112_{6}; None: not written in a base."""
    match = _BASED.fullmatch(answer)
    return match[1] if match else None


@functools.cache
def _math_verify() -> tuple[Callable[[str], list], Callable[[list, list], bool]]:
    """math-verify's `parse` and `verify` without their time limits, imported at the first call; both raise what goes
    wrong. Also silences math-verify's log messages below errors.

    `parse` takes the content of a box and returns the expressions; `verify` takes those of the gold answer and of the
    other. The limits use an alarm, which works in the main thread only and counts a timeout as a wrong answer; the
    grader's own deadline reports it as such.
    """
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from math_verify import LatexExtractionConfig, parse, verify

    only_box = (LatexExtractionConfig(boxed_match_priority=0),)

    def parsed(answer: str) -> list:
        return parse(f"\\boxed{{{answer}}}", only_box, parsing_timeout=None, raise_on_error=True)  # type: ignore[arg-type]

    def equal(gold: list, answer: list) -> bool:
        return verify(gold, answer, timeout_seconds=None, raise_on_error=True)

    return parsed, equal


def same_number(gold: str, answer: str) -> bool:
    """Whether two numbers, written as `extract.last_number` returns them, are exactly equal: 18 and 18.00, 1,000 and
    1000, 1/2 and 0.5, 2 1/2 and 2.5. Text that is not a number, or longer than MAX_ANSWER_CHARACTERS, equals nothing.
    """
    gold_value, value = _value(gold), _value(answer)
    return gold_value is not None and gold_value == value


def _value(text: str) -> Fraction | None:
    """The exact value of a number, a fraction or a mixed number; commas, dollar and percent signs are ignored. None if
    the text is anything else or too long."""
    text = re.sub(r"[,$%]", "", text.translate(_MINUS)).strip()
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    if mixed := _MIXED_NUMBER.fullmatch(text):
        whole = int(mixed[2]) + Fraction(mixed[3])
        return -whole if mixed[1] == "-" else whole
    text = re.sub(r"\s", "", text)
    if not _NUMBER.fullmatch(text):
        return None
    dividend, _, divisor = text.partition("/")
    return Fraction(dividend) / Fraction(divisor or 1)
