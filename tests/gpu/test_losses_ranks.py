"""Losses on CUDA: sharded over NCCL ranks against one device, and peak memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from distill_rl.losses import (
    DenseLogits,
    TeacherHidden,
    fused_linear_kd_loss,
    kd_loss,
    reference,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
)
from tests.helpers.losses import DIVERGENCES, sharded

pytestmark = pytest.mark.gpu

ROWS, VOCABULARY, HIDDEN, K = 64, 32_003, 128, 64
NCCL = {"NCCL_P2P_LEVEL": "SYS", "NCCL_CUMEM_ENABLE": "0"}


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def close(value: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(value, truth.to(value.dtype), atol=1e-5, rtol=1e-4)


def compare_sharded() -> None:
    """Every divergence in fp32, dense and top-k, streamed and fused, with uneven shards."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    hidden, head, teacher = randn(0, ROWS, HIDDEN), randn(1, VOCABULARY, HIDDEN) / 8, 2 * randn(2, ROWS, VOCABULARY)
    labels = torch.arange(ROWS, device="cuda")
    labels[3] = -100
    for divergence in DIVERGENCES:
        for dense in (True, False):
            keywords = {"labels": labels, "divergence": divergence, "temperature": 2.0, "kd_ratio": 0.6}
            top = vocab_parallel_topk(teacher, K, temperature=2.0)
            truth = (hidden.double() @ head.double().T).requires_grad_()
            expected = reference.kd_loss(truth, DenseLogits(teacher) if dense else top, **keywords)
            expected.loss.backward()
            target = DenseLogits(sharded(teacher, mesh, 1)) if dense else top
            logits = sharded(truth.detach().float(), mesh, 1).requires_grad_()
            output = kd_loss(logits, target, **keywords)
            output.loss.backward()
            close(output.loss, expected.loss)
            close(logits.grad.to_local(), sharded(truth.grad, mesh, 1).to_local())
            states, weight = hidden.clone().requires_grad_(), sharded(head, mesh, 0).requires_grad_()
            fused = fused_linear_kd_loss(states, weight, target, chunk_size=24, **keywords)
            fused.loss.backward()
            close(fused.loss, expected.loss)
            close(states.grad, truth.grad @ head.double())
            close(weight.grad.to_local(), sharded(truth.grad.T @ hidden.double(), mesh, 0).to_local())


def _rank(rank: int, ranks: int, port: int, function: Callable[[], None]) -> None:
    os.environ.update(NCCL)  # must be set in the child before NCCL is initialised
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    try:
        function()
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_over_nccl_match_the_oracle(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, args=(ranks, port, compare_sharded), nprocs=ranks)


@pytest.mark.parametrize("kind", ["dense", "topk"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_peak_memory_per_logit(divergence: str, kind: str) -> None:
    """At most 2.5 bytes per logit, including the gradient."""
    rows = 4096
    student, teacher = (randn(seed, rows, VOCABULARY, dtype=torch.bfloat16) for seed in (0, 1))
    target = DenseLogits(teacher) if kind == "dense" else vocab_parallel_topk(teacher, K)
    leaf = student.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kd_loss(leaf, target, divergence=divergence, chunk_size=rows // 64).loss.backward()
    assert torch.cuda.max_memory_allocated() - before <= 2.5 * student.numel()


def test_a_bf16_output_layer_is_accumulated_in_fp32() -> None:
    hidden, head = randn(0, ROWS, HIDDEN, dtype=torch.bfloat16), (randn(1, VOCABULARY, HIDDEN) / 8).bfloat16()
    teacher = TeacherHidden(randn(2, ROWS, 96, dtype=torch.bfloat16), randn(3, VOCABULARY, 96, dtype=torch.bfloat16))
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, head)]
    doubles = [tensor.double().requires_grad_() for tensor in (hidden, head)]
    output = fused_linear_kd_loss(*leaves, teacher, chunk_size=24)
    expected = reference.kd_loss(doubles[0] @ doubles[1].T, teacher)
    output.loss.backward()
    expected.loss.backward()
    assert abs(output.loss - expected.loss) <= 1e-4 * expected.loss
    for leaf, double in zip(leaves, doubles):
        # The gradient of a chunk is rounded to bf16 before the product, and the product again when it is stored.
        assert (leaf.grad.double() - double.grad).norm() <= 6e-3 * double.grad.norm()


def test_streamed_logprobs_match_the_oracle_in_bf16() -> None:
    logits = (2 * randn(0, 512, VOCABULARY)).bfloat16().requires_grad_()
    targets = torch.arange(512, device="cuda")
    values = vocab_parallel_logprobs(logits, targets)
    values.sum().backward()
    exact = logits.detach().double().requires_grad_()
    truth = exact.log_softmax(1).gather(1, targets[:, None])[:, 0]
    truth.sum().backward()
    close(values, truth)
    assert (logits.grad.double() - exact.grad).norm() <= 3e-3 * exact.grad.norm()
