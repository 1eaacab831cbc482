"""Verifies the chunks of an alignment: both sides must spell the same bytes at the same place of the text."""

from __future__ import annotations

from functools import partial

import numpy as np

from distill_rl.align.dp.canonical import CanonicalTokens
from distill_rl.align.spans import chunk_bounds, keep_chunks

REACH = 16
"""At most this many consecutive chunks are recognised as out of place"""

Sides = tuple[CanonicalTokens, CanonicalTokens]
Chunked = tuple[np.ndarray, np.ndarray]
"""Chunk indices of the rows and of the columns, −1 for none"""

_WHITE = np.isin(np.arange(256), list(b" \t\n\v\f\r"))


def keep_verified(sides: Sides, row_marks: np.ndarray, column_marks: np.ndarray, count: int) -> Chunked:
    """Chunk indices int32 [n], int32 [m], in the order of the text and without chunks that fail verification.

    Removes joins whose hashes are equal but whose bytes are not, and chunks that pair two different occurrences of the
    same string. What remains is renumbered from 0; −1 for a token in no chunk.

    Args:
        sides: the rows and the columns.
        row_marks, column_marks, count: what `trace_back` writes and returns.
    """
    rows, columns = (np.where(marks < 0, -1, count - 1 - marks) for marks in (row_marks, column_marks))
    chunks = rows.astype(np.int32), columns.astype(np.int32)
    for check in (_equal_bytes, _in_place, partial(_in_place, spaces=False)):
        count = int(chunks[0].max(initial=-1)) + 1
        keep = check(sides, chunks, count)
        if not keep.all():
            chunks = keep_chunks(keep, *chunks)
    return chunks


def _equal_bytes(sides: Sides, chunks: Chunked, count: int) -> np.ndarray:
    """bool [count]: whether the canonical strings on both sides of the chunk, joined, are the same bytes."""
    left, right = (side.strings.take(np.flatnonzero(chunk >= 0)) for side, chunk in zip(sides, chunks))
    left_sizes = np.bincount(chunks[0][chunks[0] >= 0], left.lengths, count)
    right_sizes = np.bincount(chunks[1][chunks[1] >= 0], right.lengths, count)
    # Usually all chunks are equal, which one comparison proves: equal lengths of each chunk and equal bytes overall.
    equal = np.ones(count, bool)
    if np.array_equal(left_sizes, right_sizes) and np.array_equal(left.joined(), right.joined()):
        return equal
    for i in range(count):
        left, right = (side.strings.take(np.flatnonzero(chunk == i)) for side, chunk in zip(sides, chunks))
        equal[i] = np.array_equal(left.joined(), right.joined())
    return equal


def _in_place(sides: Sides, chunks: Chunked, count: int, *, spaces: bool = True) -> np.ndarray:
    """bool [count]: False for a chunk that pairs two different occurrences of the same string.

    The score rewards any pair of equal tokens, so a repeated word, or a repeated byte of divided characters, may be
    paired with the wrong occurrence where the two sides cut the text differently. Detection:

    1. A chunk's drift is the number of row bytes before it minus the number of column bytes. While both sides spell the
       same text, the drift is constant; the window's beginning and end count as chunks.
    2. Where the drift changes and returns to its old value within `REACH` chunks, compare the bytes that both sides
       spell between the two chunks where it is equal.
    3. If these bytes are equal, that piece of the text is known, and the chunks in between lie at two places of it.
       If they differ (a lossy side changed the text), nothing is concluded.

    With `spaces=False` the same is done on the bytes without white space, which one side may add or drop.
    """
    in_place = np.ones(count, bool)
    texts, begins, ends = zip(*(_extents(side, chunk, count, spaces) for side, chunk in zip(sides, chunks)))
    drift = begins[0] - begins[1]
    changes = np.flatnonzero(np.diff(drift))
    if len(changes) < 2:
        return in_place
    drifts, done = drift.tolist(), 0
    for before in changes.tolist():
        if before < done:
            continue
        nearby = drifts[before + 1 : before + 2 + REACH]
        if drifts[before] not in nearby:
            continue
        after = before + 1 + nearby.index(drifts[before])
        left, right = (text[end[before] : begin[after]] for text, begin, end in zip(texts, begins, ends))
        if np.array_equal(left, right):
            in_place[before : after - 1] = False  # entry 0 is the window's beginning, so chunk i is entry i + 1
            done = after
    return in_place


def _extents(
    side: CanonicalTokens, chunk: np.ndarray, count: int, spaces: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bytes that a side spells in the window, uint8, and where each chunk begins and ends in them.

    The two arrays of positions are int64 [count + 2]: the first entry is the window's beginning, the last one its end;
    chunk i is entry i + 1.

    Args:
        chunk: int32 [n]: chunk index of each token.
        spaces: False leaves ASCII white space out of the bytes and the positions.
    """
    text = side.strings.joined()
    ends_of_tokens = np.concatenate(([0], np.cumsum(side.strings.lengths, dtype=np.int64)))
    if not spaces:
        kept = ~_WHITE[text]
        text, ends_of_tokens = text[kept], np.concatenate(([0], np.cumsum(kept)))[ends_of_tokens]
    firsts, stops = chunk_bounds(chunk, count)
    begins = np.concatenate(([0], ends_of_tokens[firsts], ends_of_tokens[-1:]))
    ends = np.concatenate(([0], ends_of_tokens[stops], ends_of_tokens[-1:]))
    return text, begins, ends
