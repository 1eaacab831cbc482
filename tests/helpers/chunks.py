"""Random documents in two tokenizations for the cross-tokenizer losses, and the comparison with the fp64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distill_rl.losses import ChunkOutput, Chunks, DenseLogits, TopKLogprobs, VocabularyProjection
from distill_rl.losses.cross_tokenizer import reference as reference_chunks

KINDS = ((1, 1), (1, 2), (3, 1), (2, 3), (1, 1), (2, 2), (1, 4), (1, 1))
"""Rows of student and teacher in each chunk; every kind is there."""


@dataclass
class Documents:
    """Whole fp64 tensors. Some rows on either side belong to no chunk, and of those some have no label."""

    student: Tensor
    """[N_s, V_s]"""
    teacher: Tensor
    """[N_t, V_t]"""
    labels: Tensor
    teacher_labels: Tensor
    chunks: Chunks
    bridge: VocabularyProjection

    def target(self, kind: str, temperature: float = 1.0, k: int = 7) -> DenseLogits | TopKLogprobs:
        """dense, topk, or topk_no_rest"""
        logprobs = (self.teacher / temperature).log_softmax(1)
        label = logprobs.gather(1, self.teacher_labels[:, None])[:, 0]
        if kind == "dense":
            return DenseLogits(self.teacher, label)
        top, ids = logprobs.topk(k, 1)
        rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
        return TopKLogprobs(ids, top, None if kind == "topk_no_rest" else rest, temperature, label)

    def part(self, chunks: slice) -> Documents:
        """The documents with these chunks only, as a micro-batch would have them: the rows of the others are cut off."""
        kept = list(range(self.chunks.count))[chunks]
        rows = [_span(numbers, kept) for numbers in (self.chunks.student, self.chunks.teacher)]
        numbers = (side[own] - kept[0] for side, own in zip((self.chunks.student, self.chunks.teacher), rows))
        return replace(
            self,
            student=self.student[rows[0]], labels=self.labels[rows[0]],
            teacher=self.teacher[rows[1]], teacher_labels=self.teacher_labels[rows[1]],
            chunks=Chunks(*(side.clamp_min(-1) for side in numbers), len(kept)),
        )  # fmt: skip


def _span(numbers: Tensor, kept: Sequence[int]) -> slice:
    inside = ((numbers >= kept[0]) & (numbers <= kept[-1])).nonzero()[:, 0]
    return slice(int(inside[0]), int(inside[-1]) + 1)


def documents(
    kinds: Sequence[tuple[int, int]] = KINDS, student: int = 53, teacher: int = 71, *, seed: int = 0, scale: float = 2.0
) -> Documents:
    """Random, with a row of no chunk on either side in front of every third chunk. The first chunk of one token on both
    sides is a pair of stop tokens, of which either side has several."""
    draw = torch.Generator().manual_seed(seed)
    of_student, of_teacher = [-1], [-1]
    for number, (rows, teacher_rows) in enumerate(kinds):
        of_student += [number] * rows + [-1] * (number % 3 == 2)
        of_teacher += [number] * teacher_rows + [-1] * (number % 3 == 1)
    numbers = [torch.tensor(side) for side in (of_student, of_teacher)]
    logits = [
        scale * torch.randn(len(side), columns, generator=draw, dtype=torch.float64)
        for side, columns in zip(numbers, (student, teacher))
    ]
    labels, teacher_labels = (
        torch.randint(0, columns - 3, (len(side),), generator=draw)
        for side, columns in zip(numbers, (student, teacher))
    )
    labels[(numbers[0] < 0).nonzero()[::2, 0]] = -100
    between = bridge(student, teacher, seed=seed)
    if (1, 1) in kinds:
        for side, own, stops in zip((labels, teacher_labels), numbers, (between.student_stops, between.teacher_stops)):
            side[own == kinds.index((1, 1))] = stops[-1]
    return Documents(*logits, labels, teacher_labels, Chunks(*numbers, len(kinds)), between)


def bridge(student: int, teacher: int, *, seed: int = 0) -> VocabularyProjection:
    """Two thirds of the smaller vocabulary in common, in another order; the last three student tokens are padding and their
    rows empty; other tokens go into up to four teacher tokens, some into one; some teacher columns receive nothing. Of the
    stop tokens one is common and others are not."""
    draw = torch.Generator().manual_seed(seed + 1000)
    num_common = 2 * min(student, teacher) // 3
    common = torch.randperm(student - 3, generator=draw)[:num_common].sort().values
    counterparts = torch.randperm(teacher, generator=draw)[:num_common]
    exact = dict(zip(common.tolist(), counterparts.tolist()))
    indptr, indices, values = [0], [], []
    for token in range(student):
        if token in exact:
            pieces, weights = torch.tensor([exact[token]]), torch.ones(1)
        elif token < student - 3:
            count = int(torch.randint(1, 5, (), generator=draw))
            pieces = torch.randperm(teacher - 5, generator=draw)[:count]
            weights = 0.9 * 0.1 ** torch.arange(count, dtype=torch.float64)
        else:
            pieces, weights = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        indices += pieces.tolist()
        values += (weights / weights.sum()).tolist()
        indptr.append(len(indices))
    return VocabularyProjection.from_arrays(
        indptr,
        indices,
        values,
        num_teacher=teacher,
        student_common=common.tolist(),
        teacher_common=counterparts.tolist(),
        student_stops=[int(common[0]), *_others(common, student - 3)[:2]],
        teacher_stops=[int(counterparts[0]), *_others(counterparts, teacher - 3)[:1]],
    )


def _others(taken: Tensor, size: int) -> list[int]:
    return sorted(set(range(size)) - set(taken.tolist()))


def identity(size: int) -> VocabularyProjection:
    """Of two copies of one tokenizer."""
    ids = list(range(size))
    return VocabularyProjection.from_arrays(
        [*ids, size], ids, [1.0] * size, num_teacher=size, student_common=ids, teacher_common=ids
    )


def oracle(data: Documents, target: Any, weights: tuple[float, float] = (1.0, 1.0), **keywords: Any):
    """(output, gradient of weights · (kd, ce) with respect to the student's logits)"""
    student = data.student.double().clone().requires_grad_()
    output = reference_chunks.chunk_kd_loss(student, target, data.chunks, data.bridge, labels=data.labels, **keywords)
    (weights[0] * output.kd.sum() + weights[1] * output.ce.sum()).backward()
    return output, student.grad


def assert_sums(output: ChunkOutput, expected: ChunkOutput, bound: float) -> None:
    """KD and CE within `bound`, relative above 1."""
    for name in ("kd", "ce"):
        value, truth = getattr(output, name).double(), getattr(expected, name)
        error = ((value - truth).abs() / truth.abs().clamp_min(1)).max()
        assert error <= bound, f"{name} is off by {error:.1e}: {value} instead of {truth}"
    assert int(output.num_chunks) == int(expected.num_chunks)


def assert_gradient(gradient: Tensor, truth: Tensor, bound: float) -> None:
    """Within `bound` of the truth, relative to its norm."""
    error = float((gradient.double() - truth).norm() / truth.norm().clamp_min(1e-30))
    assert error <= bound, f"gradient is off by {error:.1e}"
