"""What holds for every input: signs, zeros, equivalences."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.losses import DenseLogits, TopKLogprobs, kd_loss, vocab_parallel_topk
from distill_rl.losses.divergence import DIVERGENCES
from tests.helpers.losses import assert_close

names = st.sampled_from(sorted(DIVERGENCES))
betas = st.floats(0.01, 0.99)
temperatures = st.sampled_from([0.5, 1.0, 2.5, 7.0])


@st.composite
def pairs(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Student and teacher logits [N, V] of any sharpness, the student anywhere from a copy to a stranger."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(2, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread, distance = draw(st.sampled_from([0.0, 0.1, 1.0, 10.0])), draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0]))
    teacher = spread * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    student = teacher + distance * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return student.to(dtype), teacher.to(dtype)


@settings(max_examples=80, deadline=None)
@given(pairs(), names, betas, temperatures, st.sampled_from(["dense", "bucket", "renormalize"]), st.data())
def test_kd_is_never_negative(logits, divergence, beta, temperature, kind, data) -> None:
    student, teacher = logits
    target, keywords = DenseLogits(teacher), {}
    if kind != "dense":
        k = data.draw(st.integers(1, teacher.shape[1]))
        wire = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
        sent = vocab_parallel_topk(teacher, k, temperature=temperature).to_tensors(wire)
        if data.draw(st.booleans()):
            del sent["rest_logprob"]
        target, keywords = TopKLogprobs.from_tensors(sent, temperature), {"tail": kind}
    student = student.requires_grad_()
    output = kd_loss(
        student, target, divergence=divergence, beta=beta, temperature=temperature, reduction="none", **keywords
    )
    output.loss.sum().backward()
    assert (output.loss >= 0).all()
    assert output.loss.isfinite().all()
    assert student.grad.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    pairs(torch.float64), names, betas, temperatures, st.sampled_from(["dense", "bucket", "truncate", "renormalize"])
)
def test_the_gradient_of_a_row_sums_to_zero(logits, divergence, beta, temperature, kind) -> None:
    """A constant added to all logits of a row changes nothing."""
    student, teacher = logits
    target, keywords = DenseLogits(teacher), {}
    if kind != "dense":
        target = vocab_parallel_topk(teacher, max(1, teacher.shape[1] // 3), temperature=temperature)
        keywords = {"tail": kind}
    student = student.requires_grad_()
    keywords |= {"divergence": divergence, "beta": beta, "temperature": temperature}
    kd_loss(student, target, reduction="sum", **keywords).loss.backward()
    assert student.grad.sum(1).abs().max() <= 1e-12 * max(1, student.grad.abs().max())


@settings(max_examples=40, deadline=None)
@given(pairs(torch.float64), names, betas, temperatures)
def test_identical_distributions_have_no_loss_and_no_gradient(logits, divergence, beta, temperature) -> None:
    _, teacher = logits
    k = max(1, teacher.shape[1] // 2)
    for target in (DenseLogits(teacher), vocab_parallel_topk(teacher, k, temperature=temperature)):
        student = (teacher + 3.5).requires_grad_()  # the same distribution
        output = kd_loss(student, target, divergence=divergence, beta=beta, temperature=temperature, reduction="sum")
        output.loss.backward()
        assert output.loss <= 1e-11
        if divergence != "tvd":  # whose slope is a sign: rounding decides it
            assert student.grad.abs().max() <= 1e-11


@settings(max_examples=40, deadline=None)
@given(pairs(torch.float64), names, betas, temperatures)
def test_every_column_in_the_top_k_is_the_dense_loss(logits, divergence, beta, temperature) -> None:
    student, teacher = logits
    keywords = {"divergence": divergence, "beta": beta, "temperature": temperature, "reduction": "none"}
    ends = []
    target = vocab_parallel_topk(teacher, teacher.shape[1], temperature=temperature)
    for same in (DenseLogits(teacher), target):
        leaf = student.clone().requires_grad_()
        output = kd_loss(leaf, same, **keywords)
        output.loss.sum().backward()
        ends.append((output.loss.detach(), leaf.grad))
    assert_close(ends[0][0] / (1 + ends[0][0]), ends[1][0] / (1 + ends[0][0]), 1e-10, "loss")
    assert_close(ends[0][1], ends[1][1], 1e-10 * max(1, float(ends[0][1].abs().max())))


@settings(max_examples=40, deadline=None)
@given(pairs(torch.float64), st.integers(1, 20), temperatures)
def test_top_k_and_rest_share_the_whole_mass(logits, k, temperature) -> None:
    _, teacher = logits
    k = min(k, teacher.shape[1])
    target = vocab_parallel_topk(teacher, k, temperature=temperature)
    mass = target.logprobs.exp().sum(1) + target.rest_logprob.exp()
    assert_close(mass, torch.ones_like(mass), 1e-12, "mass")
    assert (target.logprobs[:, :-1] >= target.logprobs[:, 1:]).all()


@settings(max_examples=30, deadline=None)
@given(pairs(torch.float64), names, betas, st.data())
def test_masked_columns_change_nothing(logits, divergence, beta, data) -> None:
    """A wider table whose further columns are −inf on both sides is the same vocabulary."""
    student, teacher = logits
    padding = data.draw(st.integers(1, 9))
    k = data.draw(st.integers(1, teacher.shape[1]))
    top = vocab_parallel_topk(teacher, k)  # once: where logits tie, a wider table may pick others
    ends = []
    for width in (0, padding):
        columns = torch.full((len(student), width), -torch.inf, dtype=torch.float64)
        leaf, wide = torch.cat([student, columns], 1).requires_grad_(), torch.cat([teacher, columns], 1)
        losses = [
            kd_loss(leaf, target, divergence=divergence, beta=beta, reduction="sum").loss
            for target in (DenseLogits(wide), top)
        ]
        sum(losses).backward()
        assert leaf.grad[:, student.shape[1] :].eq(0).all()
        ends.append((torch.stack(losses).detach(), leaf.grad[:, : student.shape[1]]))
    scale = max(1, float(ends[0][0].max()))
    assert_close(ends[1][0], ends[0][0], 1e-11 * scale, "loss")
    assert_close(ends[1][1], ends[0][1], 1e-11 * scale)
