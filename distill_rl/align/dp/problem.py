"""One window in the form in which the backends solve it: ids, hashes of joins, and the strip of cells to search.

Legend: n rows, m columns, n ≤ m; cell (i, j) aligns the first i row tokens with the first j column tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distill_rl.align.alignment import gather_bytes

if TYPE_CHECKING:
    from distill_rl.align.vocabulary import Vocabulary


# Canonical strings: the form in which the dynamic programme compares the tokens of two vocabularies.

NONE = -1
"""The canonical id of a token that spells nothing. Such a token equals no token, not even itself."""

# The base B of a polynomial hash mod 2⁶⁴, odd (the golden ratio's bits): h(a followed by b) = h(a)·B^|b| + h(b).
_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class ByteStrings:
    """Byte strings, and whether each may follow another string inside a join."""

    flat: np.ndarray
    """uint8: the bytes of all strings"""
    starts: np.ndarray
    """int64 [n]: where the i-th string begins in `flat`"""
    lengths: np.ndarray
    """int32 [n]"""
    inner: np.ndarray
    """bool [n]: False for an empty string, and for one whose leading space was removed"""
    widths: np.ndarray
    """int32 [n]: number of bytes that both sides are expected to spell: all, or without white space if a side is lossy"""

    def take(self, chosen: np.ndarray) -> ByteStrings:
        """The strings at these indices, in that order; they share `flat` with this object."""
        taken = (array[chosen] for array in (self.starts, self.lengths, self.inner, self.widths))
        return ByteStrings(self.flat, *taken)

    def joined(self) -> np.ndarray:
        """uint8: all strings, one after another."""
        lengths = self.lengths.astype(np.int64)
        return gather_bytes(self.flat, self.starts, lengths, lengths.cumsum())


@dataclass(frozen=True)
class CanonicalTokens:
    """One side of a window: each token's canonical string, the string's id, and its hash."""

    strings: ByteStrings
    ids: np.ndarray
    """int32 [n]: equal if and only if the canonical strings are equal, across both sides; `NONE` for an empty string"""
    hashes: np.ndarray
    """uint64 [n]: polynomial hash of the string, mod 2⁶⁴"""
    powers: np.ndarray
    """uint64 [n]: B to the power of the string's length"""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, chosen: np.ndarray) -> CanonicalTokens:
        """The chosen tokens, in the given order."""
        return CanonicalTokens(self.strings.take(chosen), self.ids[chosen], self.hashes[chosen], self.powers[chosen])


class CanonicalTables:
    """The canonical strings of two vocabularies' tokens.

    Normally a token's canonical string is exactly the bytes that it stands for (`Vocabulary` has resolved byte map,
    metaspace, `##` and byte fallback): `_` is not ▁, a tab is not a newline, " ," is not ",".

    If either vocabulary is lossy, both sides are folded:

    - By those of NFKC, accent stripping and lower-casing that leave every token of the lossy vocabulary unchanged. So
      a tokenizer that keeps capitals is never compared without them.
    - One space before a letter or digit is removed, since such a tokenizer may drop or add it.
    - A token whose bytes alone are not UTF-8 is not folded.

    Special tokens spell nothing.

    Args:
        student, teacher: the two vocabularies; only `flat`, `starts`, `lengths`, `size`, `normalization` are read.
        fast_ids: compute the canonical ids and hashes of both vocabularies once, here (about 0.5 s and 30 bytes per
            token at 150,000 tokens). With False they are computed for each window's tokens. The results are the same.
    """

    def __init__(self, student: Vocabulary, teacher: Vocabulary, *, fast_ids: bool = True) -> None:
        self.student, self.teacher = student, teacher
        lossy = [side for side in (student, teacher) if side.normalization == "lossy"]
        self.fold = fold_of(lossy) if lossy else None
        self._tables: tuple[CanonicalTokens, CanonicalTokens] | None = None
        if fast_ids:
            self._tables = self._tabulate(np.arange(student.size + 1), np.arange(teacher.size + 1))

    def _tabulate(self, student_ids: np.ndarray, teacher_ids: np.ndarray) -> tuple[CanonicalTokens, CanonicalTokens]:
        """Both sides' canonical tokens for these ids, int64; equal strings have equal ids across the two sides."""
        sides = (self.student, student_ids), (self.teacher, teacher_ids)
        return _intern(*(_canonical(vocabulary, ids, self.fold) for vocabulary, ids in sides))

    def look_up(self, student_ids: np.ndarray, teacher_ids: np.ndarray) -> tuple[CanonicalTokens, CanonicalTokens]:
        """The canonical tokens of both sides of a window, one per given id and in that order.

        Canonical ids may be compared only within one call, unless the tables were built with `fast_ids`.

        Args:
            student_ids, teacher_ids: int [n], [m]. Ids outside the vocabulary (padding of a model's embedding) spell
                nothing.
        """
        student_ids, teacher_ids = _in_table(student_ids, self.student), _in_table(teacher_ids, self.teacher)
        if self._tables is not None:
            return self._tables[0].take(student_ids), self._tables[1].take(teacher_ids)
        unique, inverse = zip(*(np.unique(ids, return_inverse=True) for ids in (student_ids, teacher_ids)))
        student, teacher = self._tabulate(*unique)
        return student.take(inverse[0]), teacher.take(inverse[1])


