"""Top-1 agreement and acceptance: equal to the plain fp64 version, however the logits are given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill_rl.losses import (
    DenseLogits,
    StudentHidden,
    TeacherHidden,
    TopKLogprobs,
    reference,
    token_agreement,
    vocab_parallel_topk,
)
from distill_rl.losses.agreement import top_tokens
from tests.bench.losses.losses import peak_bytes
from tests.helpers.agreement import TARGETS, assert_measured, related
from tests.helpers.losses import Case, top_k


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", TARGETS)
def test_agreement_equals_the_plain_version(kind: str, temperature: float) -> None:
    data = related(padding=3)
    target = data.target(Case("tvd", kind, "bucket", temperature))
    keywords = {"labels": data.labels, "temperature": temperature}
    students = [(data.student, None), (data.student.view(3, 4, -1), 1)]
    students += [(StudentHidden(data.hidden, data.head, data.bias), chunk) for chunk in (None, 1, 5)]
    for student, chunk in students:
        labels = data.labels.view(student.shape[:-1]) if isinstance(student, torch.Tensor) else data.labels
        found = token_agreement(student, target, labels=labels, temperature=temperature, chunk_size=chunk)
        assert_measured(found, data.student, target, **keywords)
        assert found.num_tokens == 11
        assert 0 < found.top1 < 11
    for num_labels in (11, None):  # as on a GPU: the rows are left out, or streamed and masked
        found = token_agreement(data.student, target, num_labels=num_labels, validate=False, **keywords)
        assert_measured(found, data.student, target, **keywords)


@pytest.mark.parametrize("kind", TARGETS)
def test_agreement_with_oneself_is_one(kind: str) -> None:
    data = related(vocabulary=301)
    data = replace(data, teacher_hidden=data.hidden, teacher_head=data.head / 1.5, bias=torch.zeros(301).double())
    found = token_agreement(data.student, data.target(Case("tvd", kind, "bucket", 1.0)))
    assert found.top1 == 12
    assert found.acceptance == pytest.approx(12, abs=1e-9)


def test_top_k_bounds_the_exact_acceptance() -> None:
    data = related(num_rows=40, vocabulary=211)
    exact = float(token_agreement(data.student, DenseLogits(data.teacher)).acceptance)
    targets = [top_k(data.teacher, k, 1.0) for k in (1, 4, 16, 64, 211)]
    found = [token_agreement(data.student, target) for target in targets]
    upper, lower = (
        [float(value) for value in values] for values in zip(*[(f.acceptance, f.acceptance_low) for f in found])
    )
    assert sorted(upper, reverse=True) == upper
    assert sorted(lower) == lower
    assert lower[0] + 1 < exact < upper[0] - 1
    assert (lower[-1], upper[-1]) == pytest.approx((exact, exact), abs=1e-9)
    distance = reference.kd_loss(data.student, DenseLogits(data.teacher), divergence="tvd", reduction="sum").kd_loss
    assert exact == pytest.approx(40 - float(distance), abs=1e-9)


def test_top_k_bounds_the_exact_entropy() -> None:
    """By torch's own distributions."""
    data = related(num_rows=40, vocabulary=211)
    exact = float(torch.distributions.Categorical(logits=data.teacher.double()).entropy().sum())
    found = [token_agreement(data.student, top_k(data.teacher, k, 1.0)) for k in (1, 16, 64, 210, 211)]
    lower = [float(each.teacher_entropy_low) for each in found]
    upper = [float(each.teacher_entropy_high) for each in found]
    assert sorted(lower) == lower
    assert all(low <= exact + 1e-9 and exact <= high + 1e-9 for low, high in zip(lower, upper))
    assert upper[1] - exact > 1
    assert lower[-2:] == pytest.approx([exact, exact], abs=1e-9)
    assert upper[-2:] == pytest.approx([exact, exact], abs=1e-9)
    dense = token_agreement(data.student, DenseLogits(data.teacher))
    assert dense.teacher_entropy_low == dense.teacher_entropy_high == pytest.approx(exact, abs=1e-9)
    own = float(torch.distributions.Categorical(logits=data.student.double()).entropy().sum())
    assert [float(each.student_entropy) for each in (*found, dense)] == pytest.approx([own] * 6, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", TARGETS)
def test_narrow_logits_are_compared_in_fp32(kind: str, dtype: torch.dtype) -> None:
    data = related(num_rows=30, vocabulary=997, padding=5)
    student, teacher = data.student.to(dtype), data.teacher.to(dtype)
    target = DenseLogits(teacher) if kind == "dense" else vocab_parallel_topk(teacher, 9)
    if kind == "hidden":
        bias = data.bias.masked_fill(data.bias.isfinite(), 0)
        target = TeacherHidden(data.teacher_hidden.to(dtype), data.teacher_head.to(dtype), bias=bias.to(dtype))
    # fp32 sums of a thousand columns and thirty rows
    assert_measured(token_agreement(student, target), student, target, bound=1e-4)


@pytest.mark.parametrize("dense", [True, False])
def test_of_equal_logits_the_lowest_id_counts(dense: bool) -> None:
    student = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 1.0]])
    teacher = torch.tensor([[0.0, 2.0, 1.0, 2.0], [0.0, 5.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    target = DenseLogits(teacher) if dense else TopKLogprobs(torch.tensor([[1], [1], [0]]), torch.full((3, 1), -1.0))
    assert token_agreement(student, target).top1 == 1
    rows = torch.tensor([2, 0])
    assert top_tokens(target, rows).tolist() == [0, 1]


def test_rows_that_do_not_count_add_nothing() -> None:
    data = related()
    none = torch.full((12,), -100)
    for kind in TARGETS:
        target = data.target(Case("tvd", kind, "bucket", 1.0))
        for student in (data.student, StudentHidden(data.hidden, data.head, data.bias)):
            found = token_agreement(student, target, labels=none)
            assert (found.top1, found.acceptance, found.num_tokens) == (0, 0, 0)
    broken = data.student.clone()
    broken[1] = torch.nan  # its label is ignored
    target = data.target(Case("tvd", "dense", "bucket", 1.0))
    for validate in (None, False):
        found = token_agreement(broken, target, labels=data.labels, validate=validate)
        assert_measured(found, data.student, target, labels=data.labels)
    empty = token_agreement(data.student[:0], DenseLogits(data.teacher[:0]))
    assert (empty.top1, empty.acceptance, empty.num_tokens) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["dense", "topk"])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_nan_is_not_hidden(side: str, kind: str) -> None:
    data = related()
    student, teacher = data.student.clone(), data.teacher.clone()
    {"student": student, "teacher": teacher}[side][3, 50] = torch.nan
    target = DenseLogits(teacher) if kind == "dense" else top_k(teacher, 4, 1.0)
    found = token_agreement(student, target)
    assert found.top1.isnan()
    assert found.acceptance.isnan()


@pytest.mark.parametrize("kind", ["dense", "topk"])
def test_memory_is_that_of_chunks(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(512, 8192, generator=draw).to(torch.bfloat16) for _ in range(2))
    target = DenseLogits(teacher) if kind == "dense" else vocab_parallel_topk(teacher, 32)
    labels = torch.arange(512)
    peak = peak_bytes(lambda: token_agreement(student, target, labels=labels, num_labels=512, chunk_size=8))
    # up to five chunks of fp32, 4/64 of a byte per logit each; a copy of the logits in fp32 would be four bytes
    assert peak < 0.5 * student.numel()
