"""The loss on a CUDA device against the fp64 oracle."""

import pytest
import torch

from distill_rl.losses import kd_loss, reference, vocab_parallel_topk

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "divergence", ["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "tvd"]
)
def test_bf16_gradients_are_within_rounding_of_the_oracle(divergence):
    torch.manual_seed(0)
    student = (2 * torch.randn(512, 32_003, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, 32_003, (512,), device="cuda")
    target = vocab_parallel_topk(2 * torch.randn(512, 32_003, device="cuda"), 64, labels=labels)
    kd_loss(student, target, labels=labels, divergence=divergence, kd_ratio=0.7).loss.backward()
    exact = student.detach().double().requires_grad_()
    reference.kd_loss(exact, target, labels=labels, divergence=divergence, kd_ratio=0.7).loss.backward()
    assert (student.grad.double() - exact.grad).norm() <= 3e-3 * exact.grad.norm()
