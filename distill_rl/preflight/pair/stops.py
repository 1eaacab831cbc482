"""Checks that a student can learn from this teacher to end its answers, from the templates to the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from distill_rl.align import Alignment, TokenAligner
from distill_rl.align.projection import Projection
from distill_rl.align.verify import PropertyCheck, check_each
from distill_rl.losses import (
    METHODS,
    Chunks,
    DenseLogits,
    TopKLogprobs,
    VocabularyProjection,
    chunk_kd_loss,
    vocab_parallel_topk,
)

_SURE = 12.0
"""How far a confident teacher's logit of the stop token lies above all others"""
_TOP_K = 32

Pair = tuple[int, int]


def check_stops(aligner: TokenAligner, projection: Projection, rows: Sequence[Alignment]) -> list[PropertyCheck]:
    """The results of three checks of stop tokens; an empty list for two copies of one tokenizer.

    Paired stop tokens are stops to the losses, stops are mapped to stops only, and by the gradient of every method a
    teacher that is certain to stop never makes the student less likely to. A failed check raises nothing; one that
    finds no stop tokens neither passes nor fails.

    Args:
        projection: for the aligner's two tokenizers and the same stop tokens.
        rows: alignments of rows that end like those of a run (`align_training_rows`).
    """
    if projection.student_hash == projection.teacher_hash:
        return []
    bos = aligner.student.roles.get("bos"), aligner.teacher.roles.get("bos")
    paired = [
        (int(row.student_ids[student]), int(row.teacher_ids[teacher]))
        for row in rows
        for student, teacher in row.stop_pairs
    ]
    # Leave out pairs of bos, unless a tokenizer uses the same id to end a text.
    pairs = [
        pair
        for pair in paired
        if pair != bos or (pair[0] in aligner.student.stops and pair[1] in aligner.teacher.stops)
    ]
    distinct = sorted(set(pairs))
    vocabulary_projection = VocabularyProjection.from_projection(projection)
    return [
        check_each(
            "paired stop tokens are stop tokens to the losses, too",
            (_not_a_stop(vocabulary_projection, pair) for pair in pairs),
            "paired stop tokens",
        ),
        check_each(
            "the common vocabulary and the projection map stop tokens to stop tokens",
            _stops_mapped_to_others(vocabulary_projection),
            "stop tokens",
        ),
        check_each(
            "a teacher that is certain to stop never makes the student less likely to stop",
            (_pushed_down(vocabulary_projection, pair, method) for pair in distinct for method in METHODS),
            "pairs of stop tokens × methods",
        ),
    ]


def _not_a_stop(projection: VocabularyProjection, pair: Pair) -> str | None:
    """What is wrong if an id of a pair (student, teacher) is no stop token of the projection; None if both are."""
    for side, token, stops in zip(("student", "teacher"), pair, (projection.student_stops, projection.teacher_stops)):
        if token not in stops:
            return f"the {side}'s id {token} is paired as a stop; the projection's are {stops.tolist()}"
    return None


def _stops_mapped_to_others(projection: VocabularyProjection) -> Iterator[str | None]:
    """Checks that the common vocabulary pairs stops with stops, and that the projection maps stops to stops only.

    Yields what is wrong, or None, for every common pair with a stop in it, and for every stop token of the student.
    """
    student_stops, teacher_stops = set(projection.student_stops.tolist()), set(projection.teacher_stops.tolist())
    for student, teacher in zip(projection.student_common.tolist(), projection.teacher_common.tolist()):
        if student in student_stops or teacher in teacher_stops:
            both = student in student_stops and teacher in teacher_stops
            yield None if both else f"the common vocabulary pairs {student} with {teacher}; one of them is no stop"
    for student in student_stops:
        pieces = projection.indices[projection.indptr[student] : projection.indptr[student + 1]].tolist()
        others = [piece for piece in pieces if piece not in teacher_stops]
        yield f"the projection maps {student} to {others}, which are no stops" if others else None


def _pushed_down(projection: VocabularyProjection, pair: Pair, method: str) -> str | None:
    """Checks that a step down the gradient of KD does not lower the logit of the student's stop token.

    Returns what is wrong, or None. Looks at one position where the teacher is certain to stop and the student has
    random logits from a fixed seed.

    Args:
        pair: stop tokens (student, teacher).
        method: cross-tokenizer loss, a key of `METHODS`.
    """
    draw = torch.Generator().manual_seed(0)
    student, teacher = (
        torch.randn(1, size, generator=draw) for size in (projection.num_student, projection.num_teacher)
    )
    teacher[0, pair[1]] = teacher.max() + _SURE
    student.requires_grad_()
    chunks = Chunks(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1)
    label = torch.tensor([pair[1]])
    target: DenseLogits | TopKLogprobs = vocab_parallel_topk(teacher, min(_TOP_K, projection.num_teacher), labels=label)
    if "topk" not in METHODS[method]:
        target = DenseLogits(teacher, target.label_logprob)
    output = chunk_kd_loss(student, target, chunks, projection, method=method, labels=torch.tensor([pair[0]]))
    (gradient,) = torch.autograd.grad(output.kd, student)
    push = float(gradient[0, pair[0]])
    return f"{method} moves the logit of the student's id {pair[0]} by {-push:.1e}" if push > 0 else None
