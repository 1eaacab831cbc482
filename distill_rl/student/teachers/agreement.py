"""How far the student agrees with a teacher on a micro-batch: what validation measures besides the losses.

Every result is fp64 [SUMS]: rows on which both sides' most likely tokens are the same, and the rows compared; the summed
acceptance Σ min(p, q), or an upper bound of it, and a lower bound; the student's entropy; a lower and an upper bound of the
teacher's; and the rows that these five are summed over. What has no meaning has zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill_rl.losses import SampledTokens, TopKLogprobs, VocabularyProjection, token_agreement
from distill_rl.losses.agreement import top_tokens
from distill_rl.losses.core.logits import Student
from distill_rl.losses.targets import Teacher
from distill_rl.models.inputs import to_device
from distill_rl.student.teachers.chunk_rows import one_to_one_rows
from distill_rl.types import IGNORE_INDEX, ChunkRows

SUMS = 8


def agreement_of_tokens(student: Student, labels: Tensor, teacher: Teacher, num_labels: int | None) -> Tensor:
    """Compares with a teacher of the student's tokenizer, at every labelled position.

    Acceptance and entropies are those of sampling at temperature 1. Top-k targets of another temperature do not tell them,
    and draws do not either: Σ min(w, q) over their weights w would be too low. The most likely token of a teacher that is known by
    draws is taken to be the one drawn most often.

    Args:
        teacher: over this rank's columns of the student's logits.
        num_labels: labelled positions; None: they are counted.
    """
    known = not isinstance(teacher, SampledTokens)
    if isinstance(teacher, SampledTokens):
        ids = teacher.most_drawn()[:, None]
        teacher = TopKLogprobs(ids, torch.zeros_like(ids, dtype=torch.float32), temperature=teacher.temperature)
    temperature = teacher.temperature if isinstance(teacher, TopKLogprobs) else 1.0
    found = token_agreement(student, teacher, labels=labels, temperature=temperature, num_labels=num_labels)
    count = found.num_tokens
    entropies = found.student_entropy, found.teacher_entropy_low, found.teacher_entropy_high
    sums = found.acceptance, found.acceptance_low, *entropies, count
    told = sums if known and temperature == 1 else (torch.zeros_like(count),) * len(sums)
    return torch.stack([each.double() for each in (found.top1, count, *told)])


def agreement_of_chunks(
    student: Student, labels: Tensor, teacher: Teacher, rows: ChunkRows, projection: VocabularyProjection
) -> Tensor:
    """Compares with a teacher of another tokenizer, in chunks of one token on either side.

    A chunk counts if the teacher's most likely token has a counterpart in the student's vocabulary; otherwise the student
    could not agree. No acceptance: a draft is verified token by token, which takes one tokenizer.

    Args:
        labels: int64 [R, S], for their shape and device.
        teacher: over its own vocabulary.
    """
    student_rows, teacher_rows = (to_device(each, labels.device) for each in one_to_one_rows(rows))
    counterparts = projection.to_student[top_tokens(teacher, teacher_rows)]
    ids = labels.new_zeros(labels.numel()).index_copy_(0, student_rows, counterparts)
    target = TopKLogprobs(ids[:, None], torch.zeros_like(ids[:, None], dtype=torch.float32))
    compared = torch.full_like(ids, IGNORE_INDEX).index_fill_(0, student_rows, 0)
    # Without a look at the values: a row whose only id is −1, no counterpart, is not compared.
    found = token_agreement(student, target, labels=compared, num_labels=len(student_rows), validate=False)
    nothing = torch.zeros_like(found.top1)
    return torch.stack([each.double() for each in (found.top1, found.num_tokens, *[nothing] * (SUMS - 2))])
