"""The loss on a CUDA device against the fp64 oracle."""

import pytest
import torch

from distill_rl.losses import DenseLogits, kd_loss, reference, vocab_parallel_topk

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


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("target", ["top k", "forward_kl", "reverse_kl"])
def test_both_backends_are_within_rounding_of_the_oracle(target: str, temperature: float, backend: str):
    if backend == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    logits = (2 * torch.randn(64, 128_256, device="cuda")).bfloat16()
    teacher = (2 * torch.randn(64, 128_256, device="cuda")).bfloat16()
    labels = torch.randint(0, 128_256, (64,), device="cuda")
    targets = DenseLogits(teacher)
    if target == "top k":
        targets = vocab_parallel_topk(teacher, 64, temperature=temperature, backend=backend)
    divergence = "forward_kl" if target == "top k" else target
    keywords = {"labels": labels, "divergence": divergence, "temperature": temperature, "kd_ratio": 0.7}
    student, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = kd_loss(student, targets, backend=backend, **keywords)
    expected = reference.kd_loss(exact, targets, **keywords)
    found.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(found.loss.double(), expected.loss, rtol=1e-5, atol=1e-6)
    rounding = (exact.grad.bfloat16().double() - exact.grad).norm()
    assert (student.grad.double() - exact.grad).norm() <= 1.01 * rounding


def test_top_k_kernel_finds_what_torch_finds():
    pytest.importorskip("triton")
    torch.manual_seed(0)
    logits = 2 * torch.randn(64, 262_144, device="cuda")
    found, plain = (vocab_parallel_topk(logits, 64, temperature=0.7, backend=name) for name in ("triton", "eager"))
    assert torch.equal(found.ids, plain.ids)
    torch.testing.assert_close(found.logprobs, plain.logprobs)
    torch.testing.assert_close(found.rest_logprob, plain.rest_logprob)
