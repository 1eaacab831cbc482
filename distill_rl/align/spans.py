"""Chunks from token boundaries: two sorted arrays of byte positions, cut where both have one.

A chunk ends wherever a token of each side ends at the same byte. So the chunks of a text are the intervals between
neighbouring *shared* ends, and a token's chunk index is the number of shared ends before it:

    student ends   3  9 12    13 14 15
    teacher ends   3  9 12          15
    shared         3  9 12          15      → chunks 0, 1, 2 and, with three student tokens, 3

Everything here is linear in bytes plus tokens: the two sides are compared by marking positions in a boolean array over
the bytes, without sorting and without a Python loop over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


def no_token_pairs() -> np.ndarray:
    """An empty int64 [0, 2] array of token counts (student, teacher)."""
    return np.zeros((0, 2), np.int64)


@dataclass(frozen=True)
class TokenChunks:
    """Chunk indices of two sides' tokens."""

    student: np.ndarray
    """int32 [n]: −1 for a token in no chunk"""
    teacher: np.ndarray
    """int32 [m]"""
    count: int
    lossy_ends: np.ndarray = field(default_factory=no_token_pairs)
    """int64 [k, 2], ascending: number of tokens (student, teacher) up to the end of each stretch between two shared
    boundaries that is no chunk because a side spells something else there"""


@dataclass(frozen=True)
class TokenPositions:
    """Positions of one side's tokens in its text, in bytes."""

    starts: np.ndarray
    """int64 [n]: each token starts where the token before it ends"""
    ends: np.ndarray
    """int64 [n]: equal to the start for a token that covers no text"""
    faithful: np.ndarray | None
    """bool [n]: whether the token spells what it covers; None: all tokens do"""
    exact: bool
    """Whether the tokens together spell the text, byte for byte"""
    reported: np.ndarray | None = None
    """int64 [n, 2]: the bytes that each token covers according to the tokenizer, which may begin after its start; None:
    from its start to its end"""


