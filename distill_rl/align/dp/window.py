"""The dynamic programme as the aligner calls it: window by window, or for many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from distill_rl.align.ids import same_spelling
from distill_rl.align.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from distill_rl.align.dp.canonical import CanonicalTables

Ids = tuple[np.ndarray, np.ndarray]


class WindowSolver:
    """Chunk numbers of windows in which bytes and offsets give no answer.

    Args:
        student, teacher: the vocabularies; the tables of what their tokens spell are made when first needed.
    """

    def __init__(self, student: Vocabulary, teacher: Vocabulary, *, fast_ids: bool, backend: str, band: int) -> None:
        self._vocabularies = student, teacher
        self._fast_ids, self._backend, self._band = fast_ids, backend, band
        self._tables: CanonicalTables | None = None
        self._solved: dict[tuple[bytes, bytes], Ids] = {}
        self._asked: list[Ids] | None = None

    def __call__(self, student_ids: np.ndarray, teacher_ids: np.ndarray) -> Ids:
        """int32 [n], int32 [m]; chunks of which a side is lossy spell the same, or are none."""
        window = student_ids, teacher_ids
        if self._asked is not None:
            self._asked.append(window)
            return np.full(len(student_ids), -1, np.int32), np.full(len(teacher_ids), -1, np.int32)
        found = self._solved.get(_key(window))
        return self._solve([window])[0] if found is None else found

    def ahead(self, rows: Iterable[Callable[[], object]]) -> None:
        """Solves the windows of all rows in one call of the backend, which is what a GPU wants; their answers are kept
        until the next call.

        Args:
            rows: each aligns one row. One that fails is left to fail again.
        """
        self._asked, self._solved = [], {}
        try:
            for align in rows:
                with suppress(Exception):
                    align()
            asked = self._asked
        finally:
            self._asked = None
        self._solved = {_key(window): found for window, found in zip(asked, self._solve(asked))}

    def warm_up(self) -> None:
        """Compiles the backend and makes the tables, which takes seconds in a process that has not done so."""
        nothing = np.zeros(1, np.int64)
        self._solve([(nothing, nothing)])

    def _solve(self, windows: list[Ids]) -> list[Ids]:
        from distill_rl.align.dp.backends import align_windows
        from distill_rl.align.dp.canonical import CanonicalTables

        if self._tables is None:
            self._tables = CanonicalTables(*self._vocabularies, fast_ids=self._fast_ids)
        found = align_windows(windows, self._tables, backend=self._backend, band=self._band)
        return [same_spelling(self._vocabularies, window, chunks) for window, chunks in zip(windows, found)]


def _key(window: Ids) -> tuple[bytes, bytes]:
    return window[0].tobytes(), window[1].tobytes()
