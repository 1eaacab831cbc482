"""The dynamic programme in NumPy, a row of cells at a time; compiles nothing, about 30 times slower than Numba."""

from __future__ import annotations

import numpy as np

from distill_rl.align.dp import problem as dp
from distill_rl.align.dp.canonical import NONE
from distill_rl.align.dp.problem import Problem, trace_back


def solve(problems: list[Problem]) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """The best alignment of each problem within its strip, in order: (row marks, column marks, number of chunks).

    Marks, int32 [n] and int32 [m], are those of `trace_back`. Every backend returns the same ones.
    """
    solved = []
    for problem in problems:
        rows, columns = np.empty(len(problem.row_ids), np.int32), np.empty(len(problem.column_ids), np.int32)
        count = trace_back(_fill(problem), problem.low, problem.offsets, rows, columns)
        solved.append((rows, columns, count))
    return solved


def _fill(problem: Problem) -> np.ndarray:
    """uint8 [cells]: the best move into every cell of the problem's strip, in the order of `Problem.offsets`.

    All moves but the column gap depend on rows above only, so a whole row takes them at once. The column gap depends on
    the cell to the left; with gap score g, S[i, j] = maxₖ≤ⱼ (best[k] − g·k) + g·j, which is a running maximum.
    """
    low, high, offsets = problem.low.tolist(), problem.high.tolist(), problem.offsets.tolist()
    n, m = len(problem.row_ids), len(problem.column_ids)
    # One entry in front, so that index j is the column token that cell (i, j) adds.
    column_ids = np.concatenate(([NONE], problem.column_ids))
    column_joins = np.concatenate((np.zeros((1, dp.MAX_JOIN), np.uint64), problem.column_joins)).T.copy()
    slope = dp.GAP_SCORE * np.arange(m + 1)
    moves = np.empty(offsets[-1], np.uint8)
    # The last five rows of scores, with MAX_JOIN columns in front. NEVER outside a row's strip.
    scores = np.full((dp.MAX_JOIN + 1, dp.MAX_JOIN + m + 1), dp.NEVER, np.int64)
    scores[0, dp.MAX_JOIN : dp.MAX_JOIN + high[0] + 1] = slope[: high[0] + 1]
    moves[: offsets[1]] = dp.COLUMN_GAP
    for i in range(1, n + 1):
        first, last = low[i], high[i] + 1

        def before(rows: int, columns: int, i: int = i, first: int = first, last: int = last) -> np.ndarray:
            """S[i − rows, j − columns] for all j of this row."""
            return scores[
                (i - rows) % (dp.MAX_JOIN + 1),
                dp.MAX_JOIN + first - columns : dp.MAX_JOIN + last - columns,
            ]

        row_id, joins = problem.row_ids[i - 1], problem.row_joins[i - 1]
        equal = (column_ids[first:last] == row_id) & (row_id != NONE)
        best = np.where(equal, before(1, 1) + dp.EQUAL_SCORE, dp.NEVER)
        move = np.full(last - first, dp.EQUAL, np.uint8)
        for size in range(2, dp.MAX_JOIN + 1):
            if joins[size - 1] != 0:
                same = column_joins[0, first:last] == joins[size - 1]
                _better(best, move, same, before(size, 1) + dp.JOIN_SCORE * size, dp.ROWS + size - 2)
        for size in range(2, dp.MAX_JOIN + 1):
            same = (column_joins[size - 1, first:last] == joins[0]) & (joins[0] != 0)
            _better(best, move, same, before(1, size) + dp.JOIN_SCORE * size, dp.COLUMNS + size - 2)
        _better(best, move, ~equal, before(1, 1) + dp.UNEQUAL_SCORE, dp.UNEQUAL)
        _better(best, move, True, before(1, 0) + dp.GAP_SCORE, dp.ROW_GAP)
        reached = np.maximum.accumulate(best - slope[first:last]) + slope[first:last]
        move[reached > best] = dp.COLUMN_GAP
        row = scores[i % (dp.MAX_JOIN + 1)]
        row[:] = dp.NEVER
        row[dp.MAX_JOIN + first : dp.MAX_JOIN + last] = reached
        moves[offsets[i] : offsets[i + 1]] = move
    return moves


def _better(best: np.ndarray, move: np.ndarray, where: np.ndarray | bool, score: np.ndarray, new_move: int) -> None:
    """Replaces score and move, in place, of the cells in `where` in which `score` is higher than the best so far.

    Args:
        best, move, score: [cells of a row].
        where: bool [cells of a row], or True for all.
    """
    higher = where & (score > best)
    best[higher] = score[higher]
    move[higher] = new_move
