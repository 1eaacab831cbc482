"""Needleman–Wunsch on canonical strings, for the windows in which bytes and offsets give no exact answer.

Scores (X-Token, arXiv 2605.21699, as NeMo-RL #2245 sets them): equal strings +3, unequal −3, a gap −1.5, and n ≤ 4
consecutive tokens of one side that together spell one token of the other +1.5·n. They are kept doubled, as integers,
so that every backend finds the same alignment and not merely one as good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from distill_rl.align.dp.canonical import Spelled
from distill_rl.align.dp.check import settle
from distill_rl.align.dp.problem import Problem, make_problems, score_of

if TYPE_CHECKING:
    from distill_rl.align.dp.canonical import CanonicalTables

BACKENDS = ("numba", "numpy", "cuda")


def align_window(
    student: np.ndarray,
    teacher: np.ndarray,
    tables: CanonicalTables,
    *,
    backend: str = "numba",
    band: int = 64,
) -> tuple[np.ndarray, np.ndarray]:
    """Chunk numbers of one window's tokens.

    Args:
        student, teacher: int [n], [m]: the window's token ids of the two vocabularies; either may be empty.
        tables: `CanonicalTables(student_vocabulary, teacher_vocabulary, fast_ids=...)`, made once per pair.
        backend: numba | numpy | cuda; all give the same answer.
        band: half-width in tokens of the strip that is searched, which follows the bytes that both sides spell.
    Returns:
        int32 [n], int32 [m]: chunks 0, 1, … in the order of the text, each on both sides: one token on one side and
        one to four on the other that spell the same canonical string; −1 for a token of a gap, of an unequal pair,
        that spells nothing, or whose pair is disproved by the bytes around it (see `settle`). Swapping the sides
        swaps the answer.
    Raises:
        ValueError: an unknown backend, a band below 1, "cuda" without a CUDA device.
    """
    return align_windows([(student, teacher)], tables, backend=backend, band=band)[0]


def align_windows(
    windows: Sequence[tuple[np.ndarray, np.ndarray]],
    tables: CanonicalTables,
    *,
    backend: str = "numba",
    band: int = 64,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """`align_window` for many (student ids, teacher ids), in order; "cuda" runs them side by side on the device."""
    solve = load_backend(backend)
    if band < 1:
        raise ValueError(f"band must be at least 1 token; it is {band}; set aligner.dp.band: 64")
    sides = [_oriented(*tables.look_up(student, teacher)) for student, teacher in windows]
    problems = [make_problems(rows, columns, band) if len(rows) and len(columns) else [] for rows, columns, _ in sides]
    solved = iter(solve([problem for strips in problems for problem in strips]))
    results = []
    for (rows, columns, swapped), strips in zip(sides, problems):
        # The first of equally good ones, so that every backend takes the same.
        found = max((next(solved) for _ in strips), key=lambda marks: score_of(*marks), default=None)
        if found is None:
            chunks = np.full(len(rows), -1, np.int32), np.full(len(columns), -1, np.int32)
        else:
            chunks = settle(rows, columns, *found)
        results.append(chunks[::-1] if swapped else chunks)
    return results


Solver = Callable[[list[Problem]], list[tuple[np.ndarray, np.ndarray, int]]]


def load_backend(name: str) -> Solver:
    """The solver of a backend, imported now; for "cuda", ValueError where it cannot run (`dp_device`)."""
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


def _oriented(student: Spelled, teacher: Spelled) -> tuple[Spelled, Spelled, bool]:
    """(rows, columns, whether the teacher is the rows), decided by what the sides spell and not by their names.

    Ties between alignments are settled by rows and columns, so the answer for swapped sides is the swapped answer.
    """
    swapped = len(student) > len(teacher)
    if len(student) == len(teacher):
        differ = np.flatnonzero(student.hashes != teacher.hashes)
        swapped = len(differ) > 0 and bool(student.hashes[differ[0]] > teacher.hashes[differ[0]])
    return (teacher, student, True) if swapped else (student, teacher, False)
