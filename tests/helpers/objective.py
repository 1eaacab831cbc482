"""The student's objective on plain tensors, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from distill_rl.config.schema import TeacherConfig
from distill_rl.losses import VocabularyProjection
from distill_rl.models.load import OutputLayer
from distill_rl.student.compared import ComparedTeacher, CrossTokenizer
from distill_rl.student.objective import Blend, ComparedRows, Objective, ObjectiveOutput
from distill_rl.types import RankBatch, TeacherPart, TokenRows


def compared_teachers(
    *weights: float,
    cross: Sequence[tuple[str, VocabularyProjection | None] | None] = (),
    heads: Sequence[OutputLayer | None] = (),
) -> list[ComparedTeacher]:
    """Teachers `t0`, `t1`, … with these weights; methods and projections of those with another tokenizer."""
    return [
        ComparedTeacher(
            TeacherConfig(name=f"t{i}", model="m", weight=weight),
            CrossTokenizer(*cross[i]) if i < len(cross) and cross[i] is not None else None,
            heads[i] if i < len(heads) else None,
        )
        for i, weight in enumerate(weights)
    ]


def output_of(
    objective: Objective,
    student: Tensor,
    labels: Tensor,
    targets: Sequence[Any],
    num_labels: int,
    parts: Sequence[TeacherPart] = (),
    blend: Blend | None = None,
) -> ObjectiveOutput:
    """The objective of a micro-batch. Without `parts`, no teacher has another tokenizer or is chosen by row."""
    parts = tuple(parts) or (TeacherPart(),) * len(targets)
    own = int((labels != -100).sum()) if any(part.weights is not None for part in parts) else None
    return objective(student, ComparedRows(labels, num_labels, blend or objective.blend(), parts, own), targets)


def batch_of(labels: Tensor, parts: Sequence[TeacherPart], *, by_row: bool = False) -> RankBatch:
    """A rank's rows, of which only the labels matter."""
    zeros = np.zeros(labels.shape, dtype=np.int32)
    rows = TokenRows(zeros, labels.numpy(), zeros)
    return RankBatch(0, 0, rows, int((labels != -100).sum()), tuple(parts), by_row)
