r"""Wrong variants of gold answers are rejected, and other spellings of them are accepted: of a sample, and of all of MATH.

A wrong variant differs in one place: a digit, a sign, a bracket, a name. Two kinds are accepted on purpose
(docs/evaluation.md says why): another noun or none after a number, and a missing degree sign outside of functions.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pyarrow.parquet as parquet
import pytest

from distill_rl.evals.grading.extract import last_boxed
from distill_rl.evals.grading.grader import Grader
from distill_rl.evals.suites.base import Item
from tests.unit.evals.test_gold import EVALS

SAMPLE = (
    "70", "-3", "0", "1518", "15,600", r"32,\!348", r"\$0.50", r"\$18.90", r"25\%", ".0625", "1.5", "2^{99}", r"\frac{1}{2004!}",
    r"\frac{11}{2}", r"-\frac{35}{9}", r"\frac43", r"\tfrac{1}{72}", r"2\frac{1}{3}", r"5 \sqrt{2}", r"\frac{2\sqrt{3}}{3}",
    r"\sqrt[3]{25}", r"3 + \sqrt{6}", r"-1 - 5i", r"\frac{3}{2} + \frac{3}{2} i.", r"90 - \frac{25}{2}\pi", r"\frac{\pi}{6}",
    "e^{-60}", "52^\\circ", r"27^\circ, 63^\circ", r"2\cos 15^{\circ}", r"\cot x", "2112_6", r"1061_{9}", "70,110", "2, 3, 5",
    r"1 \pm \sqrt{19}", r"6, 8\text{, and }10", "(4,-1)", r"(1, 4\sqrt3)", r"\left( 3, \frac{\pi}{2} \right)", "(3,-1), (2,4)",
    r"\{1,2,4\}", "[-3,2]", "(-\\infty,0]", r"(27,\infty)", r"(-\infty,-2)\cup (-2,3)\cup (3,\infty)", r"[-2,0) \cup (0, \tfrac12]",
    "3x^2 - 7x + 4", "x^3+3x-6", r"\frac{x+2}{7}", "3qr + 6q - 15r - 30", "(x+2)(x^2-2x+4)", "y = 2x + 3", "k = 15",
    "x^2 + y^2 = 13", "4x-5y=-50", r"s^2 \le 8r^2", r"-2 \le x \le 7", r"\begin{pmatrix} 1 & -2 \\ 3 & 4 \end{pmatrix}",
    r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}", r"15\mbox{ cm}^2", r"118 \text{ dollars}", r"10\;\text{edges}", r"45\text{ mph}",
    r"9\text{ a.m.}", r"\text{4:30 p.m.}", r"\text{Evelyn}", r"\text{even}", r"\text{(C)}", r"\text{A,D}", r"\text{June 20}", "1:2",
)  # fmt: skip

INTEGER = re.compile(r"-?\d+")
LIST = re.compile(r"-?\d+(?:, -?\d+)+")


def changed_digit(gold: str, at: int, draw: random.Random) -> str:
    return f"{gold[:at]}{(int(gold[at]) + draw.randint(1, 8)) % 10}{gold[at + 1 :]}"


def wrong(gold: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, answer) of answers that are not the gold answer."""
    digits = [match.start() for match in re.finditer(r"\d", gold)]
    if digits:
        yield "any digit", changed_digit(gold, draw.choice(digits), draw)
        yield "last digit", changed_digit(gold, digits[-1], draw)
    if minus := [match.start() for match in re.finditer("-", gold)]:
        at = draw.choice(minus)
        yield "no minus", gold[:at] + gold[at + 1 :]
    if "+" in gold:
        yield "minus for plus", gold.replace("+", "-", 1)
    if "sqrt" in gold:
        yield "no root", gold.replace("\\sqrt", "", 1)
        yield "cube root", gold.replace("\\sqrt", "\\sqrt[5]", 1) if "sqrt[" not in gold else gold.replace("[3]", "")
    if fraction := re.search(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", gold):
        above, below = fraction.groups()
        for kind, other in (
            ("inverse", rf"\frac{{{below}}}{{{above}}}"),
            ("power", rf"\frac{{{above}}}{{{below}^2}}"),
            ("sum", rf"\frac{{{above}+1}}{{{below}}}"),
        ):
            yield f"{kind} of a fraction", gold[: fraction.start()] + other + gold[fraction.end() :]
    if gold[0] in "([" and gold[-1] in ")]":
        yield "left bracket", ("[" if gold[0] == "(" else "(") + gold[1:]
        yield "right bracket", gold[:-1] + (")" if gold[-1] == "]" else "]")
        parts = gold[1:-1].split(",")
        if len(parts) == 2 and parts[0].strip() != parts[1].strip():
            yield "swapped", f"{gold[0]}{parts[1]},{parts[0]}{gold[-1]}"
            yield "one more", f"{gold[:-1]},0{gold[-1]}"
    elif "," in gold and not re.fullmatch(r"[\d,]+|.*\{.*,.*\}", gold):
        yield "one less", gold.rsplit(",", 1)[0]
    if "\\cup" in gold:
        yield "intersection", gold.replace("\\cup", "\\cap", 1)
        yield "first interval", gold.split("\\cup")[0]
    if "\\infty" in gold:
        yield "large for infinite", gold.replace("\\infty", "100000", 1)
    if "\\pi" in gold:
        yield "no pi", gold.replace("\\pi", "")
        yield "decimal pi", gold.replace("\\pi", "(3.14159265358979)")
    if "^" in gold:
        yield "no power", re.sub(r"\^(\{[^{}]*\}|\\circ|.)", "", gold, count=1)
    if "=" in gold:
        yield "inequality", gold.replace("=", "<")
    if INTEGER.fullmatch(gold):
        for kind, other in (
            *(("zero behind", f"{gold}0"), ("plus one", str(int(gold) + 1)), ("and a half", f"{gold}.5")),
            *(("other sign", str(-int(gold))), ("one in front", f"1{gold.lstrip('-')}"), ("times x", f"{gold}x")),
            *(("unit without blank", f"{gold}m"), ("times i", f"{gold}i"), ("and one", f"{gold} 1"), ("half", rf"\frac{{{gold}}}{{2}}")),
            *(("a little more", f"{gold}.0000001"), ("hardly more", rf"{gold}+\frac{{1}}{{10^{{50}}}}"), ("repeating", rf"{gold}.\overline{{1}}")),
            *(("two", rf"{gold}, {gold}1"), ("both signs", rf"\pm {gold}"), ("inequality", f"x<{gold}"), ("interval", f"[{gold},{gold}1]")),
            *(("another base", f"{gold}_7"), ("equation", f"x^2={gold}"), ("hundredth", rf"{gold}1\%"), ("or", rf"{gold} \text{{ or }} {gold}2")),
        ):  # fmt: skip
            if gold != "0" or kind not in (
                "zero behind",
                "other sign",
                "times x",
                "unit without blank",
                "times i",
                "half",
                "both signs",
            ):
                yield kind, other
    letters = re.sub(r"\\text\{[^}]*\}|\\mbox\{[^}]*\}|\\[A-Za-z]+", lambda match: " " * len(match[0]), gold)
    if letter := re.search(r"(?<![A-Za-z{])[a-hj-z](?![A-Za-z])", letters):
        yield "other name", f"{gold[: letter.start()]}q{gold[letter.end() :]}"
        yield "capital", f"{gold[: letter.start()]}{letter[0].upper()}{gold[letter.end() :]}"
    if text := re.search(r"\\text\{([^}]*)\}", gold):
        yield "other word", f"{gold[: text.start()]}\\text{{banana}}{gold[text.end() :]}"
        if "," not in text[1]:
            yield "word backwards", f"{gold[: text.start()]}\\text{{{text[1][::-1]}}}{gold[text.end() :]}"


def is_accepted_on_purpose(kind: str, gold: str, answer: str) -> bool:
    """Whether a wrong answer is one of the two kinds that are accepted."""
    noun = kind in ("other word", "word backwards", "other name") and re.search(
        r"[\d}i] *(?:\\[;,])? *\\(?:text|mbox)\{", gold
    )
    degrees = kind == "no power" and "\\circ" in gold and "\\cos" not in gold
    return bool(noun and not gold.endswith("m.}")) or degrees


SPELLINGS: dict[str, Callable[[str], str | None]] = {
    "stop": lambda gold: f"{gold}.",
    "stop as text": lambda gold: rf"{gold}\text{{.}}",
    "comma": lambda gold: f"{gold},",
    "blanks": lambda gold: f" {gold.replace(',', ' , ')} " if "text" not in gold and "!" not in gold else None,
    "lines": lambda gold: f"\n{gold}\n",
    "thin blank": lambda gold: rf"{gold}\,",
    "wide blank": lambda gold: rf"\quad {gold}",
    "no-break blanks": lambda gold: gold.replace(" ", "\u00a0"),
    "dollars around": lambda gold: f"${gold}$",
    "two dollars around": lambda gold: f"$${gold}$$.",
    "round brackets": lambda gold: rf"\({gold}\)",
    "square brackets": lambda gold: rf"\[{gold}\]",
    "braces": lambda gold: f"{{{gold}}}",
    "box": lambda gold: rf"\boxed{{{gold}}}",
    "bold Markdown": lambda gold: f"**{gold}**",
    "bold Markdown and stop": lambda gold: f"**{gold}**.",
    "slanted Markdown": lambda gold: f"*{gold}*",
    "code": lambda gold: f"`{gold}`",
    "display style": lambda gold: rf"\displaystyle {gold}",
    "therefore": lambda gold: rf"\therefore {gold}",
    "bold": lambda gold: rf"\mathbf{{{gold}}}",
    "bold symbols": lambda gold: rf"\boldsymbol{{{gold}}}",
    "underlined": lambda gold: rf"\underline{{{gold}}}",
    "red": lambda gold: rf"\color{{red}}{{{gold}}}",
    "blue": lambda gold: rf"\textcolor{{blue}}{{{gold}}}",
    "as text": lambda gold: rf"\text{{{gold}}}" if re.fullmatch(r"[\w ]+", gold) and "_" not in gold else None,
    "display fractions": lambda gold: gold.replace("\\frac", "\\dfrac"),
    "slashes": lambda gold: re.sub(r"(?<!\d)\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", gold),
    "fractions without braces": lambda gold: re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2", gold),
    "minus in front of a fraction": lambda gold: re.sub(r"-\\frac\{(\d+)\}", r"\\frac{-\1}", gold),
    "dot": lambda gold: re.sub(r"(\d) ?\\(sqrt|pi)", r"\1\\cdot\\\2", gold),
    "star": lambda gold: re.sub(r"(\d) ?\\(sqrt|pi)", r"\1*\\\2", gold),
    "left and right": lambda gold: (
        re.sub(r"([)\]])", r"\\right\1", re.sub(r"([(\[])", r"\\left\1", gold)) if not re.search(r"left|text|sqrt\[", gold) else None
    ),
    "matrix in square brackets": lambda gold: gold.replace("pmatrix", "bmatrix"),
    "minus sign": lambda gold: gold.replace("-", "−"),
    "root sign": lambda gold: re.sub(r"\\sqrt\{(\d+)\}", r"√\1", gold),
    "letter pi": lambda gold: gold.replace("\\pi", "π"),
    "degree sign": lambda gold: re.sub(r"\^\{?\\circ\}?", "°", gold),
    "raised digits": lambda gold: gold.replace("^2", "²").replace("^3", "³"),
    "infinity sign": lambda gold: gold.replace("\\infty", "∞"),
    "union sign": lambda gold: gold.replace("\\cup", "∪"),
    "wide characters": lambda gold: gold.translate({0x28: "（", 0x29: "）", 0x2C: "，"}) if re.fullmatch(r"[-\d(), ]+", gold) else None,
    "thousands": lambda gold: f"{int(gold):,}" if INTEGER.fullmatch(gold) else None,
    "thousands in braces": lambda gold: f"{int(gold):,}".replace(",", "{,}") if INTEGER.fullmatch(gold) else None,
    "thousands by blanks": lambda gold: f"{int(gold):,}".replace(",", " ") if INTEGER.fullmatch(gold) else None,
    "name": lambda gold: f"x = {gold}" if re.fullmatch(r"-?\d+|\\frac\{\d+\}\{\d+\}", gold) else None,
    "name in words": lambda gold: rf"\text{{Answer}} = {gold}" if "=" not in gold else None,
    "approximately": lambda gold: rf"x \approx {gold}" if INTEGER.fullmatch(gold) else None,
    "approximation behind": lambda gold: rf"{gold} \approx 3.1" if "\\sqrt" in gold or "\\pi" in gold else None,
    "decimal": lambda gold: f"{gold}.0" if INTEGER.fullmatch(gold) else None,
    "unit": lambda gold: rf"{gold}\text{{ units}}" if re.fullmatch(r"-?\d+|\\frac\{\d+\}\{\d+\}", gold) else None,
    "area": lambda gold: rf"{gold}\text{{ cm}}^2" if INTEGER.fullmatch(gold) else None,
    "unit outside of text": lambda gold: f"{gold} cm" if INTEGER.fullmatch(gold) else None,
    "noun": lambda gold: f"{gold} apples" if INTEGER.fullmatch(gold) else None,
    "list backwards": lambda gold: ", ".join(reversed(gold.split(", "))) if LIST.fullmatch(gold) else None,
    "list with and": lambda gold: r" \text{ and } ".join(gold.rsplit(", ", 1)) if LIST.fullmatch(gold) else None,
    "list with or": lambda gold: r" \text{ or } ".join(gold.rsplit(", ", 1)) if LIST.fullmatch(gold) else None,
    "set": lambda gold: rf"\{{{gold}\}}" if LIST.fullmatch(gold) else None,
    "member of": lambda gold: rf"x \in {gold}" if "\\infty" in gold and gold[0] in "([" else None,
    "no dollar": lambda gold: gold.replace("\\$", ""),
    "dollars in words": lambda gold: gold.replace("\\$", "") + r"\text{ dollars}" if "\\$" in gold else None,
    "per cent in words": lambda gold: gold.replace("\\%", r"\text{ percent}"),
}  # fmt: skip


def spellings(gold: str) -> Iterator[tuple[str, str]]:
    """(kind, answer) of answers that are the gold answer."""
    for kind, spell in SPELLINGS.items():
        answer = spell(gold.removesuffix("."))
        if answer is not None and answer != gold:
            boxed = last_boxed(f"so \\boxed{{{answer}}}")
            assert boxed is not None
            yield kind, boxed


def graded(variants: Iterable[tuple[str, str, str]]) -> dict[bool, list[tuple[str, str, str]]]:
    """Variants (kind, gold, answer) by whether the suite `math` accepts them; each must have a grade."""
    variants = list(variants)
    with Grader() as pool:
        futures = [pool.submit("math", Item("", "", gold), f"\\boxed{{{answer}}}") for _, gold, answer in variants]
        verdicts = [future.result(timeout=1800).verdict for future in futures]
    assert None not in verdicts
    by_verdict: dict[bool, list[tuple[str, str, str]]] = {True: [], False: []}
    for variant, verdict in zip(variants, verdicts, strict=True):
        by_verdict[verdict is not None and verdict.score == 1].append(variant)
    return by_verdict


def wrong_variants(golds: Iterable[str]) -> list[tuple[str, str, str]]:
    draw = random.Random(0)
    variants = ((kind, gold, answer) for gold in golds for kind, answer in wrong(gold, draw))
    return [variant for variant in variants if re.sub(r"\s", "", variant[1]) != re.sub(r"\s", "", variant[2])]


@pytest.fixture(scope="module")
def golds() -> list[str]:
    if not EVALS.is_dir():
        pytest.skip(f"no real data of the suites: {EVALS}")
    return sorted(set(parquet.read_table(EVALS / "math" / "test.parquet").column("answer").to_pylist()))


def test_wrong_variants_are_rejected() -> None:
    accepted = graded(wrong_variants(SAMPLE))[True]
    assert [variant for variant in accepted if not is_accepted_on_purpose(*variant)] == []


def test_other_spellings_are_accepted() -> None:
    assert graded((kind, gold, answer) for gold in SAMPLE for kind, answer in spellings(gold))[False] == []


def test_wrong_variants_of_all_gold_answers_are_rejected(golds: list[str]) -> None:
    verdicts = graded(wrong_variants(golds))
    print({kind: len(variants) for kind, variants in verdicts.items()}, Counter(kind for kind, *_ in verdicts[True]))
    assert [variant for variant in verdicts[True] if not is_accepted_on_purpose(*variant)] == []


def test_other_spellings_of_gold_answers_are_accepted(golds: list[str]) -> None:
    chosen = random.Random(1).sample(golds, 300)
    verdicts = graded((kind, gold, answer) for gold in chosen for kind, answer in spellings(gold))
    print({kind: len(variants) for kind, variants in verdicts.items()}, verdicts[False])
    assert len(verdicts[False]) <= 0.01 * len(verdicts[True]), verdicts[False]
