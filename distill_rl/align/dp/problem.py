"""One window in the form in which the backends solve it: ids, hashes of joins, and the strip of cells to search.

Legend: n rows, m columns, n ≤ m; cell (i, j) aligns the first i row tokens with the first j column tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distill_rl.align.dp.canonical import NONE, CanonicalTokens

# The moves into a cell, in order of preference among equal scores: an equal pair; 2, 3, 4 rows to one column (1–3);
# one row to 2, 3, 4 columns (4–6); an unequal pair; a row in a gap; a column in a gap.
EQUAL, ROWS, COLUMNS, UNEQUAL, ROW_GAP, COLUMN_GAP = 0, 1, 4, 7, 8, 9
MAX_JOIN = 4

# Numba's cache on disk contains copies of these constants and is renewed only when compiled.py changes.
# Twice the published scores (+3, −3, −1.5, +1.5·k), so that they are integers.
EQUAL_SCORE, UNEQUAL_SCORE, GAP_SCORE, JOIN_SCORE = 6, -6, -3, 3
NEVER = -(2**30)
"""The score of a cell that cannot be reached"""


class Problem(NamedTuple):
    """The arguments of a backend's compiled function, in this order."""

    row_ids: np.ndarray
    """int32 [n]: canonical ids, `NONE` for a token that spells nothing"""
    column_ids: np.ndarray
    """int32 [m]"""
    row_joins: np.ndarray
    """uint64 [n, 4]: hashes of the last 1, 2, 3, 4 tokens up to and including this one; 0: no such join"""
    column_joins: np.ndarray
    """uint64 [m, 4]"""
    low: np.ndarray
    """int32 [n + 1]: the first column searched in row i"""
    high: np.ndarray
    """int32 [n + 1]: the last column searched in row i"""
    offsets: np.ndarray
    """int64 [n + 2]: cell (i, j) has index offsets[i] + j − low[i] among the strip's cells"""


def make_problems(rows: CanonicalTokens, columns: CanonicalTokens, band: int) -> list[Problem]:
    """The problems of one window, one or two: it is posed once for each strip of cells that is worth searching.

    Args:
        rows, columns: at least one token each.
        band: half-width of the strip in tokens, at least 1.
    """
    joins = _joins(rows), _joins(columns)
    problems = []
    for middle in _expected_paths(rows, columns, band):
        low, high = _strip(middle, len(columns), band)
        offsets = np.zeros(len(rows) + 2, np.int64)
        np.cumsum(high - low + 1, out=offsets[1:])
        problems.append(Problem(rows.ids, columns.ids, *joins, low, high, offsets))
    return problems


def _joins(side: CanonicalTokens) -> np.ndarray:
    """uint64 [n, 4]: hashes of the strings that the last 1, 2, 3, 4 tokens up to and including each one spell together.

    0 where there is no such join: too few tokens before, one that spells nothing, or a later one that may not continue
    a join.
    """
    result = np.zeros((len(side), MAX_JOIN), np.uint64)
    exists = side.ids != NONE
    joined = side.hashes
    result[exists, 0] = _not_zero(joined[exists])
    for size in range(1, MAX_JOIN):
        joined = joined[:-1] * side.powers[size:] + side.hashes[size:]
        exists = exists[:-1] & side.strings.inner[size:] & (side.ids[size:] != NONE)
        result[size:][exists, size] = _not_zero(joined[exists])
    return result


def _not_zero(hashes: np.ndarray) -> np.ndarray:
    """The hashes with 0 replaced by 1, as 0 stands for no hash."""
    return np.maximum(hashes, np.uint64(1))


def _expected_paths(rows: CanonicalTokens, columns: CanonicalTokens, band: int) -> list[np.ndarray]:
    """int64 [n + 1] each: for every row, the column where the alignment is expected.

    1. By equal shares: where the columns have spelled the same share of their bytes as the rows have of theirs. This
       holds if both sides spell the whole window, however differently they cut the text, and also if a lossy side drops
       letters throughout.
    2. By equal bytes: where the columns have spelled as many bytes as the rows. This holds if one side was cut off.

    The second path is returned only if it departs from the first one by more than half of `band` somewhere. If a side
    spells nothing, only the first is returned, and tokens are counted in place of bytes. Bytes are
    `ByteStrings.widths`.
    """
    n, m = len(rows), len(columns)
    row_bytes, column_bytes = (np.cumsum(side.strings.widths, dtype=np.int64) for side in (rows, columns))
    both_spell = bool(row_bytes[-1] and column_bytes[-1])
    if not both_spell:
        row_bytes, column_bytes = np.arange(1, n + 1), np.arange(1, m + 1)
    by_share = np.zeros(n + 1, np.int64)
    by_share[1:] = np.searchsorted(column_bytes * row_bytes[-1], row_bytes * column_bytes[-1], side="right")
    if not both_spell:
        return [by_share]
    by_bytes = np.zeros(n + 1, np.int64)
    by_bytes[1:] = np.searchsorted(column_bytes, row_bytes, side="right")
    return [by_share, by_bytes] if np.abs(by_share - by_bytes).max() > band // 2 else [by_share]


def _strip(middle: np.ndarray, m: int, band: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last column of each row of cells, int32 [n + 1] each.

    A row extends from `band` columns before the middle of the row above to `band` columns after its own middle. So
    consecutive rows overlap whatever the two lengths are, a path of gaps always exists, and all rows together have at
    most (n + 1)·(2·band + 1) + m cells.

    Args:
        middle: int64 [n + 1]: the expected path, which never decreases.
        m: number of columns.
    """
    low, high = middle - band, np.minimum(middle + band, m)
    low[1:] = low[:-1].copy()
    high[-1] = m
    return np.maximum(low, 0).astype(np.int32), high.astype(np.int32)


def score_of(row_marks: np.ndarray, column_marks: np.ndarray, count: int) -> int:
    """The doubled score of a solution; an unequal pair counts as two gaps, which have the same score.

    Args:
        row_marks, column_marks, count: what `trace_back` writes and returns.
    """
    sizes = [np.bincount(marks[marks >= 0], minlength=count) for marks in (row_marks, column_marks)]
    larger = np.maximum(*sizes)
    unpaired = int((row_marks < 0).sum() + (column_marks < 0).sum())
    return int(np.where(larger == 1, EQUAL_SCORE, JOIN_SCORE * larger).sum()) + GAP_SCORE * unpaired


def trace_back(moves, low, offsets, row_marks, column_marks):  # type: ignore[no-untyped-def]
    """Follows the moves from the last cell to (0, 0), and marks the tokens that are paired on the way.

    Writes into int32 `row_marks` [n] and `column_marks` [m]: the index, counted from the END of the window, of the
    equal pair or join that a token belongs to, or −1. Returns the number of pairs and joins. Without types, because two
    of the backends compile it.

    Args:
        moves: uint8 [cells]: the move into each cell.
        low, offsets: of the `Problem`.
    """
    i, j, count = len(row_marks), len(column_marks), 0
    while i > 0 or j > 0:
        move = moves[offsets[i] + j - low[i]]
        if move >= UNEQUAL:
            if move != COLUMN_GAP:
                i -= 1
                row_marks[i] = -1
            if move != ROW_GAP:
                j -= 1
                column_marks[j] = -1
            continue
        rows = move - ROWS + 2 if ROWS <= move < COLUMNS else 1
        columns = move - COLUMNS + 2 if move >= COLUMNS else 1
        for _ in range(rows):
            i -= 1
            row_marks[i] = count
        for _ in range(columns):
            j -= 1
            column_marks[j] = count
        count += 1
    return count
