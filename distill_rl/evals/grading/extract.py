"""Extracts the answer from a model's completion.

Every function runs in time linear in the text, whatever its content, and ignores terminal codes (`plain`).
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from distill_rl.evals.grading.normalize import plain_characters, to_latex

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # colours, cursor movements
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])(?:[^\x00-\x1f\x7f-\x9f]{0,1000}+(?:\x07|\x1b\\|\x9c))?"  # titles, links
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")

_BOX = r"\\(?:boxed|fbox)(?![A-Za-z])"
_BRACES = re.compile(rf"(?P<box>{_BOX})|\\.|[{{}}]", re.DOTALL)
_BOX_COMMAND = re.compile(_BOX)
_SPACE = re.compile(r"\s*+")
_OPEN = re.compile(r"\s*+\{")
_BARE_BOXED = re.compile(r"\s*+([^\s${}][^\s$]{0,200}+)")

_FINAL = re.compile(r"Final Answer:\s*+The final answer is", re.IGNORECASE)
_HOPE = re.compile(r"I hope it is correct", re.IGNORECASE)

_MARKUP = (
    r"(?:[\s*_`\"'$({\[]|\\(?:boxed|fbox|text(?:bf)?|math(?:rm|bf))(?![A-Za-z])|\\[(\[]"
    r"|<(?![A-Z]>(?!\s?\w))/?\w{1,10}>|<(?=[A-Z]>)){0,16}+"  # <b> is a tag, <B> may be a letter
)

_NUMBER = (
    r"(?>(?:(?<![\w)\]}.])-\s?)?(?:\\?[$€£]\s?-?)?"  # the minus in 3-2 is not a sign
    r"(?:(?:[0-9]++\s?)?\\[dt]?frac\s?\{\s?[0-9]++\s?\}\s?\{\s?[0-9]++\s?\}"
    r"|\\[dt]?frac\s?\{\s?-[0-9]++\s?\}\s?\{\s?[0-9]++\s?\}"
    r"|[0-9]++ [0-9]++\s?/\s?[0-9]++"
    r"|(?:[0-9]{1,2}(?:,[0-9]{2}(?![0-9])){1,9}+,[0-9]{3}(?![0-9])"  # 1,00,000 is an Indian 100,000
    r"|[0-9]{1,3}(?:,[0-9]{3}){1,9}+(?![0-9])|[0-9]++)(?:\.[0-9]++)?"
    r"(?:[eE][-+]?[0-9]{1,2}(?![0-9]))?(?:\s?/\s?[0-9]++)?"
    r"|\.[0-9]++))"
)
_OPERATOR = r"\s?(?:[-+*/^=x]|\\(?:times|cdot|div)(?![a-z]))\s?"
_RESULT = (  # 8 of `5 + 3 = 8` and of `5 cups + 3 cups = 8 cups`, 15 of `15`, nothing of `5 x 3`
    rf"(?:(?={_NUMBER}(?:\s?[a-z]{{1,15}}){{0,3}}{_OPERATOR})[^\n]{{0,300}}?=\s?{_MARKUP})?"
    rf"({_NUMBER})(?!{_OPERATOR}\(?\\?[$€£]?[0-9])"
)
_ANY_NUMBER = re.compile(_NUMBER)
_HEADING = r"[\s*_]{0,16}+[0-9]{1,2}[.)][ \t*_]{0,8}+[^\W\d_]"  # of `#### 2. Daily earnings`
_HASHES = re.compile(rf"####(?!{_HEADING}){_MARKUP}{_RESULT}", re.IGNORECASE)
_ANSWER_IS = re.compile(
    rf"answer\s{{0,8}}+(?:is\s{{0,8}}+[:：]?|[:：]){_MARKUP}(?:[a-z]\s?=\s?)?{_RESULT}", re.IGNORECASE
)
_NO_NUMBER = re.compile(r"<<[^<>\n]*>>|\^\s?(?:[0-9]+|\{[-+]?[0-9]+\})")
"""A calculation of GSM8K, whose result follows, or an exponent."""
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!]|[\u00a0\u2009\u202f])(?=[0-9]{3})")
_FRACTION = re.compile(r"\\[dt]?frac\s?\{\s?(-?[0-9]+)\s?\}\s?\{\s?([0-9]+)\s?\}")
_NUMBER_MARKUP = re.compile(r"\\(?=[$€£])|[,$€£]")
_LOOSE_BLANK = re.compile(r"(?<![0-9]) | (?![0-9])")


def plain(text: str) -> str:
    """The text without terminal escape sequences, control characters and invisible marks; tabs are kept, and every line
    ends in a newline only."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


@dataclass(slots=True)
class _Box:
    begin: int
    """Start of the command."""
    start: int
    """Start of the content."""
    end: int | None = None
    """End of the content; None: never closed."""
    after: int = 0
    """End of the whole command."""
    outer: _Box | None = None
    """The innermost box around this one."""


