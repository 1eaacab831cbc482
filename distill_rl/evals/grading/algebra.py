"""Parses answers with latex2sympy and compares exactly, with SymPy, what they mean; imported in grading processes only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import And

from distill_rl.evals.grading.normalize import split

DIGITS = 100
"""Irrational numbers are equal that agree in so many digits and as many more as the numbers in them have."""

_CASE_COUNTS = ConversionConfig(lowercase_symbols=False)
_DECIMAL = re.compile(r"(?<![\w.])([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot) ?\{?([0-9]+)\}?)?")
_REWRITTEN = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"(?<![\w^.}/)])([0-9]+)/([0-9]+)(?![0-9.^])", r"\\frac{\1}{\2}"),  # 3/5i is not 3/(5i)
        (r"(?<!\w)([0-9]+) ?\(", r"\1\\cdot("),  # the parser takes 2(3) and (2)(3) for mixed numbers
        (r"\) ?(?=[0-9(])", r")\\cdot "),
    )
)


class Group(NamedTuple):
    """A tuple or an interval, with its brackets."""

    left: str
    items: list[Any]
    right: str


class Either(list[Any]):
    """Statements of which one holds."""


def parse(text: str) -> Any:
    """What a normalised answer means: a Group, a list without order (also for a set in braces), or an object of SymPy.

    Raises:
        Exception: the parser raises several types for text that is no mathematics.
    """
    text = text.strip()
    items = split(text)
    if len(items) > 1:
        return (Either if ";" in text else list)(_parsed(items))
    if text.startswith("\\{") and text.endswith("\\}") and (items := split(text[2:-2])):
        return list(_parsed(items))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and len(items := split(text[1:-1])) > 1:
        return Group(text[0], list(_parsed(items)), text[-1])
    return _expression(text)


def _parsed(items: Iterable[str]) -> Iterable[Any]:
    """The meaning of every item; `1 \\pm 2` and sets are several."""
    for item in map(parse, items):
        yield from item if isinstance(item, list) else [item]


def _expression(text: str) -> Any:
    """What text without commas outside of brackets means; decimals are exact fractions, `i` is the imaginary unit."""
    if re.search(r"(?<![A-Za-z]_)[0-9] [0-9]", text) or text.count(":") > 1:
        raise ValueError("the parser takes `1 2` for a mixed number and `1:2:3` for a fraction")
    text = _DECIMAL.sub(_fraction, text)
    for pattern, spelling in _REWRITTEN:
        text = pattern.sub(spelling, text)
    value = latex2sympy(text, is_real=None, normalization_config=None, conversion_config=_CASE_COUNTS)
    if isinstance(value, sympy.FiniteSet):
        return list(value)
    names: dict[Any, Any] = {call: sympy.Symbol(str(call)) for call in value.atoms(AppliedUndef)}
    return value.xreplace(names | {sympy.Symbol("i"): sympy.I})


def _fraction(match: re.Match[str]) -> str:
    """A decimal as an exact fraction, whose last digits may repeat forever."""
    whole, digits, repeated = match[1], match[2], match[3] or ""
    if not whole + digits + repeated:
        return match[0]
    scale = 10 ** len(digits)
    if not repeated:
        return f"(\\frac{{{int(whole + digits)}}}{{{scale}}})"
    numerator = int(whole + digits + repeated) - int(whole + digits or 0)
    return f"(\\frac{{{numerator}}}{{{scale * (10 ** len(repeated) - 1)}}})"


def same(gold: Any, answer: Any) -> bool:
    """Whether two parsed answers mean the same.

    An interval, a union and inequalities of one unknown are compared as sets of numbers, other relations by whether
    one is a multiple of the other. `3, 4` without brackets is also `(3, 4)`.
    """
    if isinstance(gold, list) and isinstance(answer, list) and _matched(gold, answer, same):
        return True
    if _is_statement(gold) or _is_statement(answer):
        relations = _relations(gold), _relations(answer)
        if _matched(*relations, _same_relation):
            return True
        if all(relations) and len(set().union(*(part.free_symbols for part in relations[0] + relations[1]))) > 1:
            return False
        sets = _as_set(gold), _as_set(answer)
        return None not in sets and _same_set(*sets)
    if isinstance(gold, Group) or isinstance(answer, Group):
        return _same_in_order(gold, answer)
    if isinstance(gold, list) or isinstance(answer, list):
        ours, theirs = ([value] if not isinstance(value, list) else value for value in (gold, answer))
        return _matched(ours, theirs, same)
    if all(isinstance(value, sympy.MatrixBase | sympy.MatrixExpr) for value in (gold, answer)):
        gold, answer = gold.doit(), answer.doit()
        return gold.shape == answer.shape and all(map(_same_expression, gold, answer))
    return isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr) and _same_expression(gold, answer)


def _matched(gold: Sequence[Any], answer: Sequence[Any], equal: Callable[[Any, Any], bool]) -> bool:
    """Whether every item of one sequence has one of its own in the other, in any order; False for empty ones."""
    rest = list(answer)
    for item in gold:
        found = next((at for at, other in enumerate(rest) if equal(item, other)), None)
        if found is None:
            return False
        del rest[found]
    return bool(gold) and not rest


def _same_in_order(gold: Any, answer: Any) -> bool:
    """Whether tuples or intervals are the same, one of which may be a list in place of round brackets."""
    groups = [Group("(", value, ")") if isinstance(value, list) else value for value in (gold, answer)]
    if not all(isinstance(group, Group) and len(group.items) == len(groups[0].items) for group in groups):
        return False
    brackets = {(group.left, group.right) for group in groups}
    return len(brackets) == 1 and all(map(same, groups[0].items, groups[1].items))


def _is_statement(value: Any) -> bool:
    """Whether a value is a set of numbers, or relations."""
    return isinstance(value, sympy.Set) or bool(_relations(value))


def _relations(value: Any) -> list[Any]:
    """The relations that a value consists of; none if there is anything else in it."""
    parts = value if isinstance(value, list) else [value]
    parts = [relation for part in parts for relation in (part.args if isinstance(part, And) else [part])]
    return parts if all(isinstance(part, Relational) for part in parts) else []


def _as_set(value: Any) -> Any:
    """The set of numbers that a value is or for which it holds; None if there is none."""
    if isinstance(value, Group):
        open_ends = value.left == "(", value.right == ")"
        return sympy.Interval(*value.items, *open_ends).doit() if len(value.items) == 2 else None
    if isinstance(value, sympy.Set):
        return value.doit()
    if isinstance(value, list):
        sets = [_as_set(part) for part in value]
        if None in sets:
            return None
        both = sympy.Intersection(*sets)
        return sympy.Union(*sets) if isinstance(value, Either) or both is sympy.S.EmptySet else both
    if isinstance(value, And | Relational) and not value.has(sympy.Eq) and len(value.free_symbols) == 1:
        return value.as_set()
    return None


def _same_set(gold: sympy.Set, answer: sympy.Set) -> bool:
    """Whether two sets are equal: as SymPy writes them, or interval by interval."""

    def pieces(value: sympy.Set) -> Sequence[Any]:
        return value.args if isinstance(value, sympy.Union) else [value]

    def equal(gold: Any, answer: Any) -> bool:
        if not isinstance(gold, sympy.Interval) or not isinstance(answer, sympy.Interval):
            return gold == answer
        return gold.args[2:] == answer.args[2:] and all(map(_same_expression, gold.args[:2], answer.args[:2]))

    return gold == answer or _matched(pieces(gold), pieces(answer), equal)


def _same_relation(gold: Any, answer: Any) -> bool:
    # Whether two relations are of one kind, and left minus right sides are in one proportion at all points: a positive one for
    # inequalities, any for equations, whose denominators do not count.
    flipped = {">": "<", ">=": "<="}
    sides = [(item.rhs - item.lhs if item.rel_op in flipped else item.lhs - item.rhs).doit() for item in (gold, answer)]
    if len({flipped.get(item.rel_op, item.rel_op) for item in (gold, answer)}) > 1:
        return False
    equation = isinstance(gold, sympy.Eq | sympy.Ne)
    if equation:
        sides = [sympy.fraction(sympy.together(side))[0] for side in sides]
    first: tuple[Any, Any] | None = None
    for point in _points(*sides):
        left, right = (side.xreplace(point).doit() for side in sides)
        zero = _same_number(left, sympy.S.Zero), _same_number(right, sympy.S.Zero)
        if zero == (False, False):
            first = first or (left, right)
            if _same_number(left * first[1], right * first[0]) is False:
                return False
        elif None not in zero and zero != (True, True):
            return False
    return first is not None and (equation or bool((first[0] / first[1]).evalf() > 0))


def _same_expression(gold: Any, answer: Any) -> bool:
    """Whether two expressions are equal: as numbers, or wherever both are real at some values of their unknowns."""
    real = not gold.has(sympy.I) and not answer.has(sympy.I)
    verdicts = []
    for point in _points(gold, answer):
        left, right = (side.xreplace(point).doit() for side in (gold, answer))
        if not point or not real or not {left.is_real, right.is_real} & {False}:
            verdicts.append(_same_number(left, right))
    return False not in verdicts and True in verdicts


def _points(*sides: Any) -> list[Mapping[Any, Any]]:
    """Values for the unknowns of expressions, as replacements: whole ones, small ones, some or all of them negative."""
    # A single empty replacement if there are no unknowns.
    unknowns = sorted(set().union(*(side.free_symbols for side in sides)), key=str)
    if not unknowns:
        return [{}]
    kinds = (
        lambda n: sympy.Rational(7 * n + 3),
        lambda n: sympy.Rational(7 * n + 3, 7 * n + 8),
        lambda n: sympy.Rational(7 * n + 19, 6) * (-1) ** n,
        lambda n: sympy.Rational(7 * n + 3, -11),
    )
    return [{unknown: value(n) for n, unknown in enumerate(unknowns)} for value in kinds]


def _same_number(gold: Any, answer: Any) -> bool | None:
    # Whether two evaluated numbers are equal: rational ones exactly, others in all digits that are computed (DIGITS); None if either is
    # undefined.
    if gold.has(sympy.nan, sympy.zoo) or answer.has(sympy.nan, sympy.zoo):
        return None
    if gold.is_infinite or answer.is_infinite:
        return gold == answer
    difference = (gold - answer).doit()
    if difference.is_Rational:
        return difference == 0
    digits = DIGITS + sum(max(map(int.bit_length, map(int, (n.p, n.q)))) for n in difference.atoms(sympy.Rational)) // 3
    for part in (difference,) if difference.is_real else difference.as_real_imag():
        try:
            if part.evalf(2, maxn=digits, strict=True) != 0:
                return False
        except PrecisionExhausted:  # no digit of it differs from 0
            continue
    return True
