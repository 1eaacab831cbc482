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

1. `canonical`: each token's canonical string, as an id and as a polynomial hash. The hash of a join follows from those
   of its tokens, so joins are compared without building strings.
2. `problem`: the strip of cells to search around the expected path, linear in n + m.
3. A backend fills the strip, storing one move per cell, and traces the moves back from (n, m).
4. `check`: chunks whose bytes differ (equal hashes), or that lie at two places of the text, are removed.

Scores are doubled to be integers, and ties are resolved in a fixed order, so all backends find the same alignment and
not merely an equally good one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from distill_rl.align.dp.canonical import CanonicalTokens
from distill_rl.align.dp.check import keep_verified
from distill_rl.align.dp.problem import Problem, make_problems, score_of

if TYPE_CHECKING:
    from distill_rl.align.dp.canonical import CanonicalTables

BACKENDS = ("numba", "numpy", "cuda")


def align_windows(
    windows: Sequence[tuple[np.ndarray, np.ndarray]],
    tables: CanonicalTables,
    *,
    backend: str = "numba",
    band: int = 64,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Chunk indices of each window's tokens, in order; "cuda" solves the windows in parallel on the device.

    Args:
        windows: (student, teacher), int [n], [m]: the window's token ids in the two vocabularies; either may be empty.
        tables: `CanonicalTables(student_vocabulary, teacher_vocabulary, fast_ids=...)`, built once per pair.
        backend: numba | numpy | cuda; the results are the same.
        band: half-width, in tokens, of the strip that is searched around the path expected from the bytes.
    Returns:
        int32 [n], int32 [m] per window: chunks 0, 1, … in the order of the text. A chunk is one token on one side and
        one to four on the other that spell the same canonical string. −1 for a token in a gap or in an unequal pair,
        for one that spells nothing, and for one whose chunk failed verification (`keep_verified`). Swapping the sides
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
            chunks = keep_verified((rows, columns), *best)
        results.append(chunks[::-1] if swapped else chunks)
    return results


Solver = Callable[[list[Problem]], list[tuple[np.ndarray, np.ndarray, int]]]


def load_backend(name: str) -> Solver:
    """The function that solves problems with this backend; its module is imported on this call.

    It takes a list of `Problem`s and returns (row marks, column marks, number of chunks) of each, as `trace_back`
    defines them.

    Args:
        name: numba | numpy | cuda.

    Raises:
        ValueError: an unknown name; "cuda" where it cannot run (`device.require_cuda`).
    """
    if name == "numpy":
        from distill_rl.align.dp.plain import solve
    elif name == "numba":
        from distill_rl.align.dp.compiled import solve
    elif name == "cuda":
        from distill_rl.align.dp.device import require_cuda

        require_cuda()
        from distill_rl.align.dp.cuda import solve
    else:
        raise ValueError(f"the backend of the dynamic programme must be one of {', '.join(BACKENDS)}; it is {name!r}")
    return solve


def _orient(student: CanonicalTokens, teacher: CanonicalTokens) -> tuple[CanonicalTokens, CanonicalTokens, bool]:
    """Decides which side is the rows of the dynamic programme: (rows, columns, whether the teacher is the rows).

    The shorter side is; of equally long ones it depends only on the tokens and not on which side is called student, so
    swapping the sides swaps the result. Rows and columns are not treated alike when scores tie.
    """
    swapped = len(student) > len(teacher)
    if len(student) == len(teacher):
        differ = np.flatnonzero(student.hashes != teacher.hashes)
        swapped = len(differ) > 0 and bool(student.hashes[differ[0]] > teacher.hashes[differ[0]])
    return (teacher, student, True) if swapped else (student, teacher, False)
