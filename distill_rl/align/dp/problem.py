"""One window as the backends of the dynamic programme take it: ids, hashes of joins, and the strip to search.

Legend: n rows, m columns, n ≤ m; cell (i, j) aligns the first i row tokens with the first j column tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distill_rl.align.dp.canonical import NONE, Spelled

# What a cell came from, best first where scores tie: an equal pair, 2–4 rows to one column, one row to 2–4 columns,
# an unequal pair, a row in a gap, a column in a gap.
EQUAL, ROWS, COLUMNS, UNEQUAL, ROW_GAP, COLUMN_GAP = 0, 1, 4, 7, 8, 9
MAX_JOIN = 4

# Numba's cache on disk holds a copy of all of these and is renewed when dp_numba.py changes, not when this file does.
# Twice the published scores (+3, −3, −1.5, +1.5·n), so that they are integers.
EQUAL_SCORE, UNEQUAL_SCORE, GAP_SCORE, JOIN_SCORE = 6, -6, -3, 3
NEVER = -(2**30)


@dataclass(frozen=True)
class Problem:
    row_ids: np.ndarray
    """int32 [n]: canonical ids, `NONE` where a token spells nothing"""
    column_ids: np.ndarray
    """int32 [m]"""
    row_joins: np.ndarray
    """uint64 [n, 4]: hash of the 1, 2, 3, 4 tokens that END here; 0: no such join"""
    column_joins: np.ndarray
    """uint64 [m, 4]"""
    low: np.ndarray
    """int32 [n + 1]: the first column searched in row i"""
    high: np.ndarray
    """int32 [n + 1]: the last one"""
    offsets: np.ndarray
    """int64 [n + 2]: cell (i, j) is the number offsets[i] + j − low[i]"""


def make_problems(rows: Spelled, columns: Spelled, band: int) -> list[Problem]:
    """One window of at least a token on either side, with each strip that is worth a search: the one of equal shares,
    and the one of equal bytes where that is another."""
    joins = _joins(rows), _joins(columns)
    problems = []
    for middle in _middles(rows, columns, band):
        low, high = _strip(middle, len(columns), band)
        offsets = np.zeros(len(rows) + 2, np.int64)
        np.cumsum(high - low + 1, out=offsets[1:])
        problems.append(Problem(rows.ids, columns.ids, *joins, low, high, offsets))
    return problems


def _joins(side: Spelled) -> np.ndarray:
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
    return np.maximum(hashes, np.uint64(1))


def _middles(rows: Spelled, columns: Spelled, band: int) -> list[np.ndarray]:
    """int64 [n + 1] each: the column where every row's path is expected.

    Where both sides spell the whole window, a row's place is where the columns have spelled the same share of their
    bytes, however differently the two sides cut the text; a lossy side that drops letters throughout is followed, too.
    Where one side ends early (cut off at some length), it is where the columns have spelled as many bytes. Where a
    side spells nothing, tokens are counted in place of bytes. (Bytes are `Strings.widths`.)
    """
    n, m = len(rows), len(columns)
    spelt_rows, spelt_columns = (np.cumsum(side.strings.widths, dtype=np.int64) for side in (rows, columns))
    known = bool(spelt_rows[-1] and spelt_columns[-1])
    if not known:
        spelt_rows, spelt_columns = np.arange(1, n + 1), np.arange(1, m + 1)
    shares = np.zeros(n + 1, np.int64)
    shares[1:] = np.searchsorted(spelt_columns * spelt_rows[-1], spelt_rows * spelt_columns[-1], side="right")
    if not known:
        return [shares]
    same = np.zeros(n + 1, np.int64)
    same[1:] = np.searchsorted(spelt_columns, spelt_rows, side="right")
    return [shares, same] if np.abs(shares - same).max() > band // 2 else [shares]


def _strip(middle: np.ndarray, m: int, band: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last column of each row, int32 [n + 1].

    A row reaches from `band` columns before the middle of the row above to `band` columns after its own: rows overlap
    whatever the two lengths are, so a path of gaps always exists, and all rows together have at most
    (n + 1)·(2·band + 1) + m cells.
    """
    low, high = middle - band, np.minimum(middle + band, m)
    low[1:] = low[:-1].copy()
    high[-1] = m
    return np.maximum(low, 0).astype(np.int32), high.astype(np.int32)


def score_of(row_marks: np.ndarray, column_marks: np.ndarray, count: int) -> int:
    """The (doubled) score of what `trace_back` found; an unequal pair counts as the two gaps that it is worth."""
    sizes = [np.bincount(marks[marks >= 0], minlength=count) for marks in (row_marks, column_marks)]
    larger = np.maximum(*sizes)
    unpaired = int((row_marks < 0).sum() + (column_marks < 0).sum())
    return int(np.where(larger == 1, EQUAL_SCORE, JOIN_SCORE * larger).sum()) + GAP_SCORE * unpaired


def trace_back(moves, low, offsets, row_marks, column_marks):  # type: ignore[no-untyped-def]
    """Follows the moves from the last cell to (0, 0); compiled by two of the backends, hence no types here.

    Writes 0, 1, … from the END of the window for the tokens of equal pairs and joins into int32 `row_marks` [n] and
    `column_marks` [m], −1 for the others; returns how many there are.
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
