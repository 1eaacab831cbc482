"""Chunks change no bit, nothing is overwritten, and gradients are rounded once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from distill_rl.losses import DenseLogits, TopKLogprobs, fused_linear_kd_loss, kd_loss, vocab_parallel_logprobs
from tests.helpers.losses import DIVERGENCES, TAILS, batch, top_k


@dataclass(frozen=True)
class Setting:
    """In the wide one a single row is so long that torch would split its sum over the threads, and change its bits."""

    threads: int
    batch: int
    width: int
    vocabulary: int
    chunks: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.batch * self.width


SMALL = Setting(threads=1, batch=2, width=35, vocabulary=301, chunks=(1, 3, 7, 16, 32, 64))
PRIME = Setting(threads=1, batch=1, width=17, vocabulary=301, chunks=(5, 16))
WIDE = Setting(threads=2, batch=1, width=17, vocabulary=40_001, chunks=(1, 16))


@pytest.fixture(params=[SMALL, PRIME, WIDE], ids=["small", "prime", "wide on two threads"])
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param.threads)
    yield request.param
    torch.set_num_threads(before)


def logits(seed: int, dtype: torch.dtype, rows: int, vocabulary: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, vocabulary, generator=draw)).to(dtype)


def kd_gradient(student: Tensor, teacher: DenseLogits | TopKLogprobs, chunk: int | None, **keywords) -> Tensor:
    leaf = student.clone().requires_grad_()
    kd_loss(leaf, teacher, chunk_size=chunk, **keywords).loss.backward()
    return leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_streamed_logprob_gradients_equal_the_one_shot_ones_bit_for_bit(setting: Setting, dtype: torch.dtype) -> None:
    shape, vocabulary = (setting.batch, setting.width), setting.vocabulary
    student = logits(0, dtype, setting.rows, vocabulary).view(*shape, vocabulary)
    targets = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(1))
    outside = targets.clone()
    outside[0, ::3], outside[-1, 1] = -100, vocabulary + 7
    for ids in (targets, outside):
        gradients = []
        for chunk in (setting.rows, *setting.chunks):
            leaf = student.clone().requires_grad_()
            values, entropy = vocab_parallel_logprobs(leaf, ids, return_entropy=True, chunk_size=chunk)
            assert values.isfinite().all()
            masked = torch.where((ids >= 0) & (ids < vocabulary), values + 0.1 * entropy, 0)
            masked.sum().backward()
            gradients.append(leaf.grad)
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
        assert gradients[0].dtype == dtype
        assert gradients[0].isfinite().all()


def test_streamed_kd_gradients_equal_the_one_shot_ones_bit_for_bit(setting: Setting) -> None:
    student, teacher = (logits(seed, torch.bfloat16, setting.rows, setting.vocabulary) for seed in (0, 1))
    labels = torch.randint(0, setting.vocabulary, (setting.rows,), generator=torch.Generator().manual_seed(2))
    labels[::4] = -100
    for target, temperature, divergence in (
        (DenseLogits(teacher), 1.0, "forward_kl"),
        (DenseLogits(teacher), 2.5, "jsd"),
        (top_k(teacher.float(), 32, 1.0), 1.0, "reverse_kl"),
    ):
        keywords = {"labels": labels, "temperature": temperature, "divergence": divergence, "kd_ratio": 0.7}
        whole = kd_gradient(student, target, setting.rows, **keywords)
        assert whole[labels != -100].abs().sum(1).gt(0).all()
        assert whole[labels == -100].eq(0).all()
        for chunk in (*setting.chunks, None):
            assert torch.equal(kd_gradient(student, target, chunk, **keywords), whole), f"{divergence} chunk {chunk}"


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["dense", *TAILS])
def test_a_bf16_gradient_is_the_fp32_one_rounded_once(divergence: str, kind: str) -> None:
    student, teacher = (logits(seed, torch.bfloat16, 9, 3001) for seed in (0, 1))
    labels = torch.arange(9)
    target = DenseLogits(teacher) if kind == "dense" else top_k(teacher.float(), 20, 1.0)
    keywords = {"labels": labels, "divergence": divergence, "kd_ratio": 0.7, "beta": 0.4}
    if kind != "dense":
        keywords["tail"] = kind
    wide = kd_gradient(student.float(), target, 9, **keywords)
    assert torch.equal(kd_gradient(student, target, 2, **keywords), wide.to(torch.bfloat16))


@pytest.mark.parametrize("rows", [0, 1])
def test_one_row_and_no_row_at_all_are_no_special_case(rows: int) -> None:
    student, teacher = logits(0, torch.float32, rows, 50), logits(1, torch.float32, rows, 50)
    for target in (DenseLogits(teacher), top_k(teacher, 5, 1.0)):
        gradient = kd_gradient(student, target, 4)
        assert gradient.shape == student.shape
        assert gradient.isfinite().all()
        assert gradient.ne(0).any() == (rows > 0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_when_every_row_is_ignored_the_loss_is_a_zero_in_the_graph(reduction: str) -> None:
    data = batch(4, 30)
    labels = torch.full((4,), -100)
    for target in (DenseLogits(data.teacher), top_k(data.teacher, 5, 1.0)):
        student, hidden = data.student.requires_grad_(), data.hidden.clone().requires_grad_()
        keywords = {"labels": labels, "kd_ratio": 0.5, "reduction": reduction}
        for output in (
            kd_loss(student, target, **keywords),
            fused_linear_kd_loss(hidden, data.head, target, **keywords),
        ):
            assert output.loss.eq(0).all()
            assert int(output.num_tokens) == 0
            output.loss.sum().backward()
        assert student.grad.eq(0).all()
        assert hidden.grad.eq(0).all()


def test_the_default_leaves_the_logits_alone_and_allows_a_second_backward() -> None:
    student, teacher = logits(0, torch.float32, 7, 60), logits(1, torch.float32, 7, 60)
    leaf = student.clone().requires_grad_()
    upstream = leaf * 1
    version = upstream._version
    loss = kd_loss(upstream, DenseLogits(teacher), chunk_size=2).loss
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    loss.backward()
    assert upstream._version == version
    assert torch.equal(upstream, student)
    assert torch.equal(leaf.grad, 2 * first)


def test_inplace_backward_reuses_the_logits_storage_once() -> None:
    student, teacher = logits(0, torch.bfloat16, 7, 60), logits(1, torch.bfloat16, 7, 60)
    leaf = student.clone().requires_grad_()
    upstream = leaf * 1
    loss = kd_loss(upstream, DenseLogits(teacher), chunk_size=2, inplace_backward=True).loss
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad, kd_gradient(student, DenseLogits(teacher), 3))
    assert torch.equal(upstream.detach(), leaf.grad)
    with pytest.raises(RuntimeError, match="a second backward has none"):
        loss.backward()


def test_inplace_backward_is_refused_if_the_logits_are_needed_upstream() -> None:
    leaf = logits(0, torch.float32, 4, 30).requires_grad_()
    upstream = leaf.exp()
    loss = kd_loss(upstream, DenseLogits(logits(1, torch.float32, 4, 30)), inplace_backward=True).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_keeps_the_logits_once_the_loss_is_gone() -> None:
    gc.collect()
    gc.disable()
    try:
        leaf = logits(0, torch.float32, 4, 30).requires_grad_()
        upstream = leaf * 1
        gone = weakref.ref(upstream)
        output = kd_loss(upstream, DenseLogits(logits(1, torch.float32, 4, 30)), labels=torch.arange(4), kd_ratio=0.5)
        del upstream, output
        assert gone() is None  # no reference cycle waits for the garbage collector
    finally:
        gc.enable()