def last_boxed(text: str) -> str | None:
    r"""The content of the last non-empty `\boxed{…}` or `\fbox{…}`; for nested boxes, of the outermost one. None: no
    answer.

    1. Find all boxes and drop the empty ones. There is no answer if none is left, or if the last one is never closed,
       because the completion was cut off.
    2. Go from the last box out to its outermost closed box.
    3. While a box contains nothing but another box, go in again, so that `\boxed{\boxed{5}}` gives 5.

    `\boxed 5` extends to the next space or `$`. Braces written as `\{` do not nest. Box commands inside the content are
    removed, their braces stay: `\boxed{x=\boxed{5}}` gives `x={5}`.
    """
    text = plain(text)
    boxes = [box for box in _boxes(text) if box.end is None or not _SPACE.fullmatch(text, box.start, box.end)]
    if not boxes or boxes[-1].end is None:
        return None
    last = boxes[-1]
    while last.outer is not None and last.outer.end is not None:
        last = last.outer
    for inner in boxes[[box is last for box in boxes].index(True) + 1 :]:
        assert last.end is not None
        around = _SPACE.fullmatch(text, last.start, inner.begin) and _SPACE.fullmatch(text, inner.after, last.end)
        if inner.outer is not last or not around:
            break
        last = inner
    return _BOX_COMMAND.sub("", text[last.start : last.end]).strip() or None


def _boxes(text: str) -> list[_Box]:
    """All boxes in the text, in the order in which they begin, found in one pass with a stack of open braces."""
    # A box that is never closed has no `end`.
    boxes: list[_Box] = []
    open_braces: list[_Box | None] = []  # None: a brace that is not a box's
    open_boxes: list[_Box] = []
    at = 0
    while token := _BRACES.search(text, at):
        at = token.end()
        if token["box"]:
            outer = open_boxes[-1] if open_boxes else None
            if brace := _OPEN.match(text, at):
                at = brace.end()
                box = _Box(token.start(), at, outer=outer)
                open_braces.append(box)
                open_boxes.append(box)
                boxes.append(box)
            elif bare := _BARE_BOXED.match(text, at):
                end = bare.start(1) + len(_without_trailing_text(bare[1]))
                boxes.append(_Box(token.start(), bare.start(1), end, end, outer))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces and (closed := open_braces.pop()) is not None:
            closed.end, closed.after = token.start(), at
            open_boxes.pop()
    return boxes


def _without_trailing_text(content: str) -> str:
    # The content of a box without braces, given all that follows `\boxed` up to a space: cut at the first unmatched closing brace, and
    # without final punctuation.
    depth = 0
    for at, character in enumerate(content):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            content = content[:at]
            break
    return content.rstrip(".,;:")


def final_answer(text: str) -> str | None:
    """The text between the first "Final Answer: The final answer is" (in any case) and the next ". I hope it is
    correct."; None if the first part is missing or nothing follows it.

    Lewkowycz et al. 2022 (arXiv:2206.14858), appendix D. If the second part is missing, the first line of the remaining
    text counts. White space at the ends, a leading colon and one final full stop are removed.
    """
    text = plain(text)
    begin = _FINAL.search(text)
    if begin is None:
        return None
    end = _HOPE.search(text, begin.end())
    answer = text[begin.end() : end.start()] if end else text[begin.end() :].strip().partition("\n")[0]
    return answer.strip().removeprefix(":").removesuffix(".").strip() or None


def last_letter(text: str, letters: str = "ABCD") -> str | None:
    r"""The X of the last `Answer: X`, in upper case: `**Answer:** (b)`, `answer: \boxed{B}` and the like are B. None if
    there is none.

    A lower-case letter counts only at the end of its line: "answer: a cat" names no choice.

    Args:
        letters: those that X may be, in upper case.
    """
    upper = rf"([{re.escape(letters)}])(?!_*[^\W_])"
    lower = rf"([{re.escape(letters.lower())}])(?=[)}}\].*_`$]{{0,8}}+[ \t]{{0,8}}+$)"
    pattern = rf"(?i:answer)[\s*_`]{{0,8}}+[:：]{_MARKUP}(?:{upper}|{lower})"
    match = _last(re.compile(pattern, re.MULTILINE), plain_characters(plain(text)))
    return (match[1] or match[2]).upper() if match else None


def last_number(text: str) -> str | None:
    """The final number of a text, for `equivalence.same_number`: the last one after `####`, otherwise the last one
    after "answer is" or "answer:", otherwise the last number in the text; None without any number. Of a calculation
    after these words its result counts, and one without a result does not. `#### 2. Daily earnings` is a heading.

    It is returned without thousands separators and currency signs, with `-` for any minus sign, a fraction as `a/b`,
    and a mixed number as `n a/b`.
    """
    text = _NO_NUMBER.sub("", to_latex(_THOUSANDS.sub(",", plain(text))))
    for pattern in (_HASHES, _ANSWER_IS, _ANY_NUMBER):
        if match := _last(pattern, text):
            return _plain_number(match[pattern.groups])
    return None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of a pattern in the text; None if there is none."""
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def _plain_number(text: str) -> str:
    # The match of `_NUMBER` in the form that `last_number` returns: without separators and currency signs, a fraction as `a/b`; two minus
    # signs in a row cancel out.
    text = _FRACTION.sub(r" \1/\2", _NUMBER_MARKUP.sub("", text))
    return _LOOSE_BLANK.sub("", " ".join(text.split())).replace("--", "")
