"""Rewrites a LaTeX answer in a normal form, so that equivalent spellings become the same text."""

from __future__ import annotations

import re

_REPLACED = (
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples",
)  # fmt: skip
_REMOVED = (
    "\\ldots", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_UNIT = re.compile(rf"(?<!\\)(?<!\\le)(?:{'|'.join(_UNITS)})")
_ARTICLE = re.compile(r"(?<![\\A-Za-z0-9])an? (?=[A-Za-z]{2})")
_ASSIGNED = re.compile(r"^\s*(?:\\[A-Za-z]+|[A-Za-z])(?:_\{?\w+\}?)?(?:\([A-Za-z, ]+\))?\s*=(?=[^=]*$)")
_TEXT = re.compile(r"\\(?:text|textbf|overline|boxed)\{([^{}]*+)\}")
_SHORT_FRACTION = re.compile(r"frac([^{}\\])(?:([^{}\\])|(?=\{))")
_SHORT_ROOT = re.compile(r"sqrt([^{}\[\\])")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def without_delimiters(text: str) -> str:
    r"""The text without white space at its ends and without math delimiters such as `$…$` or `\(…\)` around the whole
    of it; one pair is removed."""
    text = text.strip()
    for left, right in _DELIMITERS:
        inner = text[len(left) : len(text) - len(right)]
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right) and right not in inner:
            return inner.strip()
    return text


def normalize(answer: str) -> str:
    """The normal form of a LaTeX answer (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D): without units, words,
    spaces and dollar signs, and with short fractions and roots written out. Maybe empty.

    Stricter than the paper where the paper makes different answers equal: the left side of an equation is removed only
    if it is a single name (`x = 3`, but not `x^2 + y^2 = 4` or `x = 1, y = 2`), and commas only between thousands
    (`1,2` is not 12).
    """
    answer = _ARTICLE.sub("", _ASSIGNED.sub("", without_delimiters(answer), count=1))
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    answer = _UNIT.sub("", answer)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    answer = _TEXT.sub(r"\1", without_delimiters(answer))
    answer = answer.replace("dfrac", "frac").replace("tfrac", "frac")
    answer = _SHORT_FRACTION.sub(_spelled_out, answer)
    answer = _SHORT_ROOT.sub(r"sqrt{\1}", answer).replace("$", "")
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def _spelled_out(fraction: re.Match[str]) -> str:
    """A short fraction such as `frac12` with braces: `frac{1}{2}`; if a brace follows its first digit, only that digit
    gets them."""
    return f"frac{{{fraction[1]}}}" + (f"{{{fraction[2]}}}" if fraction[2] else "")
