"""Cross-tokenizer losses on sharded student vocabularies: value and gradient equal those of the whole on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distill_rl.losses import ChunkOutput, Chunks, LearnableProjection, StudentHidden, chunk_kd_loss, kd_loss
from tests.helpers.chunks import Documents, assert_gradient, assert_sums, documents, identity, oracle
from tests.helpers.losses import sharded
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

WEIGHTS = (1.7, 0.6)
"""Factors of KD and CE before backward, so that the gradient of neither output is 1."""


@dataclass(frozen=True)
class Case:
    method: str
    kind: str = "dense"
    divergence: str = "forward_kl"
    tail: str = "bucket"
    temperature: float = 1.0
    chunk_average: str = "mean"
    relaxed: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        names = ("method", "divergence", "tail", "temperature", "chunk_average", "relaxed")
        return {name: getattr(self, name) for name in names} | {
            "top_k": 7,
            "uncommon_top_k": 9,
            "tau": 1.3,
            "beta": 0.3,
        }


CASES = (
    Case("hybrid", "topk"),
    Case("hybrid", "topk_no_rest", "reverse_kl", "renormalize", 2.5),
    Case("hybrid", "dense", "jsd", "truncate"),
    Case("alm", "topk", "skewed_forward_kl", temperature=2.5),
    Case("xtoken"),
    Case("xtoken", divergence="reverse_kl", temperature=2.5, chunk_average="chain"),
    Case("xtoken", divergence="jsd", tail="renormalize"),
    Case("gold"),
    Case("gold", divergence="reverse_kl", temperature=2.5, chunk_average="chain"),
    Case("gold", divergence="jsd", relaxed=True),
    Case("hkl", chunk_average="chain"),
    Case("uld", temperature=2.5),
    Case("uld", chunk_average="chain"),
    Case("strict", temperature=2.5),
)


def compare(sizes: tuple[int, int], cases: Sequence[Case], dtype: torch.dtype, bound: float) -> list[ChunkOutput]:
    """Compares uneven DTensor shards with the oracle."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data, outputs = documents(student=sizes[0], teacher=sizes[1]), []
    for i, case in enumerate(cases):
        target = data.target(case.kind, case.temperature, k=min(7, sizes[1]))
        expected, gradient = oracle(data, target, WEIGHTS, **case.keywords)
        student = sharded(data.student.to(dtype), mesh, 1).requires_grad_()
        output = chunk_kd_loss(
            student, target, data.chunks, data.bridge, labels=data.labels, chunk_size=1 + i % 5, **case.keywords
        )
        (WEIGHTS[0] * output.kd + WEIGHTS[1] * output.ce).backward()
        try:
            assert_sums(output, expected, bound)
            local = sharded(gradient, mesh, 1).to_local()
            if local.numel():
                share = local.norm() / gradient.norm()
                assert_gradient(student.grad.to_local(), local, bound / float(share.clamp_min(1e-3)))
        except AssertionError as error:
            raise AssertionError(f"{case} {sizes} {dtype}: {error}") from None
        outputs.append(replace(output, kd=output.kd.detach(), ce=output.ce.detach()))
    return outputs


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-6)])
def test_value_and_gradient_match_the_oracle_on_uneven_shards(ranks: int, dtype: torch.dtype, bound: float) -> None:
    by_rank = run_ranks(ranks, compare, (53, 71), CASES, dtype, bound)
    for outputs in zip(*by_rank):
        for name in ("kd", "ce", "teacher_mass", "student_mass", "num_chunks"):
            assert all(torch.equal(getattr(output, name), getattr(outputs[0], name)) for output in outputs)


@pytest.mark.parametrize("sizes", [(1003, 301), (9, 30)])
def test_large_vocabularies_and_nearly_empty_shards_match_the_oracle(sizes: tuple[int, int]) -> None:
    run_ranks(4, compare, sizes, CASES, torch.float64, 1e-10)


def compare_hidden(cases: Sequence[Case]) -> None:
    """Compares students whose logits are made on the way with the oracle. Their output layer is a sharded identity."""
    mesh, data = init_device_mesh("cpu", (dist.get_world_size(),)), documents()
    for i, case in enumerate(cases):
        target = data.target(case.kind, case.temperature)
        _, gradient = oracle(data, target, WEIGHTS, **case.keywords)
        hidden = data.student.clone().requires_grad_()
        weight = sharded(torch.eye(hidden.shape[1], dtype=hidden.dtype), mesh, 0).requires_grad_()
        output = chunk_kd_loss(
            StudentHidden(hidden, weight), target, data.chunks, data.bridge, labels=data.labels,
            tp_group=mesh.get_group(), chunk_size=1 + i % 5, **case.keywords,
        )  # fmt: skip
        (WEIGHTS[0] * output.kd + WEIGHTS[1] * output.ce).backward()
        try:
            assert_gradient(hidden.grad, gradient, 1e-10)
            local = sharded(gradient.T @ data.student, mesh, 0).to_local()
            assert_gradient(weight.grad.to_local(), local, 1e-9)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_made_on_the_way_give_the_oracles_gradients_on_every_rank(ranks: int) -> None:
    run_ranks(ranks, compare_hidden, CASES)


