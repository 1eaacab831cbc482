"""The kernels on sharded vocabularies: value and gradient equal those of the whole on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distill_rl.losses import DenseLogits, StudentHidden, TeacherHidden, TopKLogprobs, kd_loss, vocab_parallel_topk
from tests.helpers.losses import Case, assert_close, assert_same, batch, oracle, sharded, top_k
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

BOUND = 5e-6
"""fp32 sums of rows of this size, in another order than the oracle's."""
CASES = [
    *(Case(divergence, "dense", "bucket", temperature) for divergence in ("forward_kl", "reverse_kl") for temperature in (1.0, 2.5)),
    *(Case("jsd", "topk", tail, 2.5) for tail in ("bucket", "truncate", "renormalize")),
    Case("forward_kl", "topk", "bucket", 1.0),
    *(Case(divergence, "hidden", "bucket", 2.5) for divergence in ("forward_kl", "reverse_kl")),
]  # fmt: skip


def compare(vocabulary: int, padding: int) -> int:
    """Compares the kernels with the fp64 oracle of the whole, from logits and from hidden states."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = batch(6, vocabulary, padding)
    for case in CASES:
        whole = data.target(case, k=min(9, vocabulary - padding))
        expected, gradient = oracle(case, data, whole)
        if isinstance(whole, DenseLogits):
            target = DenseLogits(sharded(whole.logits.float(), mesh, 1))
        elif isinstance(whole, TeacherHidden):
            layer, mask = (sharded(each.float(), mesh, 0) for each in (whole.lm_head_weight, whole.bias))
            target = TeacherHidden(whole.hidden.float(), layer, logit_scale=1.5, bias=mask)
        else:
            rest = whole.rest_logprob.float()
            target = TopKLogprobs(whole.ids, whole.logprobs.float(), rest, whole.temperature)
        settings = {"labels": data.labels, "token_weights": data.weights.float(), "backend": "triton", **case.keywords}
        student = sharded(data.student.float(), mesh, 1).requires_grad_()
        output = kd_loss(student, target, **settings)
        output.loss.backward()
        assert_same(output, expected, BOUND)
        assert_close(student.grad.to_local(), sharded(gradient, mesh, 1).to_local(), BOUND)
        hidden = data.hidden.float().requires_grad_()
        head, bias = (sharded(each.float(), mesh, 0).requires_grad_() for each in (data.head, data.bias))
        fused = kd_loss(StudentHidden(hidden, head, bias), target, tp_group=mesh.get_group(), chunk_size=4, **settings)
        fused.loss.backward()
        assert_same(fused, expected, BOUND)
        assert_close(hidden.grad, gradient @ data.head, 4 * BOUND)
        assert_close(head.grad.to_local(), sharded(gradient.T @ data.hidden, mesh, 0).to_local(), 4 * BOUND)
    return len(CASES)


def compare_top_k(vocabulary: int, k: int) -> None:
    """The top k of sharded logits is that of the whole, on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    logits = batch(6, vocabulary).teacher
    found = vocab_parallel_topk(sharded(logits.float(), mesh, 1), k, temperature=2.0, backend="triton")
    right = top_k(logits, k, 2.0)
    assert_close(found.logprobs.double(), right.logprobs, BOUND, "log-probabilities")
    assert_close(found.rest_logprob.double(), right.rest_logprob, BOUND, "rest")
    assert torch.equal(found.ids, right.ids)


@pytest.mark.parametrize(("vocabulary", "padding"), [(507, 6), (5, 0), (3, 0)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_kernels_equal_the_whole(world_size: int, vocabulary: int, padding: int):
    assert run_ranks(world_size, compare, vocabulary, padding) == [len(CASES)] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_top_k_equals_the_whole(world_size: int):
    run_ranks(world_size, compare_top_k, 507, 9)