def gather_bytes(flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint8 [ends[-1]]: bytes of tokens, one token after another.

    Args:
        flat: uint8: the bytes of all tokens of a vocabulary.
        starts: int64 [n]: where each token's bytes begin in `flat`.
        lengths: int [n]: how many bytes to take.
        ends: int64 [n]: cumulative sum of `lengths`.
    """
    index = np.repeat(starts - ends + lengths, lengths)
    index += np.arange(len(index))
    return flat.take(index)


def spread(part: np.ndarray, positions: np.ndarray | slice, size: int) -> np.ndarray:
    """int32 [size]: chunk indices of the tokens at `positions`, among all tokens; −1 for the others.

    The array itself, not a copy, if it already has that size.
    """
    if len(part) == size:
        return part
    row = np.full(size, -1, np.int32)
    row[positions] = part
    return row


def as_slice(positions: np.ndarray) -> slice | np.ndarray:
    """Ascending positions as a slice if they are contiguous or there are none, otherwise the array itself.

    Slicing an array makes a view, indexing makes a copy.
    """
    if not len(positions):
        return slice(0, 0)
    first, stop = int(positions[0]), int(positions[-1]) + 1
    return slice(first, stop) if stop - first == len(positions) else positions


def shared_ends(student_ends: np.ndarray, teacher_ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool [n], bool [m]: which elements of each array are in the other one, too.

    Args:
        student_ends, teacher_ends: int64 [n], [m]: byte positions ≥ 1, strictly increasing; memory is linear in the
            highest.
    """
    if not len(student_ends) or not len(teacher_ends):
        return np.zeros(len(student_ends), bool), np.zeros(len(teacher_ends), bool)
    size = int(max(student_ends[-1], teacher_ends[-1])) + 1
    marked = np.zeros(size, bool)
    marked[student_ends] = True
    in_teacher = marked.take(teacher_ends)
    marked = np.zeros(size, bool)
    marked[teacher_ends] = True
    return marked.take(student_ends), in_teacher


def chunks_by_ends(student_ends: np.ndarray, teacher_ends: np.ndarray) -> tuple[TokenChunks, np.ndarray, np.ndarray]:
    """Chunks of two tokenizations that begin at the same byte and have no token without bytes.

    Args:
        student_ends, teacher_ends: int64, strictly increasing: where each token ends. Tokens past the last shared
            position are in no chunk.
    Returns:
        the chunks; int64 [count], int64 [count]: the last token of each chunk (student, teacher).
    """
    closes = shared_ends(student_ends, teacher_ends)
    last = [side.nonzero()[0] for side in closes]
    chunk = [_chunk_of_token(*side) for side in zip(closes, last)]
    return TokenChunks(chunk[0], chunk[1], len(last[0])), last[0], last[1]


def _chunk_of_token(closes: np.ndarray, last: np.ndarray) -> np.ndarray:
    """int32 [n]: number of chunks that have closed before each token; −1 after the last chunk."""
    if len(last) == len(closes):
        return np.arange(len(closes), dtype=np.int32)
    chunk = np.zeros(len(closes), np.int32)
    np.cumsum(closes[:-1], dtype=np.int32, out=chunk[1:])
    chunk[last[-1] + 1 if len(last) else 0 :] = -1
    return chunk


def keep_chunks(keep: np.ndarray, student: np.ndarray, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chunk indices int32 [n], int32 [m] without the chunks for which `keep` is False, renumbered without gaps.

    Args:
        keep: bool [count]: by chunk.
        student, teacher: chunk index of each token, −1 for none; not modified.
    """
    renumbered = np.append(np.where(keep, keep.cumsum() - 1, -1), -1).astype(np.int32)  # −1 reads the last entry
    return renumbered[student], renumbered[teacher]


def chunk_bounds(chunk: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [count], int64 [count]: the first token of each chunk, and one past its last token.

    Both are 0 for a chunk without tokens on this side.

    Args:
        chunk: int [n]: chunk index of each token, −1 for none; must not decrease otherwise.
    """
    tokens = np.flatnonzero(chunk >= 0)
    firsts, stops = np.zeros(count, np.int64), np.zeros(count, np.int64)
    firsts[chunk[tokens[::-1]]] = tokens[::-1]  # of repeated assignments the last one stays
    stops[chunk[tokens]] = tokens + 1
    return firsts, stops


def chunks_of_places(student: TokenPositions, teacher: TokenPositions) -> TokenChunks:
    """Chunks of two tokenizations of one text whose tokens all spell what they cover; no spans, and nothing is lossy.

    Tokens that cover no text, and tokens past the last shared end, are in no chunk.
    """
    sides = student, teacher
    tokens = [as_slice((side.ends > side.starts).nonzero()[0]) for side in sides]
    chunks, _, _ = chunks_by_ends(student.ends[tokens[0]], teacher.ends[tokens[1]])
    rows = [
        spread(part, covering, len(side.ends))
        for side, covering, part in zip(sides, tokens, (chunks.student, chunks.teacher))
    ]
    return TokenChunks(rows[0], rows[1], chunks.count)


def chunks_by_spans(student: TokenPositions, teacher: TokenPositions, spans: np.ndarray) -> TokenChunks:
    """Chunks inside spans of two texts that read the same, and the lossy stretches in them.

    Steps:

    1. Lay the spans out one after another on a common axis, with one position between them so that no boundary belongs
       to two spans, and move both sides' tokens there. Tokens that extend beyond their span are left out.
    2. A position is shared if a token of each side starts or ends there. Between two neighbouring shared positions of
       the same span lies one candidate.
    3. A candidate is a chunk if all of its tokens are faithful. Otherwise it is a lossy stretch.

    Args:
        spans: int64 [k, 4], ascending: student start and stop, teacher start and stop in bytes; stop − start is the
            same on both sides.
    """
    lengths = spans[:, 1] - spans[:, 0] + 1
    bases = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    sides = []
    in_both = np.ones(total, bool)
    for positions, column in ((student, 0), (teacher, 2)):
        tokens, starts, ends = _inside(positions, spans[:, column], spans[:, column + 1], bases)
        marked = np.zeros(total, bool)
        marked[starts] = True
        marked[ends] = True
        in_both &= marked
        sides.append((positions, tokens, starts))

    shared = in_both.nonzero()[0]
    span_of = bases.searchsorted(shared, "right")
    in_one_span = span_of[1:] == span_of[:-1]
    valid = in_one_span.copy()
    num_shared = in_both.cumsum(dtype=np.int32)
    candidates, stops = [], []
    for positions, tokens, starts in sides:
        candidate = num_shared[starts] - 1
        candidate[candidate == len(valid)] = -1
        stop = np.zeros(len(valid) + 1, np.int64)  # the last entry collects the writes of −1
        stop[candidate] = tokens + 1  # of repeated assignments the last one stays
        stops.append(stop[:-1])
        if positions.faithful is not None:
            unfaithful = candidate[~positions.faithful[tokens]]
            valid[unfaithful[unfaithful >= 0]] = False
        candidates.append(candidate)

    count = int(np.count_nonzero(valid))
    chunks = keep_chunks(valid, *candidates)
    rows = [spread(part, tokens, len(positions.starts)) for (positions, tokens, _), part in zip(sides, chunks)]
    return TokenChunks(rows[0], rows[1], count, np.stack(stops, axis=1)[in_one_span & ~valid])


def _inside(
    positions: TokenPositions, first: np.ndarray, last: np.ndarray, bases: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens that cover text and lie in one of the spans, and their starts and ends on the common axis."""
    tokens = (positions.ends > positions.starts).nonzero()[0]
    if not len(first):
        return tokens[:0], tokens[:0], tokens[:0]
    span = first.searchsorted(positions.starts[tokens], "right") - 1
    inside = (span >= 0) & (positions.ends[tokens] <= last[span])
    tokens, span = tokens[inside], span[inside]
    shift = bases[span] - first[span]
    return tokens, positions.starts[tokens] + shift, positions.ends[tokens] + shift
