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
"""(student rows, teacher rows) of each chunk: 1:1, 1:n, n:1 and m:n."""


@dataclass
class Documents:
    """Whole fp64 tensors. Some rows on either side belong to no chunk, and some of those have no label."""

    student: Tensor
    """[N_s, V_s]"""
    teacher: Tensor
    """[N_t, V_t]"""
    labels: Tensor
    teacher_labels: Tensor
    chunks: Chunks
    bridge: VocabularyProjection

    def target(self, kind: str, temperature: float = 1.0, k: int = 7) -> DenseLogits | TopKLogprobs:
        """A target of kind dense, topk or topk_no_rest."""
        logprobs = (self.teacher / temperature).log_softmax(1)
        label = logprobs.gather(1, self.teacher_labels[:, None])[:, 0]
        if kind == "dense":
            return DenseLogits(self.teacher, label)
        top, ids = logprobs.topk(k, 1)
        rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
        return TopKLogprobs(ids, top, None if kind == "topk_no_rest" else rest, temperature, label)

    def part(self, chunks: slice) -> Documents:
        """The documents reduced to these chunks, as in a micro-batch: rows of other chunks are cut off."""
        kept = list(range(self.chunks.count))[chunks]
        sides = (self.chunks.student, self.chunks.teacher)
        rows = [_span(side, kept) for side in sides]
        numbers = (side[span] - kept[0] for side, span in zip(sides, rows))
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
    """Random documents. On either side the first row, and a row after every third chunk, belong to no chunk.

    The first 1:1 chunk is a pair of stop tokens; each side has several stop tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    of_student, of_teacher = [-1], [-1]
    for i, (rows, teacher_rows) in enumerate(kinds):
        of_student += [i] * rows + [-1] * (i % 3 == 2)
        of_teacher += [i] * teacher_rows + [-1] * (i % 3 == 1)
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
        stop_tokens = (between.student_stops, between.teacher_stops)
        for side, chunk, stops in zip((labels, teacher_labels), numbers, stop_tokens):
            side[chunk == kinds.index((1, 1))] = stops[-1]
    return Documents(*logits, labels, teacher_labels, Chunks(*numbers, len(kinds)), between)


def bridge(student: int, teacher: int, *, seed: int = 0) -> VocabularyProjection:
    """A random vocabulary projection.

    Two thirds of the smaller vocabulary are common to both, in another order. The last three student tokens are padding
    and have empty rows; every other student token maps to between one and four teacher tokens. Some teacher columns
    receive nothing. One stop token is common, the others are not.
    """
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
    """The projection between two copies of one tokenizer."""
    ids = list(range(size))
    return VocabularyProjection.from_arrays(
        [*ids, size], ids, [1.0] * size, num_teacher=size, student_common=ids, teacher_common=ids
    )


def oracle(data: Documents, target: Any, weights: tuple[float, float] = (1.0, 1.0), **keywords: Any):
    """The output of the oracle, and the gradient of weights · (kd, ce) with respect to the student's logits."""
    student = data.student.double().clone().requires_grad_()
    output = reference_chunks.chunk_kd_loss(student, target, data.chunks, data.bridge, labels=data.labels, **keywords)
    (weights[0] * output.kd.sum() + weights[1] * output.ce.sum()).backward()
    return output, student.grad


def assert_sums(output: ChunkOutput, expected: ChunkOutput, bound: float) -> None:
    """KD and CE agree within `bound`, absolute below 1 and relative above."""
    for name in ("kd", "ce"):
        value, truth = getattr(output, name).double(), getattr(expected, name)
        error = ((value - truth).abs() / truth.abs().clamp_min(1)).max()
        assert error <= bound, f"{name} is off by {error:.1e}: {value} instead of {truth}"
    assert int(output.num_chunks) == int(expected.num_chunks)


def assert_gradient(gradient: Tensor, truth: Tensor, bound: float) -> None:
    """The gradient agrees within `bound`, relative to the norm of the truth."""
    error = float((gradient.double() - truth).norm() / truth.norm().clamp_min(1e-30))
    assert error <= bound, f"gradient is off by {error:.1e}"
