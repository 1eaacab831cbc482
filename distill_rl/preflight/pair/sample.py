"""Chunks of the user's texts laid out as rows of logits, and the part of two vocabularies that they need."""

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
"""Ids per side, and pairs in common, in addition to those of the chunks"""
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Sample:
    """Some chunks, laid out as rows of logits: each chunk's rows, then a row with only a label, and one without."""

    chunks: Chunks
    student_labels: Tensor
    """int64 [N_s]"""
    teacher_labels: Tensor
    """int64 [N_t]"""
    kinds: tuple[str, ...]
    """Kind of each chunk: 1:1, 1:n, n:1 or m:n"""


def take_chunks(alignments: Sequence[Alignment]) -> Sample:
    """The first CHUNKS_OF_A_KIND chunks of each kind, laid out as rows; kinds that do not occur are left out.

    Raises:
        ValueError: no chunk in any of the alignments.
    """
    missing = dict.fromkeys(COUNTS, CHUNKS_OF_A_KIND)
    kinds: list[str] = []
    student_chunks: list[np.ndarray] = []
    teacher_chunks: list[np.ndarray] = []
    for alignment in alignments:
        for kind, student, teacher in _chunks_of(alignment):
            if missing[kind]:
                missing[kind] -= 1
                kinds.append(kind)
                student_chunks.append(student)
                teacher_chunks.append(teacher)
        if not any(missing.values()):
            break
    if not kinds:
        raise ValueError("the texts must have a chunk that both tokenizers share; there is none; give other texts")
    sides = []
    for chunks in (student_chunks, teacher_chunks):
        chunk_of_row = [i for i, tokens in enumerate(chunks) for _ in tokens]
        labels = [*np.concatenate(chunks), chunks[0][0], IGNORED]
        sides.append((torch.tensor([*chunk_of_row, -1, -1]), torch.tensor(labels).long()))
    (student_rows, student_labels), (teacher_rows, teacher_labels) = sides
    return Sample(Chunks(student_rows, teacher_rows, len(kinds)), student_labels, teacher_labels, tuple(kinds))


def _chunks_of(alignment: Alignment) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(kind, student ids, teacher ids) of every chunk of an alignment; the kind is 1:1, 1:n, n:1 or m:n."""
    for i in range(alignment.num_chunks):
        student = alignment.student_ids[alignment.student_chunk == i]
        teacher = alignment.teacher_ids[alignment.teacher_chunk == i]
        if len(student) == len(teacher) == 1:
            kind = "1:1"
        elif len(student) == 1:
            kind = "1:n"
        else:
            kind = "n:1" if len(teacher) == 1 else "m:n"
        yield kind, student, teacher


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of two vocabularies and their projection: renumbered for the reference, and at full size."""

    student: np.ndarray
    """int64: ids kept, ascending"""
    teacher: np.ndarray
    small: VocabularyProjection
    """Over the kept ids, renumbered. The smaller side is filled with empty ids up to the size of the other, if its
    vocabulary is large enough: `gold` sorts only as many logits as the smaller side has"""
    full: VocabularyProjection
    """The same entries among all ids"""


def cut(projection: Projection, sample: Sample) -> Cut:
    """Both vocabularies, cut to the ids of the sample, some evenly spaced others, and every teacher id in their rows.

    Rows of the projection therefore keep all their entries and still sum to 1. The sample keeps its ids: look them up
    in `Cut.student` and `Cut.teacher`.

    Args:
        projection: of the two whole vocabularies.
    """
    labels = [side[side >= 0].numpy() for side in (sample.student_labels, sample.teacher_labels)]
    spread = _spread(len(projection.student_common))
    common = projection.student_common[spread], projection.teacher_common[spread]
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
        _indptr(lengths, np.arange(len(student)), min(width, projection.num_student)),
        np.searchsorted(teacher, columns),
        values,
        num_teacher=min(width, projection.num_teacher),
        student_common=np.searchsorted(student, pairs[0]),
        teacher_common=np.searchsorted(teacher, pairs[1]),
    )
    full = VocabularyProjection.from_arrays(
        _indptr(lengths, student, projection.num_student),
        columns,
        values,
        num_teacher=projection.num_teacher,
        student_common=pairs[0],
        teacher_common=pairs[1],
    )
    return Cut(student, teacher, small, full)


def _indptr(lengths: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """int64 [count + 1]: for `count` rows, of which `rows` have these lengths and the others are empty."""
    all_lengths = np.zeros(count + 1, dtype=np.int64)
    all_lengths[rows + 1] = lengths
    return all_lengths.cumsum()


def _spread(count: int) -> np.ndarray:
    """int64, ascending: OTHER_IDS evenly spaced integers from 0 to `count` - 1, or all of them if there are fewer."""
    return np.unique(np.linspace(0, count - 1, min(count, OTHER_IDS)).astype(np.int64))
