"""Stop tokens of two tokenizers are one outcome where an answer ends, and ordinary tokens everywhere else."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distill_rl.losses import (
    METHODS,
    Chunks,
    DenseLogits,
    TopKLogprobs,
    VocabularyProjection,
    chunk_kd_loss,
    vocab_parallel_topk,
)
from tests.bench.losses.losses import peak_bytes
from tests.helpers.chunks import Documents, documents
from tests.helpers.losses import DIVERGENCES

VOCABULARY = 40
EOS, TURN = 38, 39
"""Of either side. eos and eos are common, as role and role; TURN and TURN are not."""


def bridge(student_stops: list[int], teacher_stops: list[int]) -> VocabularyProjection:
    """Ids below EOS are the same tokens on both sides."""
    common = [*range(EOS), *([EOS] if EOS in student_stops and EOS in teacher_stops else [])]
    indptr = [min(token, EOS) + max(0, min(token, TURN) - EOS) * (EOS in common) for token in range(VOCABULARY + 1)]
    return VocabularyProjection.from_arrays(
        indptr, common, [1.0] * len(common), num_teacher=VOCABULARY, student_common=common, teacher_common=common,
        student_stops=student_stops, teacher_stops=teacher_stops,
    )  # fmt: skip


def one_end(
    method: str, student: Tensor, teacher: Tensor, stops: tuple[list[int], list[int]], **keywords: Any
) -> Tensor:
    """The gradient [V] of one answer's end, where the student wrote the last of its stop tokens and the teacher its last."""
    leaf = student[None].clone().requires_grad_()
    target: DenseLogits | TopKLogprobs = vocab_parallel_topk(teacher[None], 8, labels=torch.tensor([stops[1][-1]]))
    if "topk" not in METHODS[method]:
        target = DenseLogits(teacher[None], target.label_logprob)
    number = torch.zeros(1, dtype=torch.int64)
    labels = torch.tensor([stops[0][-1]])
    output = chunk_kd_loss(
        leaf, target, Chunks(number, number, 1), bridge(*stops), method=method, labels=labels, **keywords
    )
    output.kd.backward()
    return leaf.grad[0]


PAIRS = list(itertools.product(([EOS], [TURN], [EOS, TURN]), repeat=2))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("method", METHODS)
def test_a_surer_teacher_never_pushes_the_stop_token_down(method: str, divergence: str) -> None:
    draw = torch.Generator().manual_seed(0)
    for stops, _ in itertools.product(PAIRS, range(2)):
        student, teacher = (2 * torch.randn(VOCABULARY, generator=draw) for _ in range(2))
        teacher[stops[1][-1]] += 9
        chances = [side.softmax(0)[own].sum() for side, own in zip((student, teacher), stops)]
        assert chances[0] < chances[1]
        assert one_end(method, student, teacher, stops, divergence=divergence, beta=0.3)[stops[0][-1]] < 0, stops


@pytest.mark.parametrize("method", METHODS)
def test_steps_towards_a_sure_teacher_end_in_a_student_that_stops(method: str) -> None:
    """Student Qwen3, one stop token; teacher Phi-3, whose turns do not end in its eos. Token by token, p(stop) falls."""
    draw = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(VOCABULARY, generator=draw) for _ in range(2))
    student[EOS], teacher[TURN] = 7, 12
    before = student.softmax(0)[EOS]
    for _ in range(50):
        student = student - 3 * one_end(method, student, teacher, ([EOS], [EOS, TURN]))
    assert 0.9 < before < student.softmax(0)[EOS]


@pytest.mark.parametrize("method", METHODS)
def test_a_student_learns_the_stop_token_that_its_template_writes(method: str) -> None:
    draw = torch.Generator().manual_seed(2)
    student, teacher = (torch.randn(VOCABULARY, generator=draw) for _ in range(2))
    student[EOS], teacher[EOS] = 7, 12
    before = student.softmax(0)
    for _ in range(50):
        student = student - 3 * one_end(method, student, teacher, ([EOS, TURN], [TURN, EOS]))
    after = student.softmax(0)
    assert after[TURN] > before[TURN]
    assert after[EOS] < before[EOS]
    assert method == "uld" or after[TURN] > 0.9  # the slope of an L1 distance is as small as what it is to raise


@pytest.mark.parametrize("method", METHODS)
def test_elsewhere_stop_tokens_are_tokens_like_others(method: str) -> None:
    data = documents()
    text = data.part(slice(1, None))
    nothing = torch.zeros(0, dtype=torch.int64)
    without = replace(text, bridge=replace(text.bridge, student_stops=nothing, teacher_stops=nothing, _made={}))
    assert bool(torch.isin(data.labels, data.bridge.student_stops).any())
    assert not torch.isin(text.labels[text.chunks.student >= 0], text.bridge.student_stops).any()
    values = [loss_and_gradient(each, method) for each in (text, without)]
    assert all(torch.equal(one, other) for one, other in zip(*values))


def loss_and_gradient(data: Documents, method: str) -> tuple[Tensor, Tensor]:
    leaf = data.student.clone().requires_grad_()
    output = chunk_kd_loss(
        leaf, data.target("dense"), data.chunks, data.bridge, method=method, labels=data.labels, reduction="none"
    )
    (output.kd.sum() + output.ce.sum()).backward()
    return output.kd.detach(), leaf.grad


def test_the_ends_cost_no_second_gradient() -> None:
    rows, columns = 256, 4096
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).bfloat16()
    labels = torch.arange(rows)
    numbers = torch.arange(rows)
    target = TopKLogprobs(
        torch.zeros(rows, 1).long(), torch.full((rows, 1), -1.0), None, 1.0, torch.full((rows,), -1.0)
    )
    ids = list(range(columns))

    def peak(stops: list[int]) -> int:
        between = VocabularyProjection.from_arrays(
            [*ids, columns], ids, [1.0] * columns, num_teacher=columns, student_common=ids, teacher_common=ids,
            student_stops=stops, teacher_stops=stops,
        )  # fmt: skip
        leaf = logits.clone().requires_grad_()

        def step() -> None:
            output = chunk_kd_loss(
                leaf, target, Chunks(numbers, numbers, rows), between, method="hybrid", labels=labels, chunk_size=4
            )
            output.kd.backward()

        return peak_bytes(step)

    assert peak([7, 100]) - peak([]) < 0.1 * logits.numel() * logits.element_size()
