"""Bad input: a ValueError that names the argument, the rule and the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from distill_rl.losses import (
    Chunks,
    DenseLogits,
    KDLoss,
    StudentHidden,
    TeacherHidden,
    TopKLogprobs,
    chunk_kd_loss,
    fused_linear_kd_loss,
    fused_linear_logprobs,
    kd_loss,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
)
from distill_rl.losses.core import checks
from tests.helpers.chunks import identity

ROWS, VOCABULARY, K = 3, 10, 4
LOGITS = torch.zeros(ROWS, VOCABULARY)
TOP = vocab_parallel_topk(torch.arange(VOCABULARY).float().expand(ROWS, -1), K)


def top(**changes: Any) -> TopKLogprobs:
    fields = {"ids": TOP.ids, "logprobs": TOP.logprobs, "rest_logprob": TOP.rest_logprob}
    return TopKLogprobs(**(fields | changes))


def ids(*row: int) -> torch.Tensor:
    return torch.tensor([list(row)] * ROWS)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "duplicate ids": (
        lambda: kd_loss(LOGITS, top(ids=ids(1, 2, 7, 2))),
        "teacher.ids: must be distinct within a row; got 2 twice in row 0",
    ),
    "id too large": (lambda: kd_loss(LOGITS, top(ids=ids(1, 2, 3, 10))), r"teacher.ids: must lie in \[0, 10\); got 10"),
    "id negative": (lambda: kd_loss(LOGITS, top(ids=ids(1, 2, 3, -2))), r"teacher.ids: must lie in \[0, 10\); got -2"),
    "probability of an absent id": (
        lambda: kd_loss(LOGITS, top(ids=ids(1, 2, 3, -1))),
        "teacher.logprobs: must be -inf where the id is -1",
    ),
    "raw logits": (
        lambda: kd_loss(
            LOGITS, top(logprobs=torch.tensor([[0.0, -1, -2, -9], [2, 1, 0, -1], [3, 2, 1, 0]])), validate=True
        ),
        r"teacher.logprobs: must be log-probabilities, whose exponentials sum to at most 1 in a row; "
        "got 1.503 in row 0, take log_softmax over the whole vocabulary before the top k",
    ),
    "raw logits across tokenizers": (
        lambda: chunk_kd_loss(
            LOGITS,
            top(logprobs=torch.ones(ROWS, K), label_logprob=torch.zeros(ROWS)),
            Chunks(torch.arange(ROWS), torch.arange(ROWS), ROWS),
            identity(VOCABULARY),
            method="hybrid",
            validate=True,
            labels=torch.zeros(ROWS, dtype=torch.int64),
        ),
        "teacher.logprobs: must be log-probabilities, .* got 10.87 in row 0",
    ),
    "infinite probability": (
        lambda: kd_loss(LOGITS, top(logprobs=torch.full((ROWS, K), torch.inf)), validate=True),
        "teacher.logprobs: must be log-probabilities, .* got inf in row 0",
    ),
    "ids of floats": (
        lambda: kd_loss(LOGITS, top(ids=TOP.logprobs)),
        "teacher.ids: must be int32 or int64; got torch.float32",
    ),
    "k above V": (
        lambda: kd_loss(LOGITS[:, :3], top()),
        r"teacher.ids: k must lie in \[1, 3\], the vocabulary; got 4",
    ),
    "other k for log-probs": (
        lambda: kd_loss(LOGITS, top(logprobs=TOP.logprobs[:, :2])),
        r"teacher.logprobs: must be floats of the shape of ids, \[3, 4\]; got torch.float32 \[3, 2\]",
    ),
    "other rows": (lambda: kd_loss(LOGITS[:2], top()), r"teacher.ids: must be \[N, k\] with N = 2 rows; got \[3, 4\]"),
    "rest of other rows": (
        lambda: kd_loss(LOGITS, top(rest_logprob=TOP.rest_logprob[:1])),
        r"teacher.rest_logprob: must be \[N\] with N = 3 rows; got \[1\]",
    ),
    "other temperature": (
        lambda: kd_loss(LOGITS, top(), temperature=2.0),
        "temperature: must be that of the teacher's targets, 1.0; got 2.0",
    ),
    "no temperature": (
        lambda: kd_loss(LOGITS, top(), temperature=0.0),
        "temperature: must be positive and finite; got 0.0",
    ),
    "unknown divergence": (
        lambda: kd_loss(LOGITS, top(), divergence="kl"),
        "divergence: must be one of forward_kl, .*tvd; got 'kl'",
    ),
    "unknown tail": (
        lambda: kd_loss(LOGITS, top(), tail="none"),
        "tail: must be one of bucket, truncate, renormalize; got 'none'",
    ),
    "unknown reduction": (
        lambda: kd_loss(LOGITS, top(), reduction="avg"),
        "reduction: must be one of mean, sum, none; got 'avg'",
    ),
    "label outside": (
        lambda: kd_loss(LOGITS, top(), labels=torch.tensor([1, -100, 10])),
        r"labels: must lie in \[0, 10\) or be ignore_index \(-100\); got 10",
    ),
    "label of another ignore index": (
        lambda: kd_loss(LOGITS, top(), labels=torch.tensor([1, -100, 2]), ignore_index=0),
        r"labels: must lie in \[0, 10\) or be ignore_index \(0\); got -100",
    ),
    "labels of floats": (
        lambda: kd_loss(LOGITS, top(), labels=torch.zeros(3)),
        "labels: must be integers; got torch.float32",
    ),
    "labels of other rows": (
        lambda: kd_loss(LOGITS, top(), labels=torch.zeros(4, dtype=torch.int64)),
        r"labels: must have the shape of the logits' rows, \[3\]; got \[4\]",
    ),
    "weights of other rows": (
        lambda: kd_loss(LOGITS, top(), token_weights=torch.zeros(3, 1)),
        r"token_weights: must have the shape of the logits' rows, \[3\]; got \[3, 1\]",
    ),
    "ratio without labels": (
        lambda: kd_loss(LOGITS, top(), kd_ratio=0.5),
        "labels: needed for the cross-entropy when kd_ratio is below 1; got None and 0.5",
    ),
    "ratio above one": (lambda: kd_loss(LOGITS, top(), kd_ratio=1.5), r"kd_ratio: must lie in \[0, 1\]; got 1.5"),
    "no teacher": (lambda: kd_loss(LOGITS, None), "teacher: needed when kd_ratio is above 0; got None and 1.0"),
    "teacher of another type": (
        lambda: kd_loss(LOGITS, LOGITS),
        "teacher: must be DenseLogits, TopKLogprobs, SampledTokens or TeacherHidden; got Tensor",
    ),
    "logits of integers": (
        lambda: kd_loss(LOGITS.long(), top()),
        r"student_logits: must be a float tensor of 2 or 3 dimensions; got torch.int64 \[3, 10\]",
    ),
    "logits of one dimension": (
        lambda: kd_loss(LOGITS[0], top()),
        r"student_logits: must be a float tensor of 2 or 3 dimensions; got torch.float32 \[10\]",
    ),
    "dense teacher of other columns": (
        lambda: kd_loss(LOGITS, DenseLogits(LOGITS[:, :9])),
        "teacher.logits: must have the columns of the student's shard, 10 of 10; got 9",
    ),
    "dense teacher of other rows": (
        lambda: kd_loss(LOGITS, DenseLogits(LOGITS[:2])),
        r"teacher.logits: must have 3 rows; got \[2, 10\]",
    ),
    "hidden teacher of other width": (
        lambda: kd_loss(LOGITS, TeacherHidden(torch.zeros(3, 5), torch.zeros(10, 4))),
        r"teacher.hidden: must have 3 rows of 4, the width of its lm_head_weight; got \[3, 5\]",
    ),
    "chunk of nothing": (lambda: kd_loss(LOGITS, top(), chunk_size=0), "chunk_size: must be at least 1; got 0"),
    "in place on a leaf": (
        lambda: kd_loss(LOGITS.clone().requires_grad_(), top(), inplace_backward=True),
        "inplace_backward: overwrites the logits, which must be the output of something; got a leaf",
    ),
    "head of another width": (
        lambda: fused_linear_kd_loss(torch.zeros(3, 5), torch.zeros(10, 4), top()),
        r"lm_head_weight: must be \[V, 5\], the hidden size; got \[10, 4\]",
    ),
    "more tokens than columns": (
        lambda: kd_loss(StudentHidden(torch.zeros(3, 5), torch.zeros(10, 5), num_tokens=11), top()),
        r"num_tokens: must lie in \[1, 10\], the rows of lm_head_weight; got 11",
    ),
    "bias of other columns": (
        lambda: fused_linear_kd_loss(torch.zeros(3, 5), torch.zeros(10, 5), top(), bias=torch.zeros(9)),
        "bias: must have the columns of the student's shard, 10 of 10; got 9",
    ),
    "softcap of zero": (
        lambda: fused_linear_logprobs(torch.zeros(3, 5), torch.zeros(10, 5), TOP.ids[:, 0], softcap=0.0),
        "softcap: must be positive and finite; got 0.0",
    ),
    "targets of other rows": (
        lambda: vocab_parallel_logprobs(LOGITS, torch.zeros(2, dtype=torch.int64)),
        r"target_ids: must have the shape of the logits' rows, \[3\]; got \[2\]",
    ),
    "top k of nothing": (lambda: vocab_parallel_topk(LOGITS, 0), r"k: must lie in \[1, 10\], the vocabulary; got 0"),
    "top k above V": (lambda: vocab_parallel_topk(LOGITS, 11), r"k: must lie in \[1, 10\], the vocabulary; got 11"),
    "module's bias without a head": (
        lambda: KDLoss()(LOGITS, top(), bias=torch.zeros(10)),
        "bias, softcap: belong to lm_head_weight, which is None",
    ),
    "half an item": (
        lambda: kd_loss(LOGITS, top(), num_items_in_batch=0.5),
        "num_items_in_batch: must be a count, at least 1, or 0 where nothing counts; got 0.5",
    ),
    "fewer items than none": (
        lambda: kd_loss(LOGITS, top(), num_items_in_batch=torch.tensor(-3)),
        "num_items_in_batch: must be a count, at least 1, or 0 where nothing counts; got -3",
    ),
    "items per row": (
        lambda: kd_loss(LOGITS, top(), num_items_in_batch=torch.ones(3)),
        r"num_items_in_batch: must be one number; got torch.float32 \[3\]",
    ),
    "learnable weights": (
        lambda: kd_loss(LOGITS, top(), token_weights=torch.ones(3, requires_grad=True)),
        "token_weights: are constants and get no gradient; got a tensor that requires one, detach it",
    ),
    "temperature per row": (
        lambda: kd_loss(LOGITS, top(), temperature=torch.ones(3)),
        r"temperature: must be one number for all rows; got a tensor \[3\]",
    ),
    "transform of torch.func": (
        lambda: torch.func.grad(lambda logits: kd_loss(logits, top()).loss)(LOGITS),
        "student_logits: torch.func's transforms are not supported; use torch.autograd",
    ),
    "wire without ids": (
        lambda: TopKLogprobs.from_tensors({"logprobs": TOP.logprobs}, 1.0),
        "tensors: must hold ids and logprobs; ids missing",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_with_argument_rule_and_value(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_values_are_not_looked_at_when_that_is_declined() -> None:
    twice = top(ids=ids(1, 2, 7, 2))
    assert kd_loss(LOGITS, twice, validate=False).loss.isfinite()


@pytest.mark.parametrize("validate", [None, False])
def test_raw_logits_are_taken_unless_looking_is_asked_for(validate: bool | None) -> None:
    assert kd_loss(LOGITS, top(logprobs=torch.ones(ROWS, K)), validate=validate).loss.isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 10.0])
def test_log_probabilities_that_were_rounded_on_their_way_are_taken(dtype: torch.dtype, scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    for columns in (2, 10, 64, 3000, 100_000):
        logprobs = (scale * torch.randn(2, columns, generator=draw)).log_softmax(1).to(dtype)
        for arrived in (logprobs, logprobs.float()):
            target = TopKLogprobs(torch.arange(columns).expand(2, -1), arrived)
            checks.log_probabilities(target, torch.ones(2, dtype=torch.bool), True)


def test_a_log_softmax_of_16_bits_is_taken_and_twice_its_probability_is_not() -> None:
    logprobs = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).bfloat16().log_softmax(1)
    ids, all_rows = torch.arange(3000).expand(4, -1), torch.ones(4, dtype=torch.bool)
    checks.log_probabilities(TopKLogprobs(ids, logprobs), all_rows, True)
    twice = TopKLogprobs(ids, logprobs + math.log(2))
    with pytest.raises(ValueError, match=r"got 1\.991 in row 0"):
        checks.log_probabilities(twice, all_rows, True)
    with pytest.raises(ValueError, match=r"in row 2"):
        checks.log_probabilities(twice, torch.tensor([False, False, True, True]), True)


@pytest.mark.parametrize("validate", [None, True])
def test_ignored_rows_may_hold_raw_logits(validate: bool | None) -> None:
    logprobs = TOP.logprobs.index_fill(0, torch.tensor([1]), 7.0)
    assert kd_loss(LOGITS, top(logprobs=logprobs), labels=torch.tensor([0, -100, 2]), validate=validate).loss.isfinite()


def test_a_teacher_that_is_not_a_number_shows_in_the_loss() -> None:
    assert kd_loss(LOGITS, top(logprobs=torch.full((ROWS, K), torch.nan))).loss.isnan()


def test_shapes_are_checked_even_then() -> None:
    with pytest.raises(ValueError, match="k must lie in"):
        kd_loss(LOGITS[:, :3], top(), validate=False)


@pytest.mark.parametrize("num_labels", [0, 3, 5, 7])
def test_wrong_number_of_labels_is_refused(num_labels):
    """Losses are divided by it. Three of seven rows are ignored."""
    logits, labels = torch.randn(7, 11), torch.tensor([1, -100, 2, -100, 3, 4, -100])
    dense = DenseLogits(torch.randn(7, 11))
    for teacher, kd_ratio in ((None, 0.0), (dense, 0.5)):
        kd_loss(logits, teacher, labels=labels, kd_ratio=kd_ratio, num_labels=4)
        with pytest.raises(ValueError, match=f"num_labels: must be the 4 rows that are not ignored; got {num_labels}"):
            kd_loss(logits, teacher, labels=labels, kd_ratio=kd_ratio, num_labels=num_labels)
