"""Needleman–Wunsch alignment on canonical strings, for windows in which bytes and offsets give no exact answer.

An alignment of n row tokens with m column tokens is built from these moves, with the scores of X-Token (arXiv
2605.21699, as in NeMo-RL #2245):

    equal      one row with one column of the same canonical string          +3
    unequal    one row with one column of different strings                  −3
    gap        a row or a column on its own                                  −1.5
    join       k = 2 … 4 consecutive tokens of one side that together        +1.5·k
               spell one token of the other

Let S[i, j] be the best score for the first i rows and the first j columns. Then S[0, 0] = 0 and

    S[i, j] = max( S[i−1, j−1] ± 3,  S[i−1, j] − 1.5,  S[i, j−1] − 1.5,
                   S[i−k, j−1] + 1.5·k  if rows i−k+1 … i spell column j,
                   S[i−1, j−k] + 1.5·k  if columns j−k+1 … j spell row i )

Steps:

1. `CanonicalTables`: each token's canonical string, as an id and as a polynomial hash. The hash of a join follows from
   those of its tokens, so joins are compared without building strings.
2. `make_problems`: the strip of cells to search around the expected path, linear in n + m.
3. A backend fills the strip, storing one move per cell, and traces the moves back from (n, m).
4. `keep_in_place`: chunks that lie at two places of the text are removed.
5. `same_spelling`: so are chunks whose bytes differ, such as those of joins with equal hashes.

Scores are doubled to be integers, and ties are resolved in a fixed order, so all backends find the same alignment and
not merely an equally good one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from distill_rl.align.alignment import chunk_bounds, keep_chunks
from distill_rl.align.dp.problem import CanonicalTables, CanonicalTokens, Solve, make_problems, score_of
from distill_rl.align.ids import IdPair, same_spelling
from distill_rl.align.vocabulary import Vocabulary

# Whether Numba can compile and run CUDA kernels here, and if not, why.


class Missing(NamedTuple):
    """What the CUDA backend needs and this machine lacks."""

    rule: str
    remedy: str


_INSTALL = "pip install 'numba-cuda[cu13]', or set aligner.dp.backend=numba"


def missing_for_cuda() -> Missing | None:
    """What the CUDA backend needs and this machine lacks; None if the backend can run.

    It runs on a GPU, or in Numba's simulator (`NUMBA_ENABLE_CUDASIM=1`). Kernels are compiled by NVVM, which PyTorch's
    wheels do not include. The package numba-cuda does, and replaces Numba's own `numba.cuda`. This function initialises
    the CUDA driver but creates no context on any GPU.
    """
    try:
        import numba
        from numba import cuda
    except ImportError as error:
        return Missing(f"needs numba-cuda, which cannot be imported here ({_first_line(error)})", _INSTALL)
    if numba.config.ENABLE_CUDASIM or cuda.is_available():
        return None
    from numba.cuda.cudadrv import nvvm

    if not nvvm.is_available():
        why = "numba-cuda, which brings it, is not installed"
        if getattr(cuda, "implementation", "") == "NVIDIA":
            why = "numba-cuda is installed without it"
        return Missing(f"needs NVVM to compile its kernel; {why}", _INSTALL)
    rule = f"needs a GPU that Numba can use ({_first_line(cuda.cuda_error() or 'it finds none')})"
    return Missing(rule, "set aligner.dp.backend=numba")


def _first_line(error: object) -> str:
    """The first informative line of an error, "unknown" if it has none; the driver's errors begin with an empty one."""
    lines = [line.strip(" :") for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.startswith("Error at driver init")), "unknown")


# Verifies the chunks of an alignment: both sides must lie at the same place of the text.

REACH = 16
"""At most this many consecutive chunks are recognised as out of place"""

Sides = tuple[CanonicalTokens, CanonicalTokens]
_WHITE = np.isin(np.arange(256), list(b" \t\n\v\f\r"))


def keep_in_place(sides: Sides, row_marks: np.ndarray, column_marks: np.ndarray, count: int) -> IdPair:
    """Chunk indices int32 [n], int32 [m], in the order of the text.

    Without chunks that pair two different occurrences of the same string. What remains is renumbered from 0; −1 for a
    token in no chunk.

    Args:
        sides: the rows and the columns.
        row_marks, column_marks, count: what `trace_back` writes and returns.
    """
    rows, columns = (np.where(marks < 0, -1, count - 1 - marks) for marks in (row_marks, column_marks))
    chunks = rows.astype(np.int32), columns.astype(np.int32)
    for spaces in (True, False):
        keep = _in_place(sides, chunks, int(chunks[0].max(initial=-1)) + 1, spaces)
        if not keep.all():
            chunks = keep_chunks(keep, *chunks)
    return chunks


def _in_place(sides: Sides, chunks: IdPair, count: int, spaces: bool) -> np.ndarray:
    """bool [count]: False for a chunk that pairs two different occurrences of the same string."""
    # The score rewards any pair of equal tokens, so a repeated word, or a repeated byte of divided characters, may be
    # paired with the wrong occurrence where the two sides cut the text differently.
    in_place = np.ones(count, bool)
    texts, begins, ends = zip(*(_extents(side, chunk, count, spaces) for side, chunk in zip(sides, chunks)))
    # Row bytes before a chunk minus column bytes: constant while both sides spell the same text. The window's beginning
    # and end count as chunks.
    drift = begins[0] - begins[1]
    changes = np.flatnonzero(np.diff(drift))
    if len(changes) < 2:
        return in_place
    drifts, done = drift.tolist(), 0
    for before in changes.tolist():
        if before < done:
            continue
        # Where the drift changes and soon returns to its old value, compare the bytes that both sides spell in between.
        nearby = drifts[before + 1 : before + 2 + REACH]
        if drifts[before] not in nearby:
            continue
        after = before + 1 + nearby.index(drifts[before])
        left, right = (text[end[before] : begin[after]] for text, begin, end in zip(texts, begins, ends))
        # If they are equal, this piece of the text is known, and the chunks in between lie at two places of it. If they
        # differ, a lossy side changed the text, and nothing is concluded.
        if np.array_equal(left, right):
            in_place[before : after - 1] = False  # entry 0 is the window's beginning, so chunk i is entry i + 1
            done = after
    return in_place


