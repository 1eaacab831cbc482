"""Chunks of a user's own text as rows of logits, and as much of two vocabularies as they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distill_rl.align import Alignment
from distill_rl.align.alignment import COUNTS
from distill_rl.align.projection import Projection
from distill_rl.losses import Chunks, VocabularyProjection

CHUNKS_OF_A_KIND = 4
OTHER_IDS = 200
"""ids of either side, and pairs of both, besides those of the chunks"""
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Sample:
    """Some chunks, laid out as rows of logits: each chunk's rows, then a row that only has a label and one that has none."""

    chunks: Chunks
    student_labels: Tensor
    """int64 [N_s]"""
    teacher_labels: Tensor
    """int64 [N_t]"""
    kinds: tuple[str, ...]
    """of each chunk: 1:1, 1:n, n:1 or m:n"""


def take_chunks(found: Sequence[Alignment]) -> Sample:
    """Up to CHUNKS_OF_A_KIND of each kind, in the order in which they are met."""
    wanted = dict.fromkeys(COUNTS, CHUNKS_OF_A_KIND)
    kinds: list[str] = []
    ours: list[np.ndarray] = []
    theirs: list[np.ndarray] = []
    for alignment in found:
        for kind, student, teacher in _chunks_of(alignment):
            if wanted[kind]:
                wanted[kind] -= 1
                kinds.append(kind)
                ours.append(student)
                theirs.append(teacher)
        if not any(wanted.values()):
            break
    if not kinds:
        raise ValueError("the texts must have a chunk that both tokenizers share; none was found; give other texts")
    sides = []
    for tokens in (ours, theirs):
        numbers = [number for number, chunk in enumerate(tokens) for _ in chunk]
        sides.append((torch.tensor([*numbers, -1, -1]), torch.tensor([*np.concatenate(tokens), tokens[0][0], IGNORED])))
    (student_numbers, student_labels), (teacher_numbers, teacher_labels) = sides
    return Sample(
        Chunks(student_numbers, teacher_numbers, len(kinds)), student_labels.long(), teacher_labels.long(), tuple(kinds)
    )


def _chunks_of(alignment: Alignment) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(kind, student ids, teacher ids) of every chunk."""
    for number in range(alignment.num_chunks):
        student = alignment.student_ids[alignment.student_chunk == number]
        teacher = alignment.teacher_ids[alignment.teacher_chunk == number]
        one, other = len(student) == 1, len(teacher) == 1
        kind = "1:1" if one and other else "1:n" if one else "n:1" if other else "m:n"
        yield kind, student, teacher


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of two vocabularies, large enough for some chunks: as the reference sees it, and at full size."""

    student: np.ndarray
    """int64, ids kept, ascending"""
    teacher: np.ndarray
    small: VocabularyProjection
    """over the kept ids, renumbered, and as many empty ones as make both sides equal where that is possible: `gold` sorts
    no further than the shorter side goes"""
    full: VocabularyProjection
    """the same entries among all ids"""


def cut(projection: Projection, sample: Sample) -> Cut:
    """The ids of the sample, some others, and all that the projection makes of them; rows keep summing to 1."""
    labels = [side[side >= 0].numpy() for side in (sample.student_labels, sample.teacher_labels)]
    some = _spread(len(projection.student_common))
    common = projection.student_common[some], projection.teacher_common[some]
    student = np.unique(np.concatenate([labels[0], common[0], _spread(projection.num_student)])).astype(np.int64)
    lengths = np.diff(projection.indptr)[student]
    entries = np.concatenate(
        [np.arange(start, stop) for start, stop in zip(projection.indptr[student], projection.indptr[student + 1])]
    )
    columns = projection.indices[entries]
    teacher = np.unique(np.concatenate([labels[1], common[1], columns, _spread(projection.num_teacher)])).astype(
        np.int64
    )
    kept = np.isin(projection.student_common, student) & np.isin(projection.teacher_common, teacher)
    pairs = projection.student_common[kept], projection.teacher_common[kept]
    values = projection.values[entries]
    width = max(len(student), len(teacher))
    small = VocabularyProjection.from_arrays(
        _ends(lengths, np.arange(len(student)), min(width, projection.num_student)),
        np.searchsorted(teacher, columns),
        values,
        num_teacher=min(width, projection.num_teacher),
        student_common=np.searchsorted(student, pairs[0]),
        teacher_common=np.searchsorted(teacher, pairs[1]),
    )
    full = VocabularyProjection.from_arrays(
        _ends(lengths, student, projection.num_student),
        columns,
        values,
        num_teacher=projection.num_teacher,
        student_common=pairs[0],
        teacher_common=pairs[1],
    )
    return Cut(student, teacher, small, full)


def _ends(lengths: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """int64 [count + 1]: indptr of `count` rows, those named by `rows` with these lengths, the others empty."""
    whole = np.zeros(count + 1, dtype=np.int64)
    whole[rows + 1] = lengths
    return whole.cumsum()


def _spread(count: int) -> np.ndarray:
    """OTHER_IDS numbers below `count`, evenly spaced; all if there are no more."""
    return np.unique(np.linspace(0, count - 1, min(count, OTHER_IDS)).astype(np.int64))
