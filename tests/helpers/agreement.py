"""Cases for the agreement of student and teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from distill_rl.losses import Agreement, reference
from tests.helpers.losses import Batch, assert_close, batch

TARGETS = ("dense", "hidden", "topk", "topk_no_rest")


def related(num_rows: int = 12, vocabulary: int = 97, padding: int = 0, seed: int = 0) -> Batch:
    """A batch whose teacher sees what the student sees but for one hidden unit, so that they often agree."""
    data = batch(num_rows, vocabulary, padding, seed)
    return replace(data, teacher_hidden=data.hidden[:, :5], teacher_head=data.head[:, :5])


def assert_measured(found: Agreement, student: Tensor, target: Any, bound: float = 1e-12, **keywords: Any) -> None:
    """The sums are those of the plain version, which agrees on some rows and disagrees on others."""
    top1, *others = reference.token_agreement(student, target, **keywords)
    assert found.top1 == top1.sum()
    names = ("acceptance", "acceptance_low", "student_entropy", "teacher_entropy_low", "teacher_entropy_high")
    for name, expected in zip(names, others):
        assert_close(getattr(found, name).double(), expected.sum(), bound, name)
