"""The dynamic programme compiled by Numba: about 2 ms for 2,048 × 2,048 tokens. Imported only if it is used."""

from __future__ import annotations

import numpy as np

from distill_rl.align.compiled import compiled
from distill_rl.align.dp.problem import (
    COLUMN_GAP,
    COLUMNS,
    EQUAL,
    EQUAL_SCORE,
    GAP_SCORE,
    JOIN_SCORE,
    MAX_JOIN,
    NEVER,
    NONE,
    ROW_GAP,
    ROWS,
    UNEQUAL,
    UNEQUAL_SCORE,
    Solution,
    WindowProblem,
    solve_each,
    trace_back,
)


def choose(equal, diagonal, above, left, join, join_move):  # type: ignore[no-untyped-def]
    """(score, move) of a cell from the scores of its predecessors, which are `NEVER` if unreachable.

    Among equal scores the first move in the order of `problem` wins. The CUDA kernel compiles the same function.

    Args:
        equal: whether row i and column j are equal.
        diagonal, above, left: S[i−1, j−1], S[i−1, j], S[i, j−1].
        join, join_move: the highest score by a join, and its move; `NEVER` and any move if there is none.
    """
    best, move = NEVER, EQUAL
    if equal:
        best = diagonal + EQUAL_SCORE
    if join > best:
        best, move = join, join_move
    if not equal and diagonal + UNEQUAL_SCORE > best:
        best, move = diagonal + UNEQUAL_SCORE, UNEQUAL
    if above + GAP_SCORE > best:
        best, move = above + GAP_SCORE, ROW_GAP
    if left + GAP_SCORE > best:
        best, move = left + GAP_SCORE, COLUMN_GAP
    return best, move


_choose = compiled(choose)
_trace_back = compiled(trace_back)


@compiled
def _score_at(scores, low, high, offsets, i, j):  # type: ignore[no-untyped-def]
    """S[i, j], or `NEVER` outside the strip."""
    if i < 0 or j < low[i] or j > high[i]:
        return np.int64(NEVER)
    return np.int64(scores[offsets[i] + j - low[i]])


@compiled
def _fill(row_ids, column_ids, row_joins, column_joins, low, high, offsets):  # type: ignore[no-untyped-def]
    """uint8 [cells]: the move into every cell of the strip, row by row."""
    # The arguments are the fields of a `WindowProblem`. The three neighbours `diagonal`, `above` and `left` are carried
    # along the row; joins, which are rare, look their predecessors up.
    n = len(row_ids)
    moves = np.empty(offsets[n + 1], np.uint8)
    scores = np.empty(offsets[n + 1], np.int32)
    for j in range(high[0] + 1):
        scores[j] = GAP_SCORE * j
        moves[j] = COLUMN_GAP
    for i in range(1, n + 1):
        row_id = row_ids[i - 1]
        row1 = row_joins[i - 1, 0]
        first, last, row_above = low[i - 1], high[i - 1], offsets[i - 1] - low[i - 1]
        left = np.int64(NEVER)
        diagonal = np.int64(scores[row_above + low[i] - 1]) if low[i] > first else np.int64(NEVER)
        for j in range(low[i], high[i] + 1):
            above = np.int64(scores[row_above + j]) if j <= last else np.int64(NEVER)
            equal = False
            join, join_move = np.int64(NEVER), EQUAL
            if j > 0:
                equal = row_id != NONE and row_id == column_ids[j - 1]
                column1 = column_joins[j - 1, 0]
                for size in range(2, MAX_JOIN + 1):
                    if row_joins[i - 1, size - 1] == column1 and column1 != 0:
                        score = _score_at(scores, low, high, offsets, i - size, j - 1) + JOIN_SCORE * size
                        if score > join:
                            join, join_move = score, ROWS + size - 2
                for size in range(2, MAX_JOIN + 1):
                    if column_joins[j - 1, size - 1] == row1 and row1 != 0:
                        score = _score_at(scores, low, high, offsets, i - 1, j - size) + JOIN_SCORE * size
                        if score > join:
                            join, join_move = score, COLUMNS + size - 2
            left, move = _choose(equal, diagonal, above, left, join, join_move)
            cell = offsets[i] + j - low[i]
            scores[cell] = left
            moves[cell] = move
            diagonal = above
    return moves


def solve(problems: list[WindowProblem]) -> list[Solution]:
    """The best alignment of each problem within its strip, in order: (row marks, column marks, number of chunks).

    Marks, int32 [n] and int32 [m], are those of `trace_back`. Every backend returns the same ones.
    """
    return solve_each(problems, lambda problem: _fill(*problem), _trace_back)
