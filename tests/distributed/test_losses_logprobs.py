"""Log-probabilities, entropies and top-k targets of sharded logits, and the number of collectives of a loss."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from distill_rl.losses import (
    DenseLogits,
    fused_linear_kd_loss,
    fused_linear_logprobs,
    kd_loss,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
)
from distill_rl.losses.core.shards import split
from tests.helpers.losses import Case, assert_close, batch, sharded
from tests.helpers.ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks

VOCABULARIES = (507, 101, 40, 5, 3, 2)


def compare_logprobs() -> None:
    """Compares streamed and fused log-probabilities and entropies with log_softmax, in value and gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for vocabulary, temperature in itertools.product(VOCABULARIES, (1.0, 2.5)):
        # With 40 columns on four ranks, the last rank has padding only.
        data = batch(5, vocabulary, padding=12 if vocabulary == 40 else vocabulary // 100)
        data.labels[1] = 0
        whole = data.student.requires_grad_()
        logprobs = (whole / temperature).log_softmax(1)
        q = logprobs.exp()
        entropy = -torch.where(q > 0, q * torch.where(q > 0, logprobs, 0), 0).sum(1)
        picked = logprobs.gather(1, data.labels[:, None])[:, 0]
        ((picked + 0.3 * entropy) * data.weights).sum().backward()

        logits = sharded(whole.detach(), mesh, 1).requires_grad_()
        hidden = data.hidden.clone().requires_grad_()
        head, bias = sharded(data.head, mesh, 0).requires_grad_(), sharded(data.bias, mesh, 0)
        keywords = {"temperature": temperature, "return_entropy": True, "chunk_size": 2}
        for values in (
            vocab_parallel_logprobs(logits, data.labels, **keywords),
            fused_linear_logprobs(hidden, head, data.labels, bias=bias, tp_group=mesh.get_group(), **keywords),
        ):
            assert_close(values[0], picked.detach(), what="log-probability")
            assert_close(values[1], entropy.detach(), what="entropy")
            ((values[0] + 0.3 * values[1]) * data.weights).sum().backward()
        assert_close(logits.grad.to_local(), sharded(whole.grad, mesh, 1).to_local())
        assert_close(hidden.grad, whole.grad @ data.head)
        assert_close(head.grad.to_local(), sharded(whole.grad.T @ data.hidden, mesh, 0).to_local())


def compare_topk() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for vocabulary, temperature in itertools.product(VOCABULARIES, (1.0, 2.5)):
        data = batch(5, vocabulary, padding=vocabulary // 100)
        data.labels[1] = 0
        k = min(9, vocabulary - 1)
        logprobs = (data.teacher / temperature).log_softmax(1)
        values, ids = logprobs.topk(k, 1)
        rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
        target = vocab_parallel_topk(
            sharded(data.teacher, mesh, 1), k, labels=data.labels, temperature=temperature, chunk_size=2
        )
        assert torch.equal(target.ids, ids)
        assert target.temperature == temperature
        assert_close(target.logprobs, values, what="log-probabilities")
        assert_close(target.rest_logprob, rest, what="rest")
        assert_close(target.label_logprob, logprobs.gather(1, data.labels[:, None])[:, 0], what="label")

        everything = vocab_parallel_topk(sharded(data.teacher, mesh, 1), vocabulary)
        assert everything.rest_logprob.eq(-torch.inf).all()
        assert_close(everything.logprobs.exp().sum(1), torch.ones(5, dtype=torch.float64))


def count_cover() -> list[bool]:
    """Per vocabulary, whether its shards tile it exactly once."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    tiled = []
    for vocabulary in (*VOCABULARIES, 32003):
        _, shard = split(sharded(torch.zeros(1, vocabulary), mesh, 1), None, dim=-1, name="logits")
        count = torch.zeros(vocabulary)
        count[shard.offset : shard.offset + shard.size] += 1
        owned = (shard.columns(torch.arange(vocabulary)) < shard.size).float()
        assert torch.equal(owned, count)
        dist.all_reduce(count)
        tiled.append(bool((count == 1).all()) and shard.total == vocabulary)
    _, shard = split(torch.zeros(1, 7), dist.group.WORLD, dim=-1, name="logits")
    tiled.append((shard.offset, shard.total) == (7 * rank, 7 * size) or size == 1)
    return tiled


class _Collectives(TorchDispatchMode):
    """Records the names of all collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(function._schema.name.split("::")[1])
        return function(*args, **(kwargs or {}))


def count_collectives() -> dict[str, tuple[list[str], list[str]]]:
    """Case → (collectives of forward, collectives of backward)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data, counts = batch(6, 40), {}
    for case in (
        Case("forward_kl", "dense", "bucket", 1.0),
        Case("reverse_kl", "dense", "bucket", 2.5),
        Case("jsd", "dense", "bucket", 1.0),
        Case("jsd", "topk", "bucket", 1.0),
        Case("forward_kl", "topk", "bucket", 2.5),
    ):
        target = data.target(case)
        target = DenseLogits(sharded(target.logits, mesh, 1)) if isinstance(target, DenseLogits) else target
        student = sharded(data.student, mesh, 1).requires_grad_()
        with _Collectives() as forward:
            output = kd_loss(student, target, labels=data.labels, chunk_size=2, **case.keywords)
        with _Collectives() as backward:
            output.loss.backward()
        counts[f"{case.divergence} {case.target}"] = forward.seen, backward.seen
    hidden = data.hidden.clone().requires_grad_()
    with _Collectives() as both:
        fused_linear_kd_loss(
            hidden,
            sharded(data.head, mesh, 0),
            data.target(case),
            temperature=2.5,
            chunk_size=6,
            tp_group=mesh.get_group(),
        ).loss.backward()
    counts["fused"] = both.seen, []
    return counts


def refuse_placements() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.zeros(4, 8)
    target = vocab_parallel_topk(whole, 2)
    messages = []
    for placements, group in (
        ([Partial(), Replicate()], None),
        ([Shard(1), Shard(1)], None),
        ([Replicate(), Replicate()], dist.group.WORLD),
    ):
        logits = DTensor.from_local(whole, mesh, placements, run_check=False)
        try:
            kd_loss(logits, target, tp_group=group)
        except ValueError as error:
            messages.append(str(error))
    replicated = DTensor.from_local(whole.clone(), mesh, [Replicate(), Replicate()], run_check=False)
    assert_close(kd_loss(replicated, target).loss, torch.tensor(0.0), 1e-6)
    return messages


def test_logprobs_and_entropy_match_log_softmax_and_its_gradient() -> None:
    run_ranks(1, compare_logprobs)
    run_ranks(4, compare_logprobs)


def test_sharded_top_k_matches_the_whole_with_an_exact_rest() -> None:
    run_ranks(2, compare_topk)
    run_ranks(4, compare_topk)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_tile_the_vocabulary_exactly_once(ranks: int) -> None:
    assert all(all(tiled) for tiled in run_ranks(ranks, count_cover))


def test_dense_kl_needs_two_collectives_forward_and_none_backward() -> None:
    counts = run_ranks(2, count_collectives)[0]
    two = ["allreduce_"] * 2
    assert counts["forward_kl dense"] == (two, [])
    assert counts["reverse_kl dense"] == (two, [])
    assert counts["forward_kl topk"] == (two, [])
    assert counts["jsd topk"] == (two, [])
    assert counts["jsd dense"] == (["allreduce_"] * 3, [])
    assert counts["fused"] == (["allreduce_"] * 3, [])  # the third completes the hidden states' gradient


def test_invalid_placements_are_refused() -> None:
    partial, twice, both = run_ranks(4, refuse_placements)[0]
    assert partial.startswith("student_logits: a Partial DTensor must be reduced first")
    assert "sharded over one mesh dimension" in twice
    assert both.startswith("tp_group: a DTensor brings its own group")


def test_an_error_of_one_rank_reaches_the_test() -> None:
    with pytest.raises(RankError, match="k: must lie in"):
        run_ranks(2, compare_bad_k)


def compare_bad_k() -> None:
    vocab_parallel_topk(torch.zeros(2, 3), 4)
