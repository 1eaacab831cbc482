"""What other implementations get silently wrong: rows that do not count, targets that change, derivatives of derivatives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from distill_rl.losses import (
    METHODS,
    DenseLogits,
    TeacherHidden,
    TopKLogprobs,
    chunk_kd_loss,
    fused_linear_kd_loss,
    kd_loss,
    reference,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
)
from tests.helpers.chunks import documents
from tests.helpers.losses import DIVERGENCES, batch

ROWS, COLUMNS, IGNORED = 7, 90, [1, 4, 6]
COUNTED = [row for row in range(ROWS) if row not in IGNORED]
TEACHERS: dict[str, Callable[[Tensor], DenseLogits | TopKLogprobs]] = {
    "dense": DenseLogits,
    "top-k": lambda logits: vocab_parallel_topk(logits, 8),
}
SPOILT = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def random_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of student and teacher, and labels of which some are ignored."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(ROWS, COLUMNS, generator=draw) for _ in range(2))
    labels = torch.randint(0, COLUMNS, (ROWS,), generator=draw)
    labels[IGNORED] = -100
    return student, teacher, labels


def loss_and_gradient(student: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    leaf = student.clone().requires_grad_()
    loss = kd_loss(leaf * 1, *arguments, kd_ratio=0.4, **keywords).loss
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def with_gradient(function: Any, student: Tensor, target: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    leaf = student.clone().requires_grad_()
    loss = function(leaf, target, **keywords).loss
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("validate", [None, False], ids=["left out", "streamed"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("value", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_what_an_ignored_row_holds_changes_no_bit(
    divergence: str, teacher: str, value: float, reduction: str, inplace: bool, validate: bool | None
) -> None:
    student, logits, labels = random_rows()
    keywords: dict[str, Any] = {"divergence": divergence, "reduction": reduction}
    wanted, gradient = loss_and_gradient(
        student[COUNTED], TEACHERS[teacher](logits[COUNTED]), labels=labels[COUNTED], **keywords
    )
    student[IGNORED], logits[IGNORED[1:]] = value, value
    found, own = loss_and_gradient(
        student, TEACHERS[teacher](logits), labels=labels, inplace_backward=inplace, validate=validate, **keywords
    )
    found = found if reduction == "mean" else found[COUNTED]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)  # zeros of other rows change the order of a mean's sum
    assert torch.equal(own[COUNTED], gradient)
    assert not own[IGNORED].any()


@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_batch_in_which_no_row_counts_has_a_loss_and_a_gradient_of_zero(teacher: str) -> None:
    student, logits, labels = random_rows()
    loss, gradient = loss_and_gradient(student, TEACHERS[teacher](logits), labels=torch.full_like(labels, -100))
    assert loss == 0
    assert not gradient.any()


def test_ignored_rows_are_not_worked_on() -> None:
    student, logits, labels = random_rows()
    leaf = student.clone().requires_grad_()
    shapes: list[torch.Size] = []
    with saved_tensors_hooks(lambda tensor: shapes.append(tensor.shape) or tensor, lambda tensor: tensor):
        kd_loss(leaf, TEACHERS["top-k"](logits), labels=labels, kd_ratio=0.4).loss.backward()
    assert shapes.count((len(COUNTED), 8)) == 2, "ids and log-probabilities of the rows that count"
    assert (ROWS, 8) not in shapes


def fused(student: Tensor, teacher: DenseLogits | TopKLogprobs, reduction: str) -> Tensor:
    head = torch.randn(COLUMNS, student.shape[1], generator=torch.Generator().manual_seed(1))
    return fused_linear_kd_loss(student, head, teacher, reduction=reduction).loss.sum()  # type: ignore[arg-type]


def teacher_layer(logits: Tensor) -> TeacherHidden:
    return TeacherHidden(logits, torch.eye(COLUMNS))


@pytest.mark.parametrize("target", [DenseLogits, TEACHERS["top-k"], teacher_layer], ids=["dense", "top-k", "hidden"])
@pytest.mark.parametrize("entry", ["kd_loss", "fused, none"])
def test_a_target_that_is_overwritten_before_backward_is_noticed(entry: str, target: Callable[[Tensor], Any]) -> None:
    student, logits, _ = random_rows()
    teacher = target(logits)
    leaf = student.requires_grad_()
    loss = kd_loss(leaf, teacher).loss if entry == "kd_loss" else fused(leaf, teacher, "none")
    (teacher.logprobs if isinstance(teacher, TopKLogprobs) else logits).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("method", ["gold", "uld"])
def test_overwriting_a_cross_tokenizer_target_before_backward_raises(method: str) -> None:
    data = documents(((1, 1), (2, 3), (1, 2)) * 2, 60, 70)
    student, target = data.student.requires_grad_(), data.target("dense")
    output = chunk_kd_loss(student, target, data.chunks, data.bridge, method=method, labels=data.labels)
    target.logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.kd.backward()


def test_the_teachers_logits_live_until_backward_and_no_longer() -> None:
    memory = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    gone = weakref.ref(memory)
    student, _, _ = random_rows()
    output = kd_loss(student.requires_grad_(), DenseLogits(torch.from_numpy(memory)))
    del memory
    assert gone() is not None
    output.loss.backward()
    assert gone() is None, "the output keeps the teacher's logits alive"


def test_the_teachers_logits_can_be_moved_between_forward_and_backward() -> None:
    student, logits, _ = random_rows()
    _, wanted = with_gradient(kd_loss, student, DenseLogits(logits))
    seen: list[torch.Size] = []

    def pack(tensor: Tensor) -> np.ndarray:
        seen.append(tensor.shape)
        return tensor.detach().numpy().copy()

    with saved_tensors_hooks(pack, torch.from_numpy):
        _, found = with_gradient(kd_loss, student, DenseLogits(logits))
    assert seen.count(logits.shape) == 2
    assert torch.equal(found, wanted)


def first_derivatives() -> dict[str, Callable[[Tensor], Tensor]]:
    _, logits, labels = random_rows()
    teacher = DenseLogits(logits)
    entries: dict[str, Callable[[Tensor], Tensor]] = {
        "kd_loss": lambda x: kd_loss(x, teacher, labels=labels, kd_ratio=0.4).loss,
        "fused, mean": lambda x: fused(x, teacher, "mean"),
        "fused, none": lambda x: fused(x, teacher, "none"),
        "logprobs": lambda x: vocab_parallel_logprobs(x, labels.clamp_min(0)).sum(),
    }
    return entries


@pytest.mark.parametrize("entry", first_derivatives())
def test_a_second_derivative_is_refused_and_the_first_is_there(entry: str) -> None:
    student, _, _ = random_rows()
    function, leaf = first_derivatives()[entry], student.requires_grad_()
    (wanted,) = torch.autograd.grad(function(leaf), leaf)
    (found,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
    assert torch.equal(found, wanted)
    with pytest.raises(RuntimeError, match="second derivative"):
        found.square().sum().backward()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.functional.hessian(function, student.detach())


@pytest.mark.parametrize("method", METHODS)
def test_a_second_derivative_across_tokenizers_is_refused(method: str) -> None:
    data = documents(((1, 1), (2, 3), (1, 2)) * 2, 60, 70)
    student = data.student.requires_grad_()
    output = chunk_kd_loss(student, data.target("dense"), data.chunks, data.bridge, method=method, labels=data.labels)
    (found,) = torch.autograd.grad(output.kd + output.ce, student, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        found.square().sum().backward()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("scale", "temperature"), [(300.0, 1.0), (1.0, 0.01)])
def test_the_reference_stays_finite_where_probabilities_vanish(
    divergence: str, scale: float, temperature: float
) -> None:
    data = batch(6, 40)
    data.bias = torch.zeros_like(data.bias)
    keywords: dict[str, Any] = {"divergence": divergence, "beta": 0.3, "temperature": temperature}
    student, teacher = scale * data.student, scale * data.teacher
    for target in (DenseLogits(teacher), vocab_parallel_topk(teacher, 9, temperature=temperature)):
        found, wanted = (
            with_gradient(function, student, target, **keywords) for function in (kd_loss, reference.kd_loss)
        )
        for one, other in zip(found, wanted):
            assert other.isfinite().all()
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("teacher", TEACHERS)
def test_total_variation_from_a_teacher_that_says_nan_has_no_gradient(teacher: str) -> None:
    student, logits, _ = random_rows()
    logits[2] = torch.nan
    _, gradient = with_gradient(kd_loss, student, TEACHERS[teacher](logits), divergence="tvd")
    assert gradient[2].isnan().all()
    assert gradient[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_an_offset_of_all_logits_costs_no_digits(divergence: str, teacher: str) -> None:
    """fp32 has seven; logits near 300 would leave four for what they differ by."""
    student, logits, labels = random_rows()
    target = TEACHERS[teacher](logits - 300)
    keywords: dict[str, Any] = {"divergence": divergence, "labels": labels}
    value, gradient = with_gradient(kd_loss, student + 300, target, **keywords)
    truth, right = with_gradient(reference.kd_loss, (student + 300).double(), target, **keywords)
    assert abs(value.double() - truth) <= 1e-6 * truth
    assert (gradient.double() - right).norm() <= 2e-6 * right.norm()


@pytest.mark.parametrize("entry", first_derivatives())
def test_autocast_changes_no_bit(entry: str) -> None:
    student, _, _ = random_rows()
    function, leaf = first_derivatives()[entry], student.requires_grad_()
    value = function(leaf)
    (wanted,) = torch.autograd.grad(value, leaf)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = function(leaf)
        (found,) = torch.autograd.grad(again, leaf)
    assert torch.equal(again, value)
    assert torch.equal(found, wanted)