def plain_shards() -> None:
    """Compares equal plain shards in rank order, with a group, with the oracle."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(list(range(size)))
    data = documents(student=32 * size)
    part = slice(32 * rank, 32 * (rank + 1))
    for case in CASES:
        target = data.target(case.kind, case.temperature)
        expected, gradient = oracle(data, target, WEIGHTS, **case.keywords)
        student = data.student[:, part].clone().requires_grad_()
        output = chunk_kd_loss(
            student.view(1, *student.shape), target, data.chunks, data.bridge, labels=data.labels.view(1, -1),
            tp_group=group, **case.keywords,
        )  # fmt: skip
        (WEIGHTS[0] * output.kd + WEIGHTS[1] * output.ce).backward()
        try:
            assert_sums(output, expected, 1e-10)
            assert_gradient(student.grad, gradient[:, part], 1e-9)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


def test_plain_shards_with_a_group_match_the_oracle() -> None:
    run_ranks(2, plain_shards)


def learned_gradient() -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = documents()
    projection = LearnableProjection(data.bridge)
    output = chunk_kd_loss(
        sharded(data.student, mesh, 1).requires_grad_(), data.target("dense"), data.chunks, projection(),
        method="xtoken", labels=data.labels, top_k=7, chunk_size=3,
    )  # fmt: skip
    output.kd.backward()
    gradient = projection.logits.grad.clone()
    dist.all_reduce(gradient)
    return gradient, output.kd.detach()


@pytest.mark.parametrize("ranks", [2, 4])
def test_learned_projection_gradients_sum_to_that_of_one_rank(ranks: int) -> None:
    ((whole, value),) = run_ranks(1, learned_gradient)
    assert whole.abs().max() > 1e-3
    for gradient, kd in run_ranks(ranks, learned_gradient):
        torch.testing.assert_close(gradient, whole, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(kd, value, rtol=1e-10, atol=0)


def ties(method: str) -> torch.Tensor:
    """This rank's gradient of rounded logits, many of which are equal."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = documents(student=97)
    student = sharded(data.student.round(), mesh, 1).requires_grad_()
    output = chunk_kd_loss(
        student, data.target("dense"), data.chunks, data.bridge, method=method, labels=data.labels, uncommon_top_k=20
    )
    output.kd.backward()
    return student.grad.to_local()


@pytest.mark.parametrize("method", ["gold", "uld"])
def test_ties_are_ranked_alike_for_any_sharding(method: str) -> None:
    (whole,) = run_ranks(1, ties, method)
    parts = run_ranks(4, ties, method)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-12)


def without_chunks() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data: Documents = documents()
    nothing = Chunks(torch.full_like(data.chunks.student, -1), torch.full_like(data.chunks.teacher, -1), 0)
    for method in ("hybrid", "xtoken", "gold", "uld", "alm", "strict"):
        for labels in (data.labels, torch.full_like(data.labels, -100)):
            student = sharded(data.student, mesh, 1).requires_grad_()
            output = chunk_kd_loss(student, data.target("dense"), nothing, data.bridge, method=method, labels=labels)
            (output.kd + output.ce).backward()
            assert float(output.kd) == 0
            assert (float(output.ce) == 0) == bool((labels < 0).all())
            assert student.grad.to_local().isfinite().all()


def test_zero_chunks_or_labels_give_a_connected_zero() -> None:
    run_ranks(2, without_chunks)


def same_tokenizer() -> float:
    """The largest difference from `kd_loss`, which gets the teacher's rows in the order of the student's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = documents(((1, 1),) * 6, 64, 64)
    target = data.target("topk")
    teacher_rows = {int(chunk): row for row, chunk in enumerate(data.chunks.teacher)}
    aligned = target.select(torch.tensor([teacher_rows[int(chunk)] for chunk in data.chunks.student]))
    labels = torch.where(data.chunks.student >= 0, data.labels, -100)
    student, other = (sharded(data.student, mesh, 1).requires_grad_() for _ in range(2))
    plain = kd_loss(student, aligned, labels=labels, reduction="sum", kd_ratio=0.5)
    plain.loss.backward()
    by_chunk = chunk_kd_loss(other, target, data.chunks, identity(64), method="hybrid", labels=labels)
    (0.5 * by_chunk.kd + 0.5 * by_chunk.ce).backward()
    assert torch.equal(other.grad.to_local(), student.grad.to_local())
    return max(float((by_chunk.kd - plain.kd_loss).abs()), float((by_chunk.ce - plain.ce_loss).abs()))


def test_two_copies_of_one_tokenizer_match_kd_loss() -> None:
    assert max(run_ranks(2, same_tokenizer)) < 1e-11
