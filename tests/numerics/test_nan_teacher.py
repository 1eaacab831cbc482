"""If a teacher's logits are NaN in one row, loss or gradient is not finite, so that the step can be skipped."""

import pytest
import torch

from distill_rl.losses import (
    METHODS,
    DenseLogits,
    TeacherHidden,
    chunk_kd_loss,
    kd_loss,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
)
from tests.helpers.chunks import documents

N, V, H = 6, 40, 8
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "tvd")


def poisoned(logits, row=2):
    logits = logits.clone()
    logits[row] = torch.nan
    return logits


def not_finite(value: torch.Tensor, logits: torch.Tensor) -> bool:
    value.backward()
    return not (torch.isfinite(value) and torch.isfinite(logits.grad).all())


def test_top_k_targets_of_nan_logits_are_nan():
    draw = torch.Generator().manual_seed(0)
    target = vocab_parallel_topk(poisoned(torch.randn(N, V, generator=draw)), 5, labels=torch.arange(N))
    for name in ("logprobs", "rest_logprob", "label_logprob"):
        values = getattr(target, name)
        assert values[2].isnan().all(), name
        assert values[[0, 1, 3, 4, 5]].isfinite().all(), name


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", ["bucket", "truncate", "renormalize"])
def test_kd_from_top_k_targets_is_not_finite(divergence, tail):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=draw).requires_grad_()
    labels = torch.arange(N)
    target = vocab_parallel_topk(poisoned(torch.randn(N, V, generator=draw)), 5, labels=labels)
    output = kd_loss(logits, target, labels=labels, divergence=divergence, tail=tail, kd_ratio=0.5, reduction="sum")
    assert not_finite(output.loss, logits)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["logits", "hidden"])
def test_kd_from_whole_distributions_is_not_finite(divergence, kind):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=draw).requires_grad_()
    labels = torch.arange(N)
    if kind == "logits":
        theirs = poisoned(torch.randn(N, V, generator=draw))
        target = DenseLogits(theirs, vocab_parallel_logprobs(theirs, labels))
    else:
        hidden, head = poisoned(torch.randn(N, H, generator=draw)), torch.randn(V, H, generator=draw)
        target = TeacherHidden(hidden, head)
    output = kd_loss(logits, target, labels=labels, divergence=divergence, kd_ratio=0.5, reduction="sum")
    assert not_finite(output.loss, logits)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["topk", "dense"])
@pytest.mark.parametrize("rows", ["one to one", "longer", "all"])
def test_cross_tokenizer_kd_is_not_finite(method, kind, rows):
    if kind == "topk" and "topk" not in METHODS[method]:
        pytest.skip("needs all columns")
    data = documents()
    lengths = [torch.bincount(side[side >= 0]) for side in (data.chunks.student, data.chunks.teacher)]
    short = (lengths[0] == 1) & (lengths[1] == 1)
    chosen = {"one to one": short, "longer": ~short, "all": short | ~short}[rows].nonzero()[:, 0]
    if method == "strict" and rows == "longer":
        pytest.skip("compares 1:1 chunks only")
    hit = torch.isin(data.chunks.teacher, chosen)
    theirs = data.teacher.clone()
    theirs[hit] = torch.nan
    if kind == "topk":
        target = vocab_parallel_topk(theirs, 7, labels=data.teacher_labels)
    else:
        target = DenseLogits(theirs, vocab_parallel_logprobs(theirs, data.teacher_labels))
    logits = data.student.clone().requires_grad_()
    output = chunk_kd_loss(logits, target, data.chunks, data.bridge, method=method, labels=data.labels)
    assert not_finite(output.kd, logits)
