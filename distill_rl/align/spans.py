"""Boundaries of two tokenizations as sorted byte positions, and the chunks between those that they share.

All of it is linear: the sides meet in a bit map over the bytes, so nothing is sorted and no token is visited in Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from distill_rl.align.tokenizer.vocabulary import Vocabulary


def no_places() -> np.ndarray:
    """int64 [0, 2]"""
    return np.zeros((0, 2), np.int64)


@dataclass(frozen=True)
class Chunks:
    """Chunk numbers of two sides' tokens."""

    student: np.ndarray
    """int32 [n]: −1 where a token is in no chunk"""
    teacher: np.ndarray
    """int32 [m]"""
    count: int
    lossy_ends: np.ndarray = field(default_factory=no_places)
    """int64 [k, 2], ascending: tokens (student, teacher) up to the end of each stretch between two shared boundaries
    that is no chunk, since a side spells something else there"""


@dataclass(frozen=True)
class Placed:
    """Where one side's tokens lie in its text, in bytes."""

    starts: np.ndarray
    """int64 [n]: each token starts where the one before it ended"""
    ends: np.ndarray
    """int64 [n]: equal to the start for a token that spells nothing there"""
    faithful: np.ndarray | None
    """bool [n]: whether the token spells what it covers; None: all do"""
    exact: bool
    """whether the tokens together spell the text, byte for byte"""
    covers: np.ndarray | None = None
    """int64 [n, 2]: the bytes that the tokenizer itself says each token covers, which may begin behind its start; None:
    those from its start to its end"""


def gather(vocabulary: Vocabulary, starts: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint8 [ends[-1]]: `lengths[i]` bytes from `starts[i]` of the vocabulary's table, up to `ends[i]` of the result."""
    index = np.repeat(starts - ends + lengths, lengths)
    index += np.arange(len(index))
    return vocabulary.flat.take(index)


def stretch(places: np.ndarray) -> slice | np.ndarray:
    """Ascending places as a slice if they are one stretch: views of arrays are cheaper than copies."""
    if not len(places):
        return slice(0, 0)
    first, stop = int(places[0]), int(places[-1]) + 1
    return slice(first, stop) if stop - first == len(places) else places


def shared_ends(student_ends: np.ndarray, teacher_ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool [n], bool [m]: which of two strictly increasing arrays of byte positions ≥ 1 are in the other one, too."""
    if not len(student_ends) or not len(teacher_ends):
        return np.zeros(len(student_ends), bool), np.zeros(len(teacher_ends), bool)
    span = int(max(student_ends[-1], teacher_ends[-1])) + 1
    marked = np.zeros(span, bool)
    marked[student_ends] = True
    in_teacher = marked.take(teacher_ends)
    marked = np.zeros(span, bool)
    marked[teacher_ends] = True
    return marked.take(student_ends), in_teacher


def chunks_by_ends(student_ends: np.ndarray, teacher_ends: np.ndarray) -> tuple[Chunks, np.ndarray, np.ndarray]:
    """Chunks of two tokenizations that begin at the same byte and have no token without bytes.

    Args:
        student_ends, teacher_ends: int64, strictly increasing: where each token ends. Past the last position that
            both have, tokens are in no chunk.
    Returns:
        the chunks; int64 [count] twice: each chunk's last token (student, teacher).
    """
    closes = shared_ends(student_ends, teacher_ends)
    last = [side.nonzero()[0] for side in closes]
    numbers = [_numbers(side, tokens) for side, tokens in zip(closes, last)]
    return Chunks(numbers[0], numbers[1], len(last[0])), last[0], last[1]


def _numbers(closes: np.ndarray, last: np.ndarray) -> np.ndarray:
    """int32 [n]: how many chunks have closed before each token; −1 behind the last of them."""
    if len(last) == len(closes):
        return np.arange(len(closes), dtype=np.int32)
    numbers = np.zeros(len(closes), np.int32)
    np.cumsum(closes[:-1], dtype=np.int32, out=numbers[1:])
    numbers[last[-1] + 1 if len(last) else 0 :] = -1
    return numbers


def chunks_of_places(student: Placed, teacher: Placed) -> Chunks:
    """Chunks of two tokenizations of one text whose tokens all spell what they cover."""
    held = [stretch((side.ends > side.starts).nonzero()[0]) for side in (student, teacher)]
    found, _, _ = chunks_by_ends(student.ends[held[0]], teacher.ends[held[1]])
    numbers = []
    for side, tokens, part in zip((student, teacher), held, (found.student, found.teacher)):
        whole = part
        if len(part) < len(side.ends):
            whole = np.full(len(side.ends), -1, np.int32)
            whole[tokens] = part
        numbers.append(whole)
    return Chunks(numbers[0], numbers[1], found.count)


def chunks_by_spans(student: Placed, teacher: Placed, spans: np.ndarray) -> Chunks:
    """Chunks inside of spans of two texts that read the same.

    Args:
        spans: int64 [k, 4], ascending: student start and stop, teacher start and stop in bytes; stop − start is the
            same on both sides. A token that reaches out of its span is in no chunk.
    """
    # Both sides' spans are laid one after another, with a position between them, so that no boundary is in two spans.
    lengths = spans[:, 1] - spans[:, 0] + 1
    bases = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    sides = []
    both = np.ones(total, bool)
    for placed, column in ((student, 0), (teacher, 2)):
        tokens, starts, ends = _inside(placed, spans[:, column], spans[:, column + 1], bases)
        marked = np.zeros(total, bool)
        marked[starts] = True
        marked[ends] = True
        both &= marked
        sides.append((placed, tokens, starts))
    shared = both.nonzero()[0]
    span_of = bases.searchsorted(shared, "right")
    within = span_of[1:] == span_of[:-1]
    valid = within.copy()
    rank = both.cumsum(dtype=np.int32)
    raw, lasts = [], []
    for placed, tokens, starts in sides:
        numbers = rank[starts] - 1
        numbers[numbers == len(valid)] = -1
        last = np.zeros(len(valid) + 1, np.int64)  # the last entry is what −1 writes
        last[numbers] = tokens + 1  # of several assignments the last one stays
        lasts.append(last[:-1])
        if placed.faithful is not None:
            false = numbers[~placed.faithful[tokens]]
            valid[false[false >= 0]] = False
        raw.append(numbers)
    count = int(np.count_nonzero(valid))
    renumbered = np.full(len(valid) + 1, -1, np.int32)  # the last entry is what −1 reads
    renumbered[:-1][valid] = np.arange(count, dtype=np.int32)
    found = []
    for (placed, tokens, _), numbers in zip(sides, raw):
        whole = np.full(len(placed.starts), -1, np.int32)
        whole[tokens] = renumbered[numbers]
        found.append(whole)
    return Chunks(found[0], found[1], count, np.stack(lasts, axis=1)[within & ~valid])


def _inside(
    placed: Placed, first: np.ndarray, last: np.ndarray, bases: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens with bytes that lie in one of the spans, and their starts and ends when the spans are laid together."""
    tokens = (placed.ends > placed.starts).nonzero()[0]
    if not len(first):
        return tokens[:0], tokens[:0], tokens[:0]
    span = first.searchsorted(placed.starts[tokens], "right") - 1
    held = (span >= 0) & (placed.ends[tokens] <= last[span])
    tokens, span = tokens[held], span[held]
    shift = bases[span] - first[span]
    return tokens, placed.starts[tokens] + shift, placed.ends[tokens] + shift
