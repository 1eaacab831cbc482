"""KD from draws: the oracle's value and gradient, and no bias."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from distill_rl.losses import (
    DenseLogits,
    KDLoss,
    SampledTokens,
    fused_linear_kd_loss,
    kd_loss,
    token_agreement,
    vocab_parallel_sample,
)
from tests.helpers.losses import Case, assert_close, assert_same, batch, oracle

DATA = batch(9, 83, padding=5)
CASES = [
    Case("forward_kl", target, "bucket", temperature, kd_ratio=ratio, reduction=reduction)
    for target in ("sampled", "sampled_no_mean")
    for temperature in (1.0, 2.5)
    for ratio, reduction in ((0.6, "mean"), (1.0, "none"), (0.0, "sum"))
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_value_and_gradient_are_the_oracles(case: Case, chunk: int) -> None:
    target = DATA.target(case)
    expected, gradient = oracle(case, DATA, target)
    student = DATA.student.clone().requires_grad_()
    keywords = {"labels": DATA.labels, "token_weights": DATA.weights, "chunk_size": chunk, **case.keywords}
    output = kd_loss(student, target, **keywords)
    output.loss.sum().backward()
    assert_same(output, expected)
    assert_close(student.grad, gradient)
    hidden, head, bias = (each.clone().requires_grad_() for each in (DATA.hidden, DATA.head, DATA.bias))
    output = fused_linear_kd_loss(hidden, head, target, bias=bias, **keywords)
    output.loss.sum().backward()
    assert_same(output, expected)
    assert_close(hidden.grad, gradient @ DATA.head)
    assert_close(head.grad, gradient.T @ DATA.hidden)
    assert_close(bias.grad, gradient.sum(0))


def test_narrow_counts_and_ids_give_the_same_bits() -> None:
    target = DATA.target(Case("forward_kl", "sampled", "bucket", 1.0))
    narrow = SampledTokens.from_tensors(target.to_tensors(torch.float16), 1.0)
    narrow = replace(narrow, mean_logprob=target.mean_logprob)
    assert kd_loss(DATA.student, narrow).loss == kd_loss(DATA.student, target).loss


def test_a_student_equal_to_its_teacher_has_no_loss() -> None:
    logits = DATA.teacher.float()
    target = vocab_parallel_sample(logits, 7, keys=torch.arange(9), temperature=2.0)
    assert kd_loss(logits, target, temperature=2.0, reduction="none").loss.abs().max() < 1e-5  # fp32


def test_every_column_that_was_drawn_leaves_no_bias_in_the_limit() -> None:
    """With very many draws, the loss is the dense one."""
    target = vocab_parallel_sample(DATA.teacher, 30_000, keys=torch.arange(9))
    student = [DATA.student.clone().requires_grad_() for _ in range(2)]
    sampled, dense = kd_loss(student[0], target), kd_loss(student[1], DenseLogits(DATA.teacher))
    for output in (sampled, dense):
        output.loss.backward()
    assert_close(sampled.loss, dense.loss, 1e-3)
    assert_close(student[0].grad, student[1].grad, 1 / 30_000)


def test_loss_and_gradient_are_unbiased_over_100000_draws() -> None:
    """The mean over 100,000 rows of equal logits, each with draws of its own, is the dense value within 3 sigma."""
    rows, columns, n = 100_000, 12, 3
    draw = torch.Generator().manual_seed(5)
    teacher, student = (2 * torch.randn(1, columns, generator=draw, dtype=torch.float64) for _ in range(2))
    target = vocab_parallel_sample(teacher.expand(rows, columns), n, keys=torch.arange(rows) + 2**40)
    many = student.repeat(rows, 1).requires_grad_()
    output = kd_loss(many, target, reduction="none")
    output.loss.sum().backward()
    one = student.clone().requires_grad_()
    exact = kd_loss(one, DenseLogits(teacher))
    exact.loss.backward()
    sigma = output.loss.detach().std() / math.sqrt(rows)
    assert sigma > 0
    assert abs(output.loss.detach().mean() - exact.loss.detach()) <= 3 * sigma
    sigmas = many.grad.std(0) / math.sqrt(rows)
    assert ((many.grad.mean(0) - one.grad[0]).abs() <= 3 * sigmas + 1e-15).all()
    # A top k of as many entries is biased by far more.
    p = teacher.softmax(1)[0]
    assert p.topk(n).values.sum() < 1 - 100 * sigmas.max()


def test_rows_without_draws_have_no_loss_and_no_gradient() -> None:
    target = SampledTokens(torch.full((9, 3), -1), torch.zeros(9, 3, dtype=torch.int16), torch.zeros(9))
    student = DATA.student.requires_grad_()
    kd_loss(student, target).loss.backward()
    assert student.grad.abs().max() == 0


def test_a_nan_teacher_gives_a_nan_loss_and_gradient() -> None:
    logits = DATA.teacher.clone()
    logits[2, 4] = torch.nan
    student = DATA.student.requires_grad_()
    output = kd_loss(student, vocab_parallel_sample(logits, 5, keys=torch.arange(9)), reduction="none")
    output.loss.sum().backward()
    assert output.loss.isnan().nonzero().tolist() == [[2]]
    assert student.grad.isnan().any(1).nonzero().tolist() == [[2]]


def test_ignored_rows_may_hold_anything() -> None:
    case = Case("forward_kl", "sampled", "bucket", 1.0)
    target = DATA.target(case)
    poisoned = replace(target, mean_logprob=target.mean_logprob.clone())
    poisoned.mean_logprob[1] = torch.nan  # row 1 has no label
    for validate in (None, False):
        student = DATA.student.clone().requires_grad_()
        output = kd_loss(student, poisoned, labels=DATA.labels, validate=validate)
        output.loss.backward()
        assert output.loss.isfinite()
        assert (student.grad[1] == 0).all()


@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "tvd"])
def test_other_divergences_are_refused(divergence: str) -> None:
    target = DATA.target(Case("forward_kl", "sampled", "bucket", 1.0))
    with pytest.raises(ValueError, match=f"divergence: must be forward_kl with SampledTokens; got {divergence}"):
        KDLoss(divergence=divergence)(DATA.student, target)


def test_tail_has_no_effect() -> None:
    target = DATA.target(Case("forward_kl", "sampled", "bucket", 1.0))
    losses = {kd_loss(DATA.student, target, tail=tail).loss.item() for tail in ("bucket", "truncate", "renormalize")}
    assert len(losses) == 1


def test_agreement_refuses_draws() -> None:
    with pytest.raises(ValueError, match="got SampledTokens"):
        token_agreement(DATA.student, DATA.target(Case("forward_kl", "sampled", "bucket", 1.0)))


IDS, COUNTS = torch.tensor([[3, 5, -1]] * 9), torch.tensor([[2, 1, 0]] * 9)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (SampledTokens(IDS.float(), COUNTS), "teacher.ids: must be int32 or int64; got torch.float32"),
        (SampledTokens(IDS[:4], COUNTS[:4]), "teacher.ids: must be .N, m. with N = 9 rows and m >= 1; got .4, 3."),
        (SampledTokens(IDS[:, :0], COUNTS[:, :0]), "teacher.ids: must be .N, m. with N = 9 rows and m >= 1; got .9, 0."),
        (SampledTokens(IDS, COUNTS / 3), "teacher.counts: must be integers of the shape of ids, .9, 3.; got torch.float32"),
        (SampledTokens(IDS, COUNTS[:, :2]), "teacher.counts: must be integers of the shape of ids"),
        (SampledTokens(IDS, COUNTS, torch.zeros(3)), "teacher.mean_logprob: must be .N. with N = 9 rows; got .3."),
        (SampledTokens(IDS, COUNTS, temperature=2.0), "temperature: must be that of the teacher's targets, 2.0; got 1.0"),
        (SampledTokens(IDS, COUNTS + 1), "teacher.counts: must be positive where there is an id, and 0 where the id is -1"),
        (SampledTokens(IDS, -COUNTS), "teacher.counts: must be positive"),
        (SampledTokens(IDS - 1, COUNTS), "teacher.ids: must lie in .0, 83.; got -2"),
        (SampledTokens(IDS + 79, COUNTS + (COUNTS == 0).long()), "teacher.ids: must lie in .0, 83.; got 84"),
        (SampledTokens(torch.full_like(IDS, 4), COUNTS + 1), "teacher.ids: must be distinct within a row; got 4 twice"),
    ],
)  # fmt: skip
def test_targets_that_do_not_fit_are_refused(target: SampledTokens, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kd_loss(DATA.student, target)
