"""Vocabularies from lists of strings, random windows, and a plain implementation of the dynamic programme."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import numpy as np

from distill_rl.align.dp.problem import CanonicalTables
from distill_rl.align.dp.windows import align_windows
from distill_rl.align.vocabulary import Vocabulary

Window = tuple[np.ndarray, np.ndarray]

# Short strings over few letters, for many equal tokens, many joins, and overlapping joins.
STUDENT = ["", "a", "b", "c", "ab", "bc", "abc", " a", "aa", "aaa", "é", "cab"]
TEACHER = ["b", "a", "", "ca", "bb", "cab", "abc", "aaaa", "c", "aab", " ", "é"]


def vocabulary(tokens: Sequence[str | bytes], normalization: str = "none") -> Vocabulary:
    """Token i spells the i-th string, in UTF-8, or bytes; an empty one is a special token."""
    spellings = [token.encode() if isinstance(token, str) else token for token in tokens]
    lengths = np.array([len(token) for token in spellings], np.int32)
    return Vocabulary(
        flat=np.frombuffer(b"".join(spellings), np.uint8),
        starts=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        lengths=lengths,
        special=lengths == 0,
        byte_fallback=np.zeros(len(spellings), bool),
        roles={},
        normalization=normalization,
        lossy="made lossy" if normalization == "lossy" else None,
        family="byte_level",
        hash="",
    )


def align_window(student: np.ndarray, teacher: np.ndarray, tables: CanonicalTables, **options) -> Window:
    """Chunk indices of one window's tokens."""
    return align_windows([(student, teacher)], tables, **options)[0]


def random_windows(seed: int, count: int, longest: int) -> list[Window]:
    """Windows of 0 to `longest` tokens of STUDENT and TEACHER on each side, alternately from one text that both sides cut
    at random, with a few tokens inserted, and of random tokens."""
    draw = random.Random(seed)

    def cut(text: str, tokens: Sequence[str]) -> np.ndarray:
        ids, done = [], 0
        while done < len(text):
            fitting = [i for i, token in enumerate(tokens) if token and text.startswith(token, done)]
            ids.append(draw.choice(fitting))
            done += len(tokens[ids[-1]])
            if draw.random() < 0.1:
                ids.append(draw.randrange(len(tokens)))
        return np.array(ids[:longest], np.int32)

    def noise(tokens: Sequence[str]) -> np.ndarray:
        return np.array(draw.choices(range(len(tokens)), k=draw.randint(0, longest)), np.int32)

    windows = []
    for i in range(count):
        text = "".join(draw.choices("aaabc", k=draw.randint(0, longest)))
        windows.append(tuple(noise(side) if i % 2 else cut(text, side) for side in (STUDENT, TEACHER)))
    return [(student, teacher) for student, teacher in windows]


def best_score(student: Sequence[bytes], teacher: Sequence[bytes]) -> float:
    """The highest score of any alignment, with the published scores and on the strings themselves."""

    def equal(rows: Sequence[bytes], columns: Sequence[bytes]) -> bool:
        return all(rows) and all(columns) and b"".join(rows) == b"".join(columns)

    @cache
    def best(i: int, j: int) -> float:
        if i == 0 or j == 0:
            return -1.5 * (i + j)
        scores = [best(i - 1, j) - 1.5, best(i, j - 1) - 1.5]
        scores.append(best(i - 1, j - 1) + (3 if equal(student[i - 1 : i], teacher[j - 1 : j]) else -3))
        for n in (2, 3, 4):
            if i >= n and equal(student[i - n : i], teacher[j - 1 : j]):
                scores.append(best(i - n, j - 1) + 1.5 * n)
            if j >= n and equal(student[i - 1 : i], teacher[j - n : j]):
                scores.append(best(i - 1, j - n) + 1.5 * n)
        return max(scores)

    for i in range(len(student)):  # fills the cache row by row, which limits the recursion depth
        best(i, len(teacher))
    return best(len(student), len(teacher))


def score(student_chunk: np.ndarray, teacher_chunk: np.ndarray) -> float:
    """The score of a result: +3 for 1:1, +1.5·n for a join, −1.5 for a token in no chunk (so −3 for an unequal pair)."""
    total = -1.5 * float((student_chunk < 0).sum() + (teacher_chunk < 0).sum())
    for chunk in range(int(student_chunk.max(initial=-1)) + 1):
        sizes = int((student_chunk == chunk).sum()), int((teacher_chunk == chunk).sum())
        total += 3 if sizes == (1, 1) else 1.5 * max(sizes)
    return total


def check_chunks(student: Sequence[bytes], teacher: Sequence[bytes], chunks: Window) -> None:
    """Every chunk is one token on one side and one to four consecutive ones on the other, with the same bytes."""
    count = int(chunks[0].max(initial=-1)) + 1
    assert int(chunks[1].max(initial=-1)) + 1 == count
    for side in chunks:
        assert side.dtype == np.int32
        assert (np.diff(side[side >= 0]) >= 0).all()
    for chunk in range(count):
        places = [np.flatnonzero(side == chunk) for side in chunks]
        assert all(np.array_equal(place, np.arange(place[0], place[0] + len(place))) for place in places)
        assert sorted(len(place) for place in places)[0] == 1
        assert max(len(place) for place in places) <= 4
        spelled = [b"".join(side[i] for i in place) for side, place in zip((student, teacher), places)]
        assert spelled[0] == spelled[1] != b""


def same(left: Sequence[Window], right: Sequence[Window]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(a, b) for one, other in zip(left, right) for a, b in zip(one, other)
    )
