"""Peak extra memory of forward and backward, measured: every allocation of torch is recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distill_rl.config.memory import FUSED_CHUNK_BYTES
from distill_rl.losses import (
    DenseLogits,
    StudentHidden,
    TeacherHidden,
    TopKLogprobs,
    fused_linear_kd_loss,
    kd_loss,
    vocab_parallel_logprobs,
    vocab_parallel_sample,
    vocab_parallel_topk,
)
from distill_rl.losses.targets import Teacher
from tests.bench.losses.losses import peak_bytes

ROWS, VOCABULARY, K = 512, 8192, 32
LIMIT = 2.5
"""Bytes per logit, 2 of which are the gradient itself."""


def logits(seed: int) -> Tensor:
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


TARGETS = {
    "dense": DenseLogits,
    "topk": lambda teacher: vocab_parallel_topk(teacher, K),
    "sampled": lambda teacher: vocab_parallel_sample(teacher, K, keys=torch.arange(ROWS)),
}


@pytest.mark.parametrize(
    ("divergence", "kind"),
    [*((name, kind) for name in ("forward_kl", "reverse_kl") for kind in ("dense", "topk")), ("forward_kl", "sampled")],
)
def test_kd_stays_below_two_and_a_half_bytes_per_logit(divergence: str, kind: str) -> None:
    student, target = logits(0), TARGETS[kind](logits(1))
    labels = torch.arange(ROWS)

    def step() -> None:
        leaf = student.detach().requires_grad_()
        keywords = {"labels": labels, "kd_ratio": 0.5, "divergence": divergence, "chunk_size": ROWS // 64}
        kd_loss(leaf, target, validate=False, **keywords).loss.backward()

    per_logit = peak_bytes(step) / student.numel()
    assert 2 <= per_logit <= LIMIT


def test_logprobs_memory_per_logit_is_bounded() -> None:
    student, targets = logits(0), torch.arange(ROWS)

    def peak(inplace: bool) -> float:
        upstream = student.detach().clone().requires_grad_() * 1

        def step() -> None:
            values, entropy = vocab_parallel_logprobs(
                upstream, targets, return_entropy=True, chunk_size=ROWS // 64, inplace_backward=inplace
            )
            torch.autograd.grad((values + entropy).sum(), upstream)

        return peak_bytes(step) / student.numel()

    assert 2 <= peak(inplace=False) <= LIMIT
    assert peak(inplace=True) <= LIMIT - 2


@pytest.mark.parametrize("kind", ["topk", "hidden"])
def test_fused_loss_memory_does_not_grow_with_rows_times_vocabulary(kind: str) -> None:
    hidden_size, chunk = 16, 8
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, hidden_size, generator=draw).to(torch.bfloat16)

    def peak(rows: int) -> int:
        hidden = torch.randn(rows, hidden_size, generator=draw).to(torch.bfloat16)
        ids, logprobs = torch.arange(K).expand(rows, K), torch.full((rows, K), 0.5 / K).log()
        target = TopKLogprobs(ids, logprobs, torch.full((rows,), 0.5).log())
        if kind == "hidden":
            target = TeacherHidden(hidden.clone(), weight.clone())

        def step() -> None:
            leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            fused_linear_kd_loss(*leaves, target, chunk_size=chunk, validate=False).loss.backward()

        return peak_bytes(step)

    small, large = peak(64), peak(512)
    more_rows = 512 - 64
    assert large - small <= more_rows * (4 * hidden_size + 8 * K + 200)
    assert (large - small) / (more_rows * VOCABULARY) < 0.1
    fixed = VOCABULARY * hidden_size * (4 + 4 + 2) + (chunk * VOCABULARY * 4) * 8
    assert large <= fixed + 512 * (8 * hidden_size + 8 * K + 200)


@pytest.mark.parametrize("kind", ["topk", "hidden"])
def test_chunks_of_the_fused_loss_are_bounded_whatever_the_vocabulary(kind: str) -> None:
    rows, hidden_size = 1024, 32
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, hidden_size, generator=draw).to(torch.bfloat16)
    for columns in (8192, 131_072):
        weight = torch.randn(columns, hidden_size, generator=draw).to(torch.bfloat16)
        target = TeacherHidden(hidden, weight)
        if kind == "topk":
            target = TopKLogprobs(torch.zeros(rows, 1).int(), torch.full((rows, 1), -0.7), torch.full((rows,), -0.7))

        def step(weight: Tensor = weight, target: Teacher = target) -> None:
            leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            kd_loss(StudentHidden(*leaves), target).loss.backward()

        gradients = (2 + 4) * weight.numel() + 2 * hidden.numel()
        assert peak_bytes(step) - gradients <= FUSED_CHUNK_BYTES


def test_a_fused_loss_without_gradients_makes_none() -> None:
    weight = torch.nn.Parameter(torch.ones(VOCABULARY, 512))
    target = TopKLogprobs(torch.zeros(4, 1).int(), torch.full((4, 1), -0.7), torch.full((4,), -0.7))

    def evaluate() -> None:
        with torch.no_grad():
            kd_loss(StudentHidden(torch.ones(4, 512), weight), target, chunk_size=2)

    assert peak_bytes(evaluate) < weight.numel()


def test_the_measurement_sees_what_a_plain_loss_allocates() -> None:
    student, teacher = logits(0), logits(1)

    def step() -> None:
        leaf = student.detach().requires_grad_()
        p, q = teacher.float().log_softmax(1), leaf.float().log_softmax(1)
        torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True).backward()

    assert peak_bytes(step) / student.numel() > 15