def _in_table(ids: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """The ids; `size`, one past the last id, in place of those outside the vocabulary."""
    ids = np.asarray(ids, np.int64)
    return np.where((ids >= 0) & (ids < vocabulary.size), ids, vocabulary.size)


def _canonical(vocabulary: Vocabulary, ids: np.ndarray, fold: Callable[[str], str] | None) -> ByteStrings:
    """The canonical strings of these ids; empty for the id `size`, one past the last."""
    starts = vocabulary.starts[ids]
    lengths = np.append(vocabulary.lengths, 0)[ids].astype(np.int32)
    if fold is None:
        return ByteStrings(vocabulary.flat, starts, lengths, lengths > 0, lengths)
    flat = vocabulary.flat.tobytes()
    folded = [_fold_bytes(flat[start : start + n], fold) for start, n in zip(starts.tolist(), lengths.tolist())]
    new_lengths = np.fromiter((len(text) for text, _ in folded), np.int32, len(folded))
    new_starts = np.zeros(len(folded), np.int64)
    np.cumsum(new_lengths[:-1], out=new_starts[1:])
    new_flat = np.frombuffer(b"".join(text for text, _ in folded), np.uint8)
    joinable = np.fromiter((inner for _, inner in folded), bool, len(folded))
    widths = np.fromiter((sum(map(len, text.split())) for text, _ in folded), np.int32, len(folded))
    return ByteStrings(new_flat, new_starts, new_lengths, joinable & (new_lengths > 0), widths)


def _fold_bytes(spelling: bytes, fold: Callable[[str], str]) -> tuple[bytes, bool]:
    """The folded bytes of a token, and whether it may follow another token inside a join."""
    # A space before a letter or digit is removed; the token then begins a new word and may not (False). Bytes that are
    # not UTF-8 are returned as they are.
    try:
        text = fold(spelling.decode())
    except UnicodeDecodeError:
        return spelling, True
    if len(text) > 1 and text[0] == " " and text[1].isalnum():
        return text[1:].encode(), False
    return text.encode(), True


def fold_of(lossy: list[Vocabulary]) -> Callable[[str], str]:
    """A function text → text that folds what lossy tokenizers may change: NFKC, accents and case.

    It composes those of the three folds that leave every token of a given vocabulary unchanged, so that a tokenizer
    that keeps capitals is not compared without them. Tokens that are not UTF-8 are not considered. Without vocabularies
    it changes nothing.

    Args:
        lossy: the vocabularies; a fold is used if it suits any one of them.
    """
    steps: list[Callable[[str], str]] = []
    for vocabulary in lossy:
        texts = []
        for spelling in vocabulary.spellings():
            with suppress(UnicodeDecodeError):
                texts.append(spelling.decode())
        for step, unfolded in ((_nfkc, str), (_strip_accents, _nfd), (str.lower, str)):
            affected = (text for text in texts if not text.isascii() or step is str.lower)
            if step not in steps and all(step(text) == unfolded(text) for text in affected):
                steps.append(step)
    # Accents before case: İ lower-cased first would leave a combining dot behind.
    steps.sort(key=(_nfkc, _strip_accents, str.lower).index)

    def fold(text: str) -> str:
        """The text after all folds that were chosen."""
        for step in steps:
            text = step(text)
        return text

    return fold


_nfd = partial(unicodedata.normalize, "NFD")
_nfkc = partial(unicodedata.normalize, "NFKC")


def _strip_accents(text: str) -> str:
    return "".join(letter for letter in _nfd(text) if unicodedata.category(letter) != "Mn")


def _intern(*sides: ByteStrings) -> tuple[CanonicalTokens, CanonicalTokens]:
    """Gives the strings of two sides common ids, equal if and only if the strings are equal, and hashes them."""
    index: dict[bytes, int] = {b"": NONE}
    tokens = []
    for strings in sides:
        flat = strings.flat.tobytes()
        spans = zip(strings.starts.tolist(), strings.lengths.tolist())
        numbered = (index.setdefault(flat[start : start + length], len(index)) for start, length in spans)
        ids = np.fromiter(numbered, np.int32, len(strings.starts))
        tokens.append(CanonicalTokens(strings, ids, *_hashes(strings)))
    return tokens[0], tokens[1]


def _hashes(strings: ByteStrings) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [n], uint64 [n]: hash of every string, and B^length."""
    # The hash is Σₖ (byteₖ + 1)·B^(length − 1 − k), mod 2⁶⁴; 0 for an empty string.
    lengths = strings.lengths.astype(np.int64)
    powers = np.full(int(lengths.max(initial=0)) + 1, _BASE, np.uint64)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint64)
    ends = np.cumsum(lengths)
    order = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    values = strings.joined().astype(np.uint64) + np.uint64(1)
    terms = values * powers[np.repeat(ends, lengths) - 1 - order]
    sums = np.zeros(len(order) + 1, np.uint64)
    np.cumsum(terms, out=sums[1:])
    return sums[ends] - sums[ends - lengths], powers[lengths]


# The moves into a cell, in order of preference among equal scores: an equal pair; 2, 3, 4 rows to one column (1–3);
# one row to 2, 3, 4 columns (4–6); an unequal pair; a row in a gap; a column in a gap.
EQUAL, ROWS, COLUMNS, UNEQUAL, ROW_GAP, COLUMN_GAP = 0, 1, 4, 7, 8, 9
MAX_JOIN = 4

# Numba's cache on disk contains copies of these constants and is renewed only when compiled.py changes.
# Twice the published scores (+3, −3, −1.5, +1.5·k), so that they are integers.
EQUAL_SCORE, UNEQUAL_SCORE, GAP_SCORE, JOIN_SCORE = 6, -6, -3, 3
NEVER = -(2**30)
"""The score of a cell that cannot be reached"""


class WindowProblem(NamedTuple):
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


def make_problems(rows: CanonicalTokens, columns: CanonicalTokens, band: int) -> list[WindowProblem]:
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
        problems.append(WindowProblem(rows.ids, columns.ids, *joins, low, high, offsets))
    return problems


def _joins(side: CanonicalTokens) -> np.ndarray:
    """uint64 [n, 4]: hashes of the strings that the last 1, 2, 3, 4 tokens up to and including each one spell together."""
    # 0 where there is no such join: too few tokens before, one that spells nothing, or a later one that may not
    # continue a join.
    result = np.zeros((len(side), MAX_JOIN), np.uint64)
    exists, joined = side.ids != NONE, side.hashes
    one = np.uint64(1)  # in place of a hash of 0, which means that there is no join
    result[exists, 0] = np.maximum(joined[exists], one)
    for size in range(1, MAX_JOIN):
        joined = joined[:-1] * side.powers[size:] + side.hashes[size:]
        exists = exists[:-1] & side.strings.inner[size:] & (side.ids[size:] != NONE)
        result[size:][exists, size] = np.maximum(joined[exists], one)
    return result


def _expected_paths(rows: CanonicalTokens, columns: CanonicalTokens, band: int) -> list[np.ndarray]:
    """int64 [n + 1] each: for every row, the column where the alignment is expected."""
    n, m = len(rows), len(columns)
    row_bytes, column_bytes = (np.cumsum(side.strings.widths, dtype=np.int64) for side in (rows, columns))
    both_spell = bool(row_bytes[-1] and column_bytes[-1])
    if not both_spell:  # tokens are counted in place of bytes
        row_bytes, column_bytes = np.arange(1, n + 1), np.arange(1, m + 1)
    # Where both sides have spelled the same share of their bytes. This holds if both spell the whole window, however
    # differently they cut the text, and if a lossy side drops letters throughout.
    by_share = np.zeros(n + 1, np.int64)
    by_share[1:] = np.searchsorted(column_bytes * row_bytes[-1], row_bytes * column_bytes[-1], side="right")
    if not both_spell:
        return [by_share]
    # Where both have spelled as many bytes. This holds if one side was cut off.
    by_bytes = np.zeros(n + 1, np.int64)
    by_bytes[1:] = np.searchsorted(column_bytes, row_bytes, side="right")
    return [by_share, by_bytes] if np.abs(by_share - by_bytes).max() > band // 2 else [by_share]


def _strip(middle: np.ndarray, m: int, band: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last column of each row of cells, int32 [n + 1] each."""
    # A row extends from `band` columns before the middle of the row above to `band` columns after its own middle. So
    # consecutive rows overlap whatever the two lengths are, a path of gaps always exists, and all rows together have
    # at most (n + 1)·(2·band + 1) + m cells.
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
        low, offsets: of the `WindowProblem`.
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


Solution = tuple[np.ndarray, np.ndarray, int]
"""Row marks int32 [n], column marks int32 [m] and the number of chunks, as of `trace_back`"""
Solve = Callable[[list[WindowProblem]], list[Solution]]
"""A backend: the best alignment of each problem within its strip, in order."""


def solve_each(
    problems: list[WindowProblem], fill: Callable[[WindowProblem], np.ndarray], trace: Callable[..., int] = trace_back
) -> list[Solution]:
    """The best alignment of each problem within its strip, in order. Every backend returns the same ones.

    Args:
        fill: makes uint8 [cells], the move into every cell of the strip.
        trace: `trace_back`, or the same compiled.
    """
    solved = []
    for problem in problems:
        rows, columns = np.empty(len(problem.row_ids), np.int32), np.empty(len(problem.column_ids), np.int32)
        solved.append((rows, columns, int(trace(fill(problem), problem.low, problem.offsets, rows, columns))))
    return solved


def solve_in_numpy(problems: list[WindowProblem]) -> list[Solution]:
    """`solve_each` in NumPy, a row of cells at a time; compiles nothing, about 30 times slower than Numba."""
    return solve_each(problems, _fill)


def _fill(problem: WindowProblem) -> np.ndarray:
    """uint8 [cells]: the best move into every cell of the problem's strip, in the order of `WindowProblem.offsets`."""
    # All moves but the column gap depend on rows above only, so a whole row takes them at once. The column gap depends
    # on the cell to the left; with gap score g, S[i, j] = maxₖ≤ⱼ (best[k] − g·k) + g·j, which is a running maximum.
    low, high, offsets = problem.low.tolist(), problem.high.tolist(), problem.offsets.tolist()
    n, m = len(problem.row_ids), len(problem.column_ids)
    # One entry in front, so that index j is the column token that cell (i, j) adds.
    column_ids = np.concatenate(([NONE], problem.column_ids))
    column_joins = np.concatenate((np.zeros((1, MAX_JOIN), np.uint64), problem.column_joins)).T.copy()
    slope = GAP_SCORE * np.arange(m + 1)
    moves = np.empty(offsets[-1], np.uint8)
    # The last five rows of scores, with MAX_JOIN columns in front. NEVER outside a row's strip.
    scores = np.full((MAX_JOIN + 1, MAX_JOIN + m + 1), NEVER, np.int64)
    scores[0, MAX_JOIN : MAX_JOIN + high[0] + 1] = slope[: high[0] + 1]
    moves[: offsets[1]] = COLUMN_GAP
    for i in range(1, n + 1):
        first, last = low[i], high[i] + 1

        def before(rows: int, columns: int, i: int = i, first: int = first, last: int = last) -> np.ndarray:
            """S[i − rows, j − columns] for all j of this row."""
            return scores[(i - rows) % (MAX_JOIN + 1), MAX_JOIN + first - columns : MAX_JOIN + last - columns]

        row_id, joins = problem.row_ids[i - 1], problem.row_joins[i - 1]
        equal = (column_ids[first:last] == row_id) & (row_id != NONE)
        best = np.where(equal, before(1, 1) + EQUAL_SCORE, NEVER)
        move = np.full(last - first, EQUAL, np.uint8)
        for size in range(2, MAX_JOIN + 1):
            if joins[size - 1] != 0:
                same = column_joins[0, first:last] == joins[size - 1]
                _better(best, move, same, before(size, 1) + JOIN_SCORE * size, ROWS + size - 2)
        for size in range(2, MAX_JOIN + 1):
            same = (column_joins[size - 1, first:last] == joins[0]) & (joins[0] != 0)
            _better(best, move, same, before(1, size) + JOIN_SCORE * size, COLUMNS + size - 2)
        _better(best, move, ~equal, before(1, 1) + UNEQUAL_SCORE, UNEQUAL)
        _better(best, move, True, before(1, 0) + GAP_SCORE, ROW_GAP)
        reached = np.maximum.accumulate(best - slope[first:last]) + slope[first:last]
        move[reached > best] = COLUMN_GAP
        row = scores[i % (MAX_JOIN + 1)]
        row[:] = NEVER
        row[MAX_JOIN + first : MAX_JOIN + last] = reached
        moves[offsets[i] : offsets[i + 1]] = move
    return moves


def _better(best: np.ndarray, move: np.ndarray, where: np.ndarray | bool, score: np.ndarray, new_move: int) -> None:
    """Replaces score and move, in place, of the cells in `where` in which `score` is higher than the best so far."""
    higher = where & (score > best)
    best[higher] = score[higher]
    move[higher] = new_move
