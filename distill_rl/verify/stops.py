"""Does a student learn to stop from this teacher? How answers end, from the templates to the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from distill_rl.align import Alignment, TokenAligner
from distill_rl.align.projection import Projection
from distill_rl.losses import (
    METHODS,
    Chunks,
    DenseLogits,
    TopKLogprobs,
    VocabularyProjection,
    chunk_kd_loss,
    vocab_parallel_topk,
)
from distill_rl.verify.check import Check, every

_SURE = 12.0
"""how far the logit of a sure teacher's stop token stands above all others"""
_TOP_K = 32

Pair = tuple[int, int]


def check_stops(aligner: TokenAligner, projection: Projection, found: Sequence[Alignment]) -> list[Check]:
    """Three checks; the last is of the gradient of every method. None of two copies of one tokenizer, which need no pairs.

    Args:
        projection: of the aligner's two tokenizers, made for the same stop tokens.
        found: alignments of rows that end as a run's rows do.
    """
    if projection.student_hash == projection.teacher_hash:
        return []
    opening = aligner.student.roles.get("bos"), aligner.teacher.roles.get("bos")
    ends = aligner.student.stops, aligner.teacher.stops
    paired = [
        (int(each.student_ids[ours]), int(each.teacher_ids[theirs]))
        for each in found
        for ours, theirs in each.stop_pairs
    ]
    pairs = [pair for pair in paired if pair != opening or (pair[0] in ends[0] and pair[1] in ends[1])]
    distinct = sorted(set(pairs))
    bridge = VocabularyProjection.from_projection(projection)
    return [
        every(
            "stop tokens that are paired are stop tokens to the losses, too",
            (_unknown(bridge, pair) for pair in pairs),
            "paired stop tokens",
        ),
        every(
            "the common vocabulary and the projection lead from stop tokens to stop tokens",
            _strays(bridge),
            "stop tokens",
        ),
        every(
            "a teacher that is sure to stop never teaches a student not to",
            (_pushed_down(bridge, pair, method) for pair in distinct for method in METHODS),
            "pairs of stop tokens × methods",
        ),
    ]


def _unknown(bridge: VocabularyProjection, pair: Pair) -> str | None:
    for side, token, stops in zip(("student", "teacher"), pair, (bridge.student_stops, bridge.teacher_stops)):
        if token not in stops:
            return f"the {side}'s id {token} is paired as a stop; the projection's are {stops.tolist()}"
    return None


def _strays(bridge: VocabularyProjection) -> Iterator[str | None]:
    ours, theirs = set(bridge.student_stops.tolist()), set(bridge.teacher_stops.tolist())
    for student, teacher in zip(bridge.student_common.tolist(), bridge.teacher_common.tolist()):
        if student in ours or teacher in theirs:
            stray = student not in ours or teacher not in theirs
            yield f"the common vocabulary joins {student} and {teacher}; one of them is no stop" if stray else None
    for student in ours:
        pieces = bridge.indices[bridge.indptr[student] : bridge.indptr[student + 1]].tolist()
        others = [piece for piece in pieces if piece not in theirs]
        yield f"the projection sends {student} into {others}, which are no stops" if others else None


def _pushed_down(bridge: VocabularyProjection, pair: Pair, method: str) -> str | None:
    """One position where the teacher stops by its token and the student, which may, would rather go on."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(1, size, generator=draw) for size in (bridge.num_student, bridge.num_teacher))
    teacher[0, pair[1]] = teacher.max() + _SURE
    leaf = student.requires_grad_()
    chunks = Chunks(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1)
    label = torch.tensor([pair[1]])
    target: DenseLogits | TopKLogprobs = vocab_parallel_topk(teacher, min(_TOP_K, bridge.num_teacher), labels=label)
    if "topk" not in METHODS[method]:
        target = DenseLogits(teacher, target.label_logprob)
    output = chunk_kd_loss(leaf, target, chunks, bridge, method=method, labels=torch.tensor([pair[0]]))
    (gradient,) = torch.autograd.grad(output.kd, leaf)
    push = float(gradient[0, pair[0]])
    return f"{method} moves the logit of the student's id {pair[0]} by {-push:.1e}" if push > 0 else None
