"""How near the fast path comes to the fp64 oracle in the dtypes that are trained in."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distill_rl.losses import (
    DenseLogits,
    TeacherHidden,
    TopKLogprobs,
    fused_linear_kd_loss,
    fused_linear_logprobs,
    kd_loss,
    reference,
    vocab_parallel_topk,
)
from tests.helpers.losses import DIVERGENCES, TAILS, assert_close, batch, top_k

ROWS, VOCABULARY, HIDDEN = 24, 2003, 32


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(value: Tensor, truth: Tensor) -> float:
    """Relative L2 distance."""
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def gradients(target, student: Tensor, **keywords) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(value, gradient, true value, true gradient)"""
    leaf, truth = student.clone().requires_grad_(), student.to(torch.float64, copy=True).requires_grad_()
    output, expected = kd_loss(leaf, target, **keywords), reference.kd_loss(truth, target, **keywords)
    output.loss.backward()
    expected.loss.backward()
    return output.loss.detach(), leaf.grad, expected.loss.detach(), truth.grad


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["dense", *TAILS])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bf16_logits_give_a_gradient_within_three_thousandths(divergence: str, kind: str, temperature: float) -> None:
    student, teacher = (2 * randn(seed, ROWS, VOCABULARY).to(torch.bfloat16) for seed in (0, 1))
    target = DenseLogits(teacher)
    keywords = {"divergence": divergence, "temperature": temperature, "token_weights": randn(2, ROWS).abs()}
    if kind != "dense":
        target, keywords["tail"] = top_k(teacher.float(), 32, temperature), kind
    value, gradient, true_value, truth = gradients(target, student, **keywords)
    assert gradient.dtype == torch.bfloat16
    rounding = relative(truth.to(torch.bfloat16), truth)
    assert relative(gradient, truth) <= min(3e-3, 1.01 * rounding)
    assert abs(value - true_value) <= 1e-5 * true_value.abs().clamp_min(1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_a_students_tiny_rest_is_right_where_one_minus_the_sum_is_not(dtype: torch.dtype, bound: float) -> None:
    """Rest mass 1e-9 is below fp32's resolution of 1; log(1 − Σ) would be off by any amount."""
    vocabulary, k = 1000, 8
    student = randn(0, 4, vocabulary).to(dtype) - 28
    student[:, :k] = randn(1, 4, k).to(dtype)
    ids = torch.arange(k).expand(4, k)
    logprobs = (torch.full((4, k), (1 - 1e-3) / k, dtype=dtype)).log()
    target = TopKLogprobs(ids, logprobs, torch.full((4,), math.log(1e-3), dtype=dtype))
    rest = student.double().softmax(1)[:, k:].sum(1)
    assert rest.max() < 2e-9
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        value, gradient, true_value, truth = gradients(target, student, divergence=divergence)
        assert abs(value - true_value) <= bound * true_value
        assert relative(gradient, truth) <= bound
        assert relative(gradient[:, k:], truth[:, k:]) <= bound


def test_teacher_mass_of_almost_one_drops_a_rest_that_did_not_travel() -> None:
    student = randn(0, 2, 50)
    full = torch.tensor([[0.75, 0.25], [0.75, 0.25 - 4e-7]]).log()
    ids = torch.tensor([[3, 4], [3, 4]])
    for divergence in DIVERGENCES:
        value, gradient, true_value, truth = gradients(TopKLogprobs(ids, full), student, divergence=divergence)
        assert value.isfinite()
        assert abs(value - true_value) < 1e-5
        assert relative(gradient, truth) < 1e-5


def test_a_target_of_every_column_has_no_rest_whatever_its_rounded_mass() -> None:
    data = batch(4, 24)
    whole = top_k(data.teacher, 24, 1.0)
    dense = DenseLogits(data.teacher)
    for divergence in DIVERGENCES:
        for rest in (None, whole.rest_logprob):
            rounded = TopKLogprobs(whole.ids, whole.logprobs.to(torch.bfloat16), rest)
            assert kd_loss(data.student, rounded, divergence=divergence).loss.isfinite()
            exact = TopKLogprobs(whole.ids, whole.logprobs, rest)
            assert_close(
                kd_loss(data.student, exact, divergence=divergence).loss,
                kd_loss(data.student, dense, divergence=divergence).loss,
            )


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_teacher_itself_as_student_has_loss_zero_and_no_gradient(divergence: str) -> None:
    teacher = 3 * randn(0, 16, 5000)
    for temperature in (1.0, 2.5):
        for target in (DenseLogits(teacher), vocab_parallel_topk(teacher, 64, temperature=temperature)):
            student = teacher.clone().requires_grad_()
            output = kd_loss(student, target, divergence=divergence, temperature=temperature)
            output.loss.backward()
            # TVD's slope is a sign, so that rounding alone moves a probability by itself; the loss stays rounding.
            assert 0 <= output.loss <= 1e-6
            if divergence != "tvd":
                assert student.grad.norm() <= 1e-7


@pytest.mark.parametrize(("tail", "wire"), [("bucket", torch.bfloat16), ("bucket", torch.float16)])
def test_targets_rounded_on_their_way_cost_no_negative_kd(tail: str, wire: torch.dtype) -> None:
    teacher = 3 * randn(0, 256, 4000)
    sent = vocab_parallel_topk(teacher, 128).to_tensors(wire)
    assert sent["logprobs"].dtype == wire
    target = TopKLogprobs.from_tensors(sent, 1.0)
    for divergence in DIVERGENCES:
        rows = kd_loss(teacher, target, divergence=divergence, reduction="none").loss
        assert rows.min() >= 0
    plain = (
        target.logprobs.float().exp() * (target.logprobs.float() - teacher.log_softmax(1).gather(1, target.ids.long()))
    ).sum(1)
    assert plain.min() < -1e-5, "the case must be one in which the plain KL is negative"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fused_loss_accumulates_logits_in_fp32(dtype: torch.dtype) -> None:
    """The truth is the same hidden states and weights in fp64; logits rounded to bf16 would be 1 to 7 % off."""
    hidden, weight = randn(0, ROWS, HIDDEN).to(dtype), randn(1, VOCABULARY, HIDDEN).to(dtype)
    teacher = TeacherHidden(randn(2, ROWS, 20).to(dtype), randn(3, VOCABULARY, 20).to(dtype), softcap=15.0)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    doubles = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    keywords = {"labels": torch.arange(ROWS), "kd_ratio": 0.7, "temperature": 1.5}
    output = fused_linear_kd_loss(leaves[0], leaves[1], teacher, softcap=20.0, chunk_size=5, **keywords)
    logits = 20 * ((doubles[0] @ doubles[1].T) / 20).tanh()
    expected = reference.kd_loss(logits, teacher, **keywords)
    (3 * output.loss).backward()
    (3 * expected.loss).backward()
    bound = 3e-3 if dtype == torch.bfloat16 else 1e-5
    assert relative(output.loss.detach(), expected.loss.detach()) <= 1e-5
    for leaf, double in zip(leaves, doubles):
        assert leaf.grad.dtype == dtype
        assert relative(leaf.grad, double.grad) <= bound


def test_every_reduction_of_the_fused_loss_matches_the_plain_gradient() -> None:
    data = batch(7, 41)
    for target in (DenseLogits(data.teacher), TeacherHidden(data.teacher_hidden, data.teacher_head, 12.0, 1.5)):
        for reduction in ("mean", "sum", "none"):
            keywords = {"labels": data.labels, "token_weights": data.weights, "kd_ratio": 0.4, "reduction": reduction}
            ends = []
            for fused in (True, False):
                hidden, head, bias = (t.clone().requires_grad_() for t in (data.hidden, data.head, data.bias))
                if fused:
                    output = fused_linear_kd_loss(
                        hidden, head, target, bias=bias, softcap=9.0, chunk_size=3, **keywords
                    )
                else:
                    output = kd_loss(9 * ((hidden @ head.T + bias) / 9).tanh(), target, **keywords)
                (output.loss * torch.arange(1, 1 + output.loss.numel())).sum().backward()
                ends.append((output.loss.detach(), output.ce_loss, hidden.grad, head.grad, bias.grad))
            for value, truth in zip(*ends):
                assert_close(value, truth)


def test_frozen_inputs_of_the_fused_loss_get_no_gradient_and_cost_none() -> None:
    data = batch(4, 30)
    target = DenseLogits(data.teacher)
    head = data.head.clone().requires_grad_()
    fused_linear_kd_loss(data.hidden, head, target).loss.backward()
    assert head.grad is not None
    hidden = data.hidden.clone().requires_grad_()
    fused_linear_kd_loss(hidden, data.head, target).loss.backward()
    assert hidden.grad is not None
    assert not fused_linear_kd_loss(data.hidden, data.head, target).loss.requires_grad
    assert fused_linear_logprobs(data.hidden, data.head, data.labels.clamp_min(0)).shape == (4,)
