"""Marks in place of texts: where the texts stand in what a chat template makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple


class TextPlace(NamedTuple):
    """Where a text stands in a rendered chat, in characters."""

    start: int
    stop: int
    low: int
    """Where the marked text before it ends; what stands between is the template's, or was not marked."""
    high: int
    """Where the next marked text begins"""


class Marks:
    """Unique words, each of which takes the place of a text in a chat that is rendered again.

    What surrounds the marks in that rendering is what the template writes around the texts, so the texts lie between the
    same pieces in the first rendering. A mark consists of ASCII letters and digits: JSON and Python write it as it is.

    Args:
        rendered: the chat as it was rendered without marks.
    """

    def __init__(self, rendered: str) -> None:
        self._rendered = rendered
        self._stem = next(stem for i in count() if (stem := f"zq{i}mk") not in rendered)
        self._forms: list[tuple[str, ...]] = []
        self._kept: list[bool] = []

    def __len__(self) -> int:
        return len(self._forms)

    def put(self, *forms: str, keep: bool = False) -> str:
        """A new mark, whose number is the count of those before it.

        Args:
            forms: the text that it stands for, and how it may also be written.
            keep: the text stays before the mark: the key of an object, by which templates sort.
        Returns:
            what to write in the place of the text; with `keep`, behind it.
        """
        self._forms.append(forms)
        self._kept.append(keep)
        return f"{self._stem}{len(self._forms) - 1}km"

    def written(self, marked: str) -> set[int]:
        """The marks that occur in a text."""
        return set(map(int, re.findall(f"{self._stem}([0-9]+)km", marked)))

    def places(self, marked: str) -> tuple[list[tuple[int, TextPlace]], int | None]:
        """Where the texts of the marks stand, by the rendering of the marked chat.

        Steps:

        1. The marks divide that rendering into pieces, which are the template's own text.
        2. From the beginning on, the rendered chat has the same pieces, and between two of them a form of a mark's text.
        3. At the first mark for which it has not, the search ends: the template has written something else.

        Returns:
            mark and place for every occurrence of a mark, in order; where the search ended too early, in characters of
            the rendered chat, or None. What stands behind the last piece, such as a stop that was added, is not looked at.
        """
        before, *rest = re.split(f"{self._stem}([0-9]+)km", marked)
        if not self._rendered.startswith(before):
            return [], 0
        found: list[tuple[int, int, int]] = []
        cursor = len(before)
        for mark, after in zip(map(int, rest[::2]), rest[1::2]):
            start, forms = cursor, _forms(self._forms[mark])
            if self._kept[mark]:
                kept = next((form for form in forms if before.endswith(form)), "")
                start, forms = cursor - len(kept), iter([kept])
            size = self._fitting(start, forms, after, is_last=len(found) + 1 == len(rest) // 2)
            if size is None:
                return _with_bounds(found, start), start
            found.append((mark, start, start + size))
            before, cursor = after, start + size + len(after)
        return _with_bounds(found, len(self._rendered)), None

    def _fitting(self, start: int, forms: Iterator[str], after: str, *, is_last: bool) -> int | None:
        """The length of the first form that stands at a place, with a piece of the template's text behind it."""
        rendered, first = self._rendered, None
        for form in forms:
            stop = start + len(form)
            if rendered.startswith(form, start) and rendered.startswith(after, stop):
                # In the last piece of a chat, what reaches its end comes first: a stop may be written behind it.
                if not is_last or stop + len(after) == len(rendered):
                    return len(form)
                first = len(form) if first is None else first
        return first


def _forms(texts: tuple[str, ...]) -> Iterator[str]:
    """Yields texts as they are, without white space around them, and each as JSON writes it."""
    plain = [form for text in texts for form in bare_forms(text)]
    yield from plain
    for ascii in (False, True):
        yield from (json.dumps(form, ensure_ascii=ascii)[1:-1] for form in plain)


def bare_forms(text: str) -> list[str]:
    """A text as it is, and without white space around it."""
    return list(dict.fromkeys((text, text.strip(), text.lstrip(), text.rstrip())))


def _with_bounds(found: list[tuple[int, int, int]], end: int) -> list[tuple[int, TextPlace]]:
    """Marks and places, with the bounds of the text between them; the last one is bounded by `end`."""
    lows = [0, *(stop for _, _, stop in found)]
    highs = [*(start for _, start, _ in found[1:]), end]
    return [(mark, TextPlace(start, stop, low, high)) for (mark, start, stop), low, high in zip(found, lows, highs)]
