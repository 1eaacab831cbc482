"""Decides whether two answers are equivalent: LaTeX by `same_math`, numbers by `same_number`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from distill_rl.evals.grading.normalize import normalize, split

MAX_ANSWER_CHARACTERS = 2000
"""A longer answer that is not the same text counts as wrong without parsing; no suite has answers of this length."""

_LOOSE_BLANK = re.compile(r"(?<![0-9]) | (?![0-9])")
_CLOSED_INFINITY = re.compile(r"\\infty ?\]|\[ ?[-+]? ?\\infty")
_TIME = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?(?::([0-9]{2}))?([ap]m)?")
_WORDS = re.compile(r"\(?\\text\{[^{}]*\}\)?(?: ?[0-9]+)?|(?=.*[A-Za-z]{4})[A-Za-z, ]+")

_VARIABLE = re.compile(r"(?:[A-Za-z]|\\(?!pi(?![a-z]))[A-Za-z]+)(?:_(?:\{[^{}]*\}|\w))?")
_NAME = re.compile(
    rf"(?:{_VARIABLE.pattern}|\\text\{{[^{{}}]*\}}|[A-Z]+|\\[a-z]+ ?\{{?[A-Z]+\}}?)(?:\^ ?\{{?-1\}}?)?'*(?: ?\([^()=]*\))?|\([a-z](?:, ?[a-z])+\)"
)
_EQUALS = re.compile(r"(?<![<>=!\\])=(?!=)|\\in(?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_MEASURED = re.compile(
    r"(?P<value>.*?[\w)}\]!%])(?: ?\\text\{(?P<text>[^{}]*[A-Za-z][^{}]*)\}| (?P<word>[A-Za-z][A-Za-z./ ]*[A-Za-z.]))"
    r"(?: ?\^ ?\{?(?P<power>[0-9])\}?)?"
)
_JOINED = re.compile(r"((?:^|[=,;]) ?-? ?[0-9.]*[0-9])([A-Za-z][A-Za-z./ ]*[A-Za-z])(?= ?(?:[,;^]|$))")
_UNITS = {
    alias: names[0]
    for names in map(
        str.split,
        """
        mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inches|ft foot feet
        yd yard|mi mile|sec s second|min minute|h hr hour|day|week|month|yr year|mg milligram|g gm gram|kg kilogram
        lb pound|oz ounce|ml milliliter millilitre|l liter litre|gal gallon|cent|dollar usd|euro|degree deg|per
        """.replace("\n", "|").split("|"),
    )
    for alias in names
}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}

_BASED = re.compile(r"(-?[0-9A-Za-z.]*[0-9A-Z])_\{?([0-9]+)\}?")
_DEGREES = re.compile(r"([0-9.]+|[A-Za-z])? ?\^ ?\{? ?\\circ ?\}?(?: ?[CF](?![A-Za-z]))?")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:(?:,[0-9]{2,3})*,[0-9]{3}|(?: [0-9]{3})+)(?:\.[0-9]+)?")
_MIXED = re.compile(r"(?<![\w.,^/\\})])([0-9]++) ([0-9]++) ?/ ?([0-9]++)")

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?(?:/0*[1-9][0-9]*)?")
_MIXED_NUMBER = re.compile(r"([-+]?)([0-9]+) +([0-9]+/0*[1-9][0-9]*)")
_MINUS = str.maketrans("\u2212\ufe63\uff0d", "---")


class _Answer(NamedTuple):
    """An answer in its parts."""

    name: str
    """What stands before an equals sign, such as `x`; empty: nothing."""
    value: str
    unit: tuple[str, ...]
    """Its words in one spelling; empty: none."""
    power: int
    """2 for an area, 3 for a volume."""


def same_math(gold: str, answer: str) -> bool:
    r"""Whether a LaTeX answer (without `\boxed`) equals the gold answer. The first test that applies decides:

    1. the same text after `normalize`; two empty texts are not equal;
    2. different if the answer is longer than MAX_ANSWER_CHARACTERS, or only one of them includes infinity (`[3,\infty]`);
    3. times of day and words are compared as such;
    4. different if both have names (`x =`) or units that differ; otherwise names and units are left out;
    5. numbers in a base by base and digits, and decimals exactly;
    6. parsed by latex2sympy and compared by `algebra.same`; what cannot be parsed or compared is different.

    Of an approximation (`\pi \approx 3.14`) either side may be equal.

    Hostile input may take hours or all memory, or crash the process, so call this only in a grading process.

    Raises:
        MemoryError, RecursionError: the resources of this process were exceeded; the answer is not judged.
    """
    if gold.strip() == answer.strip():
        return bool(gold.strip())
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    gold, answer = normalize(gold), normalize(answer)
    if _tight(gold) == _tight(answer):
        return bool(gold)
    if (_CLOSED_INFINITY.search(gold) is None) != (_CLOSED_INFINITY.search(answer) is None):
        return False
    if (time := _TIME.fullmatch(_bare(gold))) and time[4]:
        return _seconds(gold) == _seconds(answer)
    if _WORDS.fullmatch(gold):
        return _words(gold) == _words(answer)
    sides = _readings(answer)
    sides = [*dict.fromkeys(sides + [_JOINED.sub(_unit_apart, side) for side in sides])]
    return any(_same_reading(ours, theirs) for ours in _readings(gold) for theirs in sides)


def _tight(text: str) -> str:
    """The text without blanks, but for those between digits."""
    return _LOOSE_BLANK.sub("", text)


def _bare(text: str) -> str:
    """The letters, digits and signs of a text, in lower case, without a name in front and brackets around the whole."""
    text = re.sub(r"\\text|[{}\s.]", "", text.rpartition("=")[2]).casefold()
    return text[1:-1] if re.fullmatch(r"\([^()]*\)", text) else text


def _words(text: str) -> list[str]:
    """The words between commas; single letters, such as those of choices, in alphabetical order."""
    words = _bare(text).split(",")
    return sorted(words) if all(len(word) == 1 for word in words) else words


def _seconds(text: str) -> int | None:
    """The seconds since midnight of a time of day such as 4:30 p.m., 9 a.m. or 16:30; None: it is none."""
    time = _TIME.fullmatch(_bare(text))
    if time is None or not (time[2] or time[4]):
        return None
    hours = int(time[1]) % 12 + 12 * (time[4] == "pm") if time[4] else int(time[1])
    return (hours * 60 + int(time[2] or 0)) * 60 + int(time[3] or 0)


def _readings(text: str) -> list[str]:
    """The sides of an approximation, without those that only name it; otherwise the text alone."""
    sides = [side.strip() for side in text.split("\\approx")]
    return [side for side in sides if side and not _NAME.fullmatch(side)] or [text]


def _same_reading(gold: str, answer: str) -> bool:
    """Tests 4 to 6 of `same_math`."""
    if "=" in gold and "=" in answer and _parsed_same(gold, answer):
        return True
    ours, theirs = _taken_apart(gold, is_gold=True), _taken_apart(answer, is_gold=False)
    if ours.name != theirs.name and _VARIABLE.fullmatch(ours.name) and _VARIABLE.fullmatch(theirs.name):
        return False
    return not _units_differ(ours, theirs) and _same_value(ours.value, theirs.value)


def _taken_apart(text: str, *, is_gold: bool) -> _Answer:
    """The parts of an answer; of a list, where all members have the same name, or the first one has the only one."""
    separator = ";" if ";" in text else ","
    members = [_member(member, is_gold) for member in split(text.replace("\\$", ""))] or [_Answer("", text, (), 1)]
    first, last = members[0], members[-1]
    if not {member.name for member in members[1:]} <= {first.name, ""}:
        return _Answer("", text, (), 1)
    unit = last.unit or (("dollar",) if "\\$" in text else ())
    return _Answer(first.name, separator.join(member.value for member in members), unit, last.power)


def _member(text: str, is_gold: bool) -> _Answer:
    """The parts of one member of a list, or of an answer that is no list."""
    # The value of a chain of equations is its last side; that of one equation its right side, where the left side is a name, has no
    # letters, or, not in a gold answer, is an expression of several unknowns, such as `a + b`.
    name, value = "", text
    sides = [side.strip() for side in _EQUALS.split(text)]
    if len(sides) > 1:
        unknowns, known = (set(re.findall(r"[A-Za-z]", _COMMAND.sub("", side))) for side in (sides[0], sides[-1]))
        if _NAME.fullmatch(sides[0]):
            name, value = sides[0], sides[-1]
        elif not known and (len(sides) > 2 or not unknowns or (not is_gold and len(unknowns) > 1)):
            value = sides[-1]
    measured = _MEASURED.fullmatch(value)
    if measured is None:
        return _Answer(name, value, (), 1)
    unit, power = _unit(measured["text"] or measured["word"])
    if measured["word"] and not all(word in _UNITS.values() or len(word) > 3 for word in unit):
        return _Answer(name, value, (), 1)  # a product of variables
    return _Answer(name, measured["value"], unit, int(measured["power"] or power))


def _unit(text: str) -> tuple[tuple[str, ...], int]:
    """(words of a unit in one spelling, its power)."""
    words = re.findall(r"[a-z]+|\^[23]", text.lower().replace("/", " per ").replace("mph", "miles per hour"))
    power = max((_POWERS.get(word, 0) or int(word[1:] if word[0] == "^" else 0) for word in words), default=0) or 1
    names = [word for word in words if word not in _POWERS and word[0] != "^"]
    return tuple(_UNITS.get(word) or _UNITS.get(word.removesuffix("s"), word) for word in names), power


def _unit_apart(match: re.Match[str]) -> str:
    """A number and its unit with a blank between; what is no unit, or a single letter, may be a product of variables."""
    is_unit = all(len(word) > 1 for word in re.findall("[A-Za-z]+", match[2]))
    known = is_unit and all(word in _UNITS.values() for word in _unit(match[2])[0])
    return f"{match[1]} {match[2]}" if known else match[0]


def _units_differ(gold: _Answer, answer: _Answer) -> bool:
    """Whether both have units and these contradict: by their powers, or, if all their words are known, by their words."""
    if not gold.unit or not answer.unit:
        return False
    known = all(word in _UNITS.values() for word in gold.unit + answer.unit)
    return gold.power != answer.power or (known and gold.unit != answer.unit)


def _same_value(gold: str, answer: str) -> bool:
    """Whether two answers without names and units are equal."""
    # A base, a degree or per cent sign may be missing on one side, except inside of functions and beside radians.
    ours, theirs = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if ours is None or theirs is None:
        if ours or theirs:
            return ours is not None and ours[1] == answer
    else:
        return ours.groups() == theirs.groups()
    both = gold + answer
    if "\\circ" in both:
        in_radians = _ANGLE.search(both) or "\\pi" in both
        spelling = (lambda match: f"\\frac{{{match[1] or 1}\\pi}}{{180}}") if in_radians else r"\1"
        gold, answer = _DEGREES.sub(spelling, gold), _DEGREES.sub(spelling, answer)
    percent = gold.endswith("\\%"), answer.endswith("\\%")
    gold, answer = gold.removesuffix("\\%").strip(), answer.removesuffix("\\%").strip()
    if _parsed_same(gold, answer):
        return True
    if percent == (True, False):
        return _parsed_same(f"\\frac{{{gold}}}{{100}}", answer)
    return percent == (False, True) and _parsed_same(gold, f"\\frac{{{answer}}}{{100}}")


def _parsed_same(gold: str, answer: str) -> bool:
    """Whether two texts mean the same; `70,110` means a number or a list."""
    if _tight(gold) == _tight(answer):
        return bool(gold)
    numbers = [re.sub("[, ]", "", text) if _THOUSANDS.fullmatch(text) else text for text in (gold, answer)]
    if all(map(_DECIMAL.fullmatch, numbers)):
        return Fraction(numbers[0]) == Fraction(numbers[1])
    from distill_rl.evals.grading.algebra import parse, same

    for texts in (numbers, [gold, answer]) if numbers != [gold, answer] else (numbers,):
        try:
            if same(*(parse(_MIXED.sub(r"\1\\frac{\2}{\3}", text)) for text in texts)):
                return True
        except (MemoryError, RecursionError):
            raise
        except Exception:  # the parser and SymPy raise many types for what they cannot read or compare
            continue
    return False


def same_number(gold: str, answer: str) -> bool:
    """Whether two numbers, written as `extract.last_number` returns them, are exactly equal: 18 and 18.00, 1,000 and
    1000, 1/2 and 0.5, 2 1/2 and 2.5. Text that is not a number, or longer than MAX_ANSWER_CHARACTERS, equals nothing.
    """
    gold_value, value = _value(gold), _value(answer)
    return gold_value is not None and gold_value == value


def _value(text: str) -> Fraction | None:
    """The exact value of a number, a fraction or a mixed number; commas, dollar and percent signs are ignored."""
    # None if the text is anything else or too long.
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