def _extents(
    side: CanonicalTokens, chunk: np.ndarray, count: int, spaces: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bytes that a side spells in the window, uint8, and where each chunk begins and ends in them."""
    text = side.strings.joined()
    ends_of_tokens = np.concatenate(([0], np.cumsum(side.strings.lengths, dtype=np.int64)))
    if not spaces:
        kept = ~_WHITE[text]
        text, ends_of_tokens = text[kept], np.concatenate(([0], np.cumsum(kept)))[ends_of_tokens]
    firsts, stops = chunk_bounds(chunk, count)
    begins = np.concatenate(([0], ends_of_tokens[firsts], ends_of_tokens[-1:]))
    ends = np.concatenate(([0], ends_of_tokens[stops], ends_of_tokens[-1:]))
    return text, begins, ends


BACKENDS = ("numba", "numpy", "cuda")


def align_windows(
    windows: Sequence[IdPair], tables: CanonicalTables, *, backend: str = "numba", band: int = 64
) -> list[IdPair]:
    """Chunk indices of each window's tokens, in order; "cuda" solves the windows in parallel on the device.

    Args:
        windows: (student, teacher), int [n], [m]: the window's token ids in the two vocabularies; either may be empty.
        tables: `CanonicalTables(student_vocabulary, teacher_vocabulary, fast_ids=...)`, built once per pair.
        backend: numba | numpy | cuda; the results are the same.
        band: half-width, in tokens, of the strip that is searched around the path expected from the bytes.
    Returns:
        int32 [n], int32 [m] per window: chunks 0, 1, … in the order of the text. A chunk is one token on one side and
        one to four on the other that spell the same canonical string. −1 for a token in a gap or in an unequal pair,
        for one that spells nothing, and for one whose chunk lies at two places (`keep_in_place`). Swapping the sides
        swaps the result.
    Raises:
        ValueError: an unknown backend, a band below 1, "cuda" without a CUDA device.
    """
    solve = load_backend(backend)
    if band < 1:
        raise ValueError(f"band must be at least 1 token; it is {band}; set aligner.dp.band: 64")
    sides = [_orient(*tables.look_up(student, teacher)) for student, teacher in windows]
    problems = [make_problems(rows, columns, band) if len(rows) and len(columns) else [] for rows, columns, _ in sides]
    solutions = iter(solve([problem for strips in problems for problem in strips]))
    results = []
    for (rows, columns, swapped), strips in zip(sides, problems):
        # A window may have two strips. On equal scores the first one wins, whatever the backend.
        best = max((next(solutions) for _ in strips), key=lambda solution: score_of(*solution), default=None)
        if best is None:
            chunks = np.full(len(rows), -1, np.int32), np.full(len(columns), -1, np.int32)
        else:
            chunks = keep_in_place((rows, columns), *best)
        results.append(chunks[::-1] if swapped else chunks)
    return results


def load_backend(name: str) -> Solve:
    """The function that solves problems with this backend; its module is imported on this call.

    It takes a list of `WindowProblem`s and returns (row marks, column marks, number of chunks) of each, as `trace_back`
    defines them.

    Args:
        name: numba | numpy | cuda.

    Raises:
        ValueError: an unknown name; "cuda" where it cannot run (`missing_for_cuda`).
    """
    if name == "numpy":
        from distill_rl.align.dp.problem import solve_in_numpy as solve
    elif name == "numba":
        from distill_rl.align.dp.compiled import solve
    elif name == "cuda":
        if missing := missing_for_cuda():
            raise ValueError(f"aligner.dp.backend: cuda {missing.rule}; {missing.remedy}")
        from distill_rl.align.dp.cuda import solve
    else:
        raise ValueError(f"the backend of the dynamic programme must be one of {', '.join(BACKENDS)}; it is {name!r}")
    return solve


def _orient(student: CanonicalTokens, teacher: CanonicalTokens) -> tuple[CanonicalTokens, CanonicalTokens, bool]:
    """Decides which side is the rows of the dynamic programme: (rows, columns, whether the teacher is the rows)."""
    # The shorter side is; of equally long ones it depends only on the tokens and not on which side is called student,
    # so swapping the sides swaps the result. Rows and columns are not treated alike when scores tie.
    swapped = len(student) > len(teacher)
    if len(student) == len(teacher):
        differ = np.flatnonzero(student.hashes != teacher.hashes)
        swapped = len(differ) > 0 and bool(student.hashes[differ[0]] > teacher.hashes[differ[0]])
    return (teacher, student, True) if swapped else (student, teacher, False)


# The dynamic programme as the aligner uses it: window by window, or for many rows at once.


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
        """The chunk indices (student, teacher) of each window, in order, in one call of the backend."""
        # Builds the tables on the first call. Chunks whose sides spell different bytes are removed (`same_spelling`).
        # An empty list of windows is allowed.
        if self._tables is None:
            self._tables = CanonicalTables(*self._vocabularies, fast_ids=self._fast_ids)
        solutions = align_windows(windows, self._tables, backend=self._backend, band=self._band)
        return [same_spelling(self._vocabularies, window, chunks) for window, chunks in zip(windows, solutions)]


def _key(window: IdPair) -> tuple[bytes, bytes]:
    return window[0].tobytes(), window[1].tobytes()
