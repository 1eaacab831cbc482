"""Random cases for the losses, and their comparison with the fp64 oracle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distill_rl.losses import DenseLogits, SampledTokens, TeacherHidden, TopKLogprobs, reference

DIVERGENCES = tuple(reference.LOG_DIVERGENCES)
TAILS = ("bucket", "truncate", "renormalize")
TEMPERATURES = (1.0, 2.5)


@dataclass(frozen=True)
class Case:
    """One setting of the loss. `target` is dense, hidden, topk, topk_no_rest, sampled or sampled_no_mean."""

    divergence: str
    target: str
    tail: str
    temperature: float
    kd_ratio: float = 0.6
    beta: float = 0.3
    reduction: str = "mean"

    @property
    def keywords(self) -> dict[str, Any]:
        names = ("divergence", "tail", "temperature", "kd_ratio", "beta", "reduction")
        return {name: getattr(self, name) for name in names}


def all_cases(targets: tuple[str, ...] = ("dense", "hidden", "topk", "topk_no_rest")) -> Iterator[Case]:
    """Every divergence × target kind × tail × temperature, the tail for `topk` only; and draws, which have one divergence."""
    for divergence, target, temperature in itertools.product(DIVERGENCES, targets, TEMPERATURES):
        for tail in TAILS if target == "topk" else TAILS[:1]:
            yield Case(divergence, target, tail, temperature)
    for target, temperature in itertools.product(("sampled", "sampled_no_mean"), TEMPERATURES):
        yield Case("forward_kl", target, "bucket", temperature)


@dataclass
class Batch:
    """Whole fp64 tensors, equal on every rank. Logits are hidden · headᵀ + bias on both sides."""

    hidden: Tensor
    head: Tensor
    bias: Tensor
    teacher_hidden: Tensor
    teacher_head: Tensor
    labels: Tensor
    weights: Tensor

    @property
    def student(self) -> Tensor:
        """[N, V]"""
        return self.hidden @ self.head.T + self.bias

    @property
    def teacher(self) -> Tensor:
        """[N, V]"""
        return 1.5 * self.teacher_hidden @ self.teacher_head.T + mask_of(self.bias)

    def target(self, case: Case, k: int = 9) -> DenseLogits | TeacherHidden | TopKLogprobs | SampledTokens:
        if case.target == "dense":
            return DenseLogits(self.teacher)
        if case.target == "hidden":
            return TeacherHidden(self.teacher_hidden, self.teacher_head, logit_scale=1.5, bias=mask_of(self.bias))
        if case.target.startswith("sampled"):
            return draws(self.teacher, 2 * k, case.temperature, mean=case.target == "sampled")
        return top_k(self.teacher, k, case.temperature, rest=case.target == "topk")


def mask_of(bias: Tensor) -> Tensor:
    """−inf where the bias is −inf, else 0."""
    return torch.where(bias.isinf(), bias, 0)


def batch(num_rows: int = 6, vocabulary: int = 97, padding: int = 0, seed: int = 0) -> Batch:
    """A random batch. The last `padding` columns are −inf on both sides; the second row has no label."""
    draw = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    bias = randn(vocabulary)
    bias[vocabulary - padding :] = -torch.inf
    labels = torch.randint(0, vocabulary - padding, (num_rows,), generator=draw)
    labels[1:2] = -100
    return Batch(
        randn(num_rows, 6), randn(vocabulary, 6), bias, randn(num_rows, 5), randn(vocabulary, 5), labels,
        randn(num_rows).abs(),
    )  # fmt: skip


def top_k(logits: Tensor, k: int, temperature: float, *, rest: bool = True) -> TopKLogprobs:
    """Top-k targets of whole logits, in plain torch."""
    logprobs = (logits / temperature).log_softmax(1)
    top, ids = logprobs.topk(k, 1)
    others = logprobs.scatter(1, ids, -torch.inf).logsumexp(1) if rest else None
    return TopKLogprobs(ids, top, others, temperature)


def draws(logits: Tensor, n: int, temperature: float, *, mean: bool = True) -> SampledTokens:
    """n independent draws per row of whole logits, in plain torch; the entries are in no order. The last row has none."""
    logprobs = (logits / temperature).log_softmax(1)
    draw = torch.Generator().manual_seed(1)
    rows = [torch.multinomial(row.exp(), n, replacement=True, generator=draw) for row in logprobs]
    m = min(n, logits.shape[1])
    ids, counts = torch.full((len(rows), m), -1), torch.zeros(len(rows), m, dtype=torch.int64)
    for i, row in enumerate(rows[:-1]):
        found, often = row.unique(return_counts=True)
        ids[i, : len(found)], counts[i, : len(found)] = found.flip(0), often.flip(0)
    drawn = torch.stack([each[row].mean() for each, row in zip(logprobs, rows)])
    return SampledTokens(ids, counts, drawn if mean else None, temperature)


def oracle(case: Case, data: Batch, target: Any, factor: float = 1.0) -> tuple[Any, Tensor]:
    """The output of the oracle, and the gradient of factor · loss with respect to the student's logits [N, V]."""
    student = data.student.clone().requires_grad_()
    output = reference.kd_loss(student, target, labels=data.labels, token_weights=data.weights, **case.keywords)
    (factor * output.loss.sum()).backward()
    return output, student.grad


def assert_same(output: Any, expected: Any, bound: float = 1e-12) -> None:
    """Every field of two KDOutputs agrees within `bound`, absolute below 1 and relative above."""
    for name in ("loss", "kd_loss", "ce_loss", "teacher_mass", "student_mass"):
        value, truth = getattr(output, name), getattr(expected, name)
        error = ((value - truth).abs() / truth.abs().clamp_min(1)).max()
        assert error <= bound, f"{name} is off by {error:.1e}: {value} instead of {truth}"
    assert int(output.num_tokens) == int(expected.num_tokens)


def assert_close(value: Tensor, truth: Tensor, bound: float = 1e-12, what: str = "gradient") -> None:
    assert value.shape == truth.shape, f"{what}: {list(value.shape)} instead of {list(truth.shape)}"
    if value.numel():
        error = (value - truth).abs().max()
        assert error <= bound, f"{what} is off by {error:.1e}"


def sharded(whole: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """A leaf DTensor of this rank's shard, made without communication. As torch cuts them, shards may be uneven or empty."""
    placements = [Shard(dim)]
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole.narrow(dim, min(offset[dim], whole.shape[dim]), shape[dim]).clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
