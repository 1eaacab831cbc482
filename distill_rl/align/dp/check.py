"""What is believed of an alignment: chunks whose bytes are equal and that do not lie at two places of one text."""

from __future__ import annotations

from functools import partial

import numpy as np

from distill_rl.align.dp.canonical import Spelled

# How many chunks in a row may be out of place between two that agree.
REACH = 16

_WHITE = np.isin(np.arange(256), list(b" \t\n\v\f\r"))


def settle(
    rows: Spelled, columns: Spelled, row_marks: np.ndarray, column_marks: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Chunk numbers int32 [n], int32 [m] in the order of the text from the marks of `trace_back`.

    Left out are joins whose hashes are equal and whose bytes are not, and chunks that the bytes around them disprove.
    """
    chunks = [np.where(marks < 0, -1, count - 1 - marks).astype(np.int32) for marks in (row_marks, column_marks)]
    for proof in (_equal_bytes, _in_place, partial(_in_place, spaces=False)):
        count = int(chunks[0].max(initial=-1)) + 1
        true = proof(rows, columns, chunks[0], chunks[1], count)
        if not true.all():
            # The last entry is what a −1 reads.
            numbers = np.append(np.where(true, np.cumsum(true) - 1, -1), -1).astype(np.int32)
            chunks = [numbers[chunk] for chunk in chunks]
    return chunks[0], chunks[1]


def _equal_bytes(
    rows: Spelled, columns: Spelled, row_chunk: np.ndarray, column_chunk: np.ndarray, count: int
) -> np.ndarray:
    """bool [count]"""
    in_rows, in_columns = row_chunk >= 0, column_chunk >= 0
    left = rows.strings.take(np.flatnonzero(in_rows))
    right = columns.strings.take(np.flatnonzero(in_columns))
    left_sizes = np.bincount(row_chunk[in_rows], weights=left.lengths, minlength=count)
    right_sizes = np.bincount(column_chunk[in_columns], weights=right.lengths, minlength=count)
    # All chunks at once: equal lengths chunk by chunk and equal bytes in a row mean equal bytes chunk by chunk.
    if np.array_equal(left_sizes, right_sizes) and np.array_equal(left.joined(), right.joined()):
        return np.ones(count, bool)
    true = np.ones(count, bool)
    for chunk in range(count):
        one = rows.strings.take(np.flatnonzero(row_chunk == chunk)).joined()
        other = columns.strings.take(np.flatnonzero(column_chunk == chunk)).joined()
        true[chunk] = np.array_equal(one, other)
    return true


def _in_place(
    rows: Spelled,
    columns: Spelled,
    row_chunk: np.ndarray,
    column_chunk: np.ndarray,
    count: int,
    *,
    spaces: bool = True,
) -> np.ndarray:
    """bool [count]: False where two tokens spell the same and are not the same piece of the text.

    A score for equal tokens pairs those of a repeated word, or of a repeated byte of cut characters, where the two
    sides cut the text differently. If both sides spell the same bytes between two chunks (or an end of the window),
    then that as_slice of text is known, and a chunk inside of it that has more bytes before it on one side than on the
    other is such a pair. Where a lossy side changed the text the bytes differ and nothing is disproved. Without
    `spaces` the same is found of the bytes that are no white space, which a side may write or drop where the other
    does not.
    """
    true = np.ones(count, bool)
    texts, begins, ends = zip(
        *(_places(side, chunk, count, spaces) for side, chunk in ((rows, row_chunk), (columns, column_chunk)))
    )
    drift = begins[0] - begins[1]
    changes = np.flatnonzero(np.diff(drift))
    if len(changes) < 2:
        return true
    shifts, done = drift.tolist(), 0
    for before in changes.tolist():
        if before < done:
            continue
        reach = shifts[before + 1 : before + 2 + REACH]
        if shifts[before] not in reach:
            continue
        after = before + 1 + reach.index(shifts[before])
        left, right = (text[end[before] : begin[after]] for text, begin, end in zip(texts, begins, ends))
        if np.array_equal(left, right):
            true[before : after - 1] = False  # the entry before the first chunk is the window's beginning
            done = after
    return true


def _places(side: Spelled, chunk: np.ndarray, count: int, spaces: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """uint8: the window's bytes; int64 [count + 2], twice: how many of them come before the beginning and the end of
    the window's beginning, of every chunk, and of the window's end."""
    text = side.strings.joined()
    reached = np.concatenate(([0], np.cumsum(side.strings.lengths, dtype=np.int64)))
    if not spaces:
        kept = ~_WHITE[text]
        text, reached = text[kept], np.concatenate(([0], np.cumsum(kept)))[reached]
    inside = np.flatnonzero(chunk >= 0)
    first, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
    last[chunk[inside]] = inside
    first[chunk[inside[::-1]]] = inside[::-1]
    begins = np.concatenate(([0], reached[first], reached[-1:]))
    ends = np.concatenate(([0], reached[last + 1], reached[-1:]))
    return text, begins, ends
