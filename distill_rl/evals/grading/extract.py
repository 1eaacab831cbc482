"""Finding the answer in what a model wrote.

Every function takes time linear in the text, whatever it holds, and reads it without terminal codes (`plain`).
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # colours, movements of the cursor
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

_DRESS = r"(?:[\s*_`\"'$({\[]|\\(?:boxed|fbox|text(?:bf)?|math(?:rm|bf))(?![A-Za-z])|\\[(\[]|</?\w{1,10}>){0,16}+"

_MINUS = str.maketrans("\u2212\ufe63\uff0d", "---")
_NUMBER = (
    r"(?>(?:(?<![\w)\]}.])-\s?)?(?:\\?[$€£]\s?-?)?"  # the minus of 3-2 is no sign
    r"(?:(?:[0-9]++\s?)?\\[dt]?frac\s?\{\s?[0-9]++\s?\}\s?\{\s?[0-9]++\s?\}"
    r"|\\[dt]?frac\s?\{\s?-[0-9]++\s?\}\s?\{\s?[0-9]++\s?\}"
    r"|[0-9]++ [0-9]++\s?/\s?[0-9]++"
    r"|(?:[0-9]{1,3}(?:,[0-9]{3}){1,9}+(?![0-9])|[0-9]++)(?:\.[0-9]++)?"
    r"(?:[eE][-+]?[0-9]{1,2}(?![0-9]))?(?:\s?/\s?[0-9]++)?"
    r"|\.[0-9]++))"
)
_ANY_NUMBER = re.compile(_NUMBER)
_HASHES = re.compile(rf"####{_DRESS}({_NUMBER})")
_ANSWER_IS = re.compile(
    rf"answer\s{{0,8}}+(?:is\s{{0,8}}+[:：]?|[:：]){_DRESS}(?:[a-z]\s?=\s?)?({_NUMBER})"
    r"(?!\s?(?:[-+*/×·÷^=x]|\\(?:times|cdot|div)(?![a-z]))\s?\(?\\?[$€£]?[0-9])",  # 5 x 3 = 15 is not 5
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9]{3})")
_FRACTION = re.compile(r"\\[dt]?frac\s?\{\s?(-?[0-9]+)\s?\}\s?\{\s?([0-9]+)\s?\}")
_NOT_OF_NUMBERS = re.compile(r"\\(?=[$€£])|[,$€£]")
_LOOSE_BLANK = re.compile(r"(?<![0-9]) | (?![0-9])")


def plain(text: str) -> str:
    """The text without terminal escape sequences, control characters and invisible marks; tabs and line ends stay."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


@dataclass(slots=True)
class _Box:
    begin: int
    """of the command"""
    start: int
    """of the content"""
    end: int | None = None
    """of the content; None: never closed"""
    after: int = 0
    outer: _Box | None = None
    """the nearest box that was still open"""


def last_boxed(text: str) -> str | None:
    r"""What is in the last `\boxed{…}` or `\fbox{…}` that is not empty; of boxes in each other, the outermost.

    `\boxed 5` counts up to the next space or `$`. None: there is no box, or the last one is never closed (a completion
    that was cut off). Braces written as `\{` do not nest.
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
    """Every box, in the order in which they begin."""
    boxes: list[_Box] = []
    braces: list[_Box | None] = []
    nested: list[_Box] = []
    at = 0
    while found := _BRACES.search(text, at):
        at = found.end()
        if found["box"]:
            outer = nested[-1] if nested else None
            if brace := _OPEN.match(text, at):
                at = brace.end()
                box = _Box(found.start(), at, outer=outer)
                braces.append(box)
                nested.append(box)
                boxes.append(box)
            elif bare := _BARE_BOXED.match(text, at):
                end = bare.start(1) + len(_bare(bare[1]))
                boxes.append(_Box(found.start(), bare.start(1), end, end, outer))
        elif found[0] == "{":
            braces.append(None)
        elif found[0] == "}" and braces and (closed := braces.pop()) is not None:
            closed.end, closed.after = found.start(), at
            nested.pop()
    return boxes


def _bare(content: str) -> str:
    """Without what belongs to the text around it: closing braces too many, and punctuation."""
    depth = 0
    for at, character in enumerate(content):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            content = content[:at]
            break
    return content.rstrip(".,;:")


def final_answer(text: str) -> str | None:
    """What stands between "Final Answer: The final answer is" and ". I hope it is correct.", the first time.

    Lewkowycz et al. 2022 (arXiv:2206.14858), appendix D. Where the second part is missing, up to the end of the line.
    """
    text = plain(text)
    begin = _FINAL.search(text)
    if begin is None:
        return None
    end = _HOPE.search(text, begin.end())
    answer = text[begin.end() : end.start()] if end else text[begin.end() :].strip().partition("\n")[0]
    return answer.strip().removeprefix(":").removesuffix(".").strip() or None


def last_letter(text: str, letters: str = "ABCD") -> str | None:
    r"""The X of the last `Answer: X`, in upper case: `**Answer:** (b)`, `answer: \boxed{B}` and the like are B.

    A small letter counts only where nothing follows it in the line, for "answer: a cat" names no choice.
    """
    capital = rf"([{re.escape(letters)}])(?!\w)"
    lonely = rf"([{re.escape(letters.lower())}])(?=[)}}\].*_`$]{{0,8}}+[ \t]{{0,8}}+$)"
    pattern = rf"(?i:answer)[\s*_`]{{0,8}}+[:：]{_DRESS}(?:{capital}|{lonely})"
    found = _last(re.compile(pattern, re.MULTILINE), plain(text))
    return (found[1] or found[2]).upper() if found else None


def last_number(text: str) -> str | None:
    r"""The number that a text ends with, for `equivalence.same_number`: after `####`, else after "answer is" or
    "answer:", else the last one of the text.

    Without separators of thousands, currency and percent signs; `-` for any minus; a fraction as `a/b`, a mixed number
    as `n a/b`.
    """
    text = _THOUSANDS.sub(",", plain(text).translate(_MINUS))
    for pattern in (_HASHES, _ANSWER_IS, _ANY_NUMBER):
        if found := _last(pattern, text):
            return _bare_number(found[pattern.groups])
    return None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def _bare_number(text: str) -> str:
    text = _FRACTION.sub(r" \1/\2", _NOT_OF_NUMBERS.sub("", text))
    return _LOOSE_BLANK.sub("", " ".join(text.split())).replace("--", "")
