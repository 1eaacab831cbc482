r"""Rewrites a LaTeX answer in one spelling that the parser reads: marks around it go, what it means stays."""

from __future__ import annotations

import re
import unicodedata

_CHARACTERS = str.maketrans(
    {
        "\u2212": "-", "\ufe63": "-", "\u2013": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ",
        "∕": "/", "⁄": "/", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
        "±": r"\pm ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∅": r"\emptyset ",
        "∈": r"\in ", "∴": r"\therefore ", "°": r"^\circ ", "′": "'", "¢": r"\text{ cents}", "€": r"\text{ euros}",
    }
    | {
        letter: f"\\{name.title() if 'CAPITAL' in kind else name.lower()} "
        for letter in map(chr, range(0x391, 0x3CA))
        for kind, _, name in [unicodedata.name(letter, "").rpartition(" ")]
    }
)  # fmt: skip
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻⁼⁽⁾ⁿⁱ]+")
_LOWERED = re.compile("[₀-₉₊₋₌₍₎ₐₑₒₓₕₖₗₘₙₚₛₜ]+")
_FRACTION = re.compile("[¼-¾⅐-⅞]")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|\\?[A-Za-z]+))")

_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"))
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_STOP = re.compile(r"(?<![.,;:\\])[.,;:]$")
_FONT = re.compile(r"\\(text|mbox|hbox|math|boldsymbol|bm)(?:rm|bf|it|sf|tt|normal)?\s*(?=\{)")
_TEXT = re.compile(rf"{_FONT.pattern}\{{([^{{}}]*)\}}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"(?<=[0-9])\s*(?:,\s*\\!|\\,|\{,\})\s*(?=[0-9]{3})", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])(?:\s*\.)?|\\!|\\phantom\s*(?:\{[^{}]*\}|.)", ""),
        (r"\\(?:therefore|displaystyle|textstyle|boxed|fbox|underline)(?![A-Za-z])|\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"(?<!\\)\\[,;:>\s]|~|\\q?quad(?![A-Za-z])|\s+", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac ?([0-9a-z]|\\pi) ?(?=[0-9a-z{])", r"\\frac{\1}"),
        (r"\\frac ?(\{(?:[^{}]|\{[^{}]*\})*\}) ?([0-9a-z])", r"\\frac\1{\2}"),
        (r"\\sqrt ?(\[[0-9a-z]+\])? ?([0-9a-z])", r"\\sqrt\1{\2}"),
        (r"(?<![\\A-Za-z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi"),
        (r"\\([lr])brack(?![A-Za-z])", lambda match: "[" if match[1] == "l" else "]"),
        (r"\\([lr])brace(?![A-Za-z])", lambda match: r"\{" if match[1] == "l" else r"\}"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"(?<=[)\]]) ?U ?(?=[(\[])", r"\\cup "),
        (r"\\([lg])(?:eq|eqslant)(?![A-Za-z])", r"\\\1e"),
        (r"\\([lg])t(?![A-Za-z])", lambda match: "<" if match[1] == "l" else ">"),
        (r"\\neq(?![A-Za-z])", r"\\ne"),
        (r"\\[lcd]?dots(?![A-Za-z])", "..."),
        (r"(?:, ?)?(?:\\text\{ ?,? ?and ?\}|(?<![A-Za-z\\])and(?![A-Za-z]))", ","),
        (r"(?:, ?)?(?:\\text\{ ?or ?\}|(?<![A-Za-z\\])or(?![A-Za-z]))", ";"),
        (r"(?<=[0-9]) ?(?:\\text\{ ?percent ?\}|percent$)", r"\\%"),
        (r"(?<=[0-9])%", r"\\%"),
    )
)


def normalize(answer: str) -> str:
    r"""The answer in one spelling, in time linear in its length but for nested marks. Maybe empty.

    1. Characters such as ½, √, ² and ≤ become LaTeX (`to_latex`).
    2. What encloses the whole answer goes, as long as there is any: delimiters, Markdown, braces, a full stop.
    3. Commands without meaning go (`\left`, `\displaystyle`, `\boxed`), and commands that have several spellings get one
       of them. Text stays `\text{…}` where it holds letters; other fonts go.
    """
    text, before = to_latex(answer), None
    while text != before:
        before = text
        while (inner := _without_marks(text)) != text:
            text = inner
        text = _TEXT.sub(_in_one_font, text)
        for pattern, spelling in _SPELLINGS:
            text = pattern.sub(spelling, text)
    return text


def to_latex(text: str) -> str:
    r"""The text with LaTeX for mathematical characters, and ASCII for other variants of ASCII characters: `2½` becomes
    `2\frac{1}{2}`, `x²` `x^2`, `√3` `\sqrt{3}`, `π` `\pi`."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda match: "^" + _group(match[0]), text)
    text = _LOWERED.sub(lambda match: "_" + _group(match[0]), text)
    text = _FRACTION.sub(lambda match: "\\frac{{{}}}{{{}}}".format(*plain_characters(match[0]).split("⁄")), text)
    text = plain_characters(text).translate(_CHARACTERS)
    return _ROOT.sub(
        lambda match: ("\\sqrt[3]" if match[1] == "∛" else "\\sqrt") + f"{{{match[2] or match[3] or match[4]}}}", text
    )


def split(text: str) -> list[str]:
    """The non-empty parts of a text between the commas and semicolons outside of all brackets; none if a bracket is
    closed that was not opened."""
    depth, start, parts = 0, 0, []
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return []
        if depth == 0 and character in ",;":
            parts.append(text[start:at])
            start = at + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def plain_characters(text: str) -> str:
    """The text with the plain form of every character that is a variant of it: wide, bold, non-breaking (NFKC)."""
    return unicodedata.normalize("NFKC", text)


def _group(text: str) -> str:
    """Raised or lowered characters as a script of LaTeX, in braces if there are several."""
    text = plain_characters(text)
    return text if len(text) == 1 else f"{{{text}}}"


def _in_one_font(match: re.Match[str]) -> str:
    """Text with letters, or letters in a font that make a word, as `\text{…}`; anything else without its font."""
    least = 1 if match[1] in ("text", "mbox", "hbox") else 2
    letters = re.search(f"[A-Za-z]{{{least}}}", _COMMAND.sub("", match[2]))
    is_word = letters and not re.match(r"\s*[-+$]?[0-9]", match[2])
    return f"\\text{{{match[2]}}}" if is_word else match[2]


def _without_marks(text: str) -> str:
    """The text without white space, one pair of marks around the whole of it, and a final stop."""
    text = text.strip()
    for left, right in _PAIRS:
        inner = text[len(left) : len(text) - len(right)]
        inside = inner.replace("\\$", "")
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right) and right not in inside:
            return inner.strip()
    font = _FONT.match(text)
    start = font.end() if font and not _TEXT.fullmatch(text) else 0
    if text.startswith("{", start) and _end_of_group(text, start) == len(text):
        return text[start + 1 : -1].strip()
    return _STOP.sub("", text).strip()


def _end_of_group(text: str, start: int) -> int:
    """Where the brace at `start` is closed; 0: nowhere."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return 0
