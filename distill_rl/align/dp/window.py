"""The dynamic programme as the aligner uses it: window by window, or for many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from distill_rl.align.ids import same_spelling
from distill_rl.align.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from distill_rl.align.dp.canonical import CanonicalTables

IdPair = tuple[np.ndarray, np.ndarray]


class WindowSolver:
    """Solves windows for which bytes and offsets give no exact answer.

    Args:
        student, teacher: the vocabularies; tables of their tokens' canonical strings are built when first needed.
    """

    def __init__(self, student: Vocabulary, teacher: Vocabulary, *, fast_ids: bool, backend: str, band: int) -> None:
        self._vocabularies = student, teacher
        self._fast_ids, self._backend, self._band = fast_ids, backend, band
        self._tables: CanonicalTables | None = None
        self._solved: dict[tuple[bytes, bytes], IdPair] = {}
        self._collected: list[IdPair] | None = None
        """The windows met while `solve_ahead` collects them, None at other times"""

    def __call__(self, student_ids: np.ndarray, teacher_ids: np.ndarray) -> IdPair:
        """Chunk indices int32 [n], int32 [m] of a window; −1 for a token in no chunk.

        The two sides of a chunk spell the same bytes, even if a side is lossy; only a leading space that a tokenizer
        adds or drops may differ (`same_spelling`). While `solve_ahead` collects windows, this one is only noted, and
        all tokens are in no chunk.

        Args:
            student_ids, teacher_ids: int [n], [m]; either may be empty.

        Raises:
            ValueError: the backend is unknown or cannot run here, or the band is below 1.
        """
        window = student_ids, teacher_ids
        if self._collected is not None:
            self._collected.append(window)
            return np.full(len(student_ids), -1, np.int32), np.full(len(teacher_ids), -1, np.int32)
        solved = self._solved.get(_key(window))
        return self._solve([window])[0] if solved is None else solved

    def solve_ahead(self, rows: Iterable[Callable[[], object]]) -> None:
        """Solves the windows of all rows in one call of the backend, as a GPU needs it.

        Aligns every row twice: here, to collect the windows that it asks for, and later by the caller, who then gets
        the stored solutions. These are kept until the next call.

        Args:
            rows: functions that each align one row by calling this object. Their exceptions are suppressed, since the
                caller's call raises them again.

        Raises:
            ValueError: the backend is unknown or cannot run here, or the band is below 1.
        """
        self._collected, self._solved = [], {}
        try:
            for align in rows:
                with suppress(Exception):
                    align()
            windows = self._collected
        finally:
            self._collected = None
        self._solved = {_key(window): solution for window, solution in zip(windows, self._solve(windows))}

    def warm_up(self) -> None:
        """Compiles the backend and builds the tables, which takes seconds the first time in a process.

        Raises:
            ValueError: the backend is unknown or cannot run here, or the band is below 1.
        """
        one_id = np.zeros(1, np.int64)
        self._solve([(one_id, one_id)])

    def _solve(self, windows: list[IdPair]) -> list[IdPair]:
        """The chunk indices (student, teacher) of each window, in order, in one call of the backend.

        Builds the tables on the first call. Chunks whose sides spell different bytes are removed (`same_spelling`). An
        empty list of windows is allowed.

        Raises:
            ValueError: as for `align_windows`.
        """
        from distill_rl.align.dp.backends import align_windows
        from distill_rl.align.dp.canonical import CanonicalTables

        if self._tables is None:
            self._tables = CanonicalTables(*self._vocabularies, fast_ids=self._fast_ids)
        solutions = align_windows(windows, self._tables, backend=self._backend, band=self._band)
        return [same_spelling(self._vocabularies, window, chunks) for window, chunks in zip(windows, solutions)]


def _key(window: IdPair) -> tuple[bytes, bytes]:
    """What identifies a window among solved ones: the bytes of both sides' ids."""
    return window[0].tobytes(), window[1].tobytes()
