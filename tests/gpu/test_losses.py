"""The losses of one vocabulary on a device against the fp64 oracle; test_cross_tokenizer.py has the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from distill_rl.losses import DenseLogits, fused_linear_kd_loss, kd_loss, reference, vocab_parallel_topk
from distill_rl.losses.targets import Teacher
from tests.gpu.conftest import Figures
from tests.gpu.material import largest

# A bf16 gradient is rounded once, by at most 2^-9 of itself; the fused loss also rounds the gradient of its logits before
# the matrix products.
BOUNDS = {"logits": 3e-3, "fused": 1e-2}


@pytest.mark.parametrize("kind", ["dense", "top-k"])
@pytest.mark.parametrize("divergence", reference.LOG_DIVERGENCES)
def test_bf16_gradients_are_within_rounding_of_the_oracle(
    device: torch.device, tiny: bool, figures: Figures, divergence: str, kind: str
) -> None:
    """From logits by every backend, and fused with the output layer, against fp64 on the same rounded inputs."""
    rows, columns = (24, 503) if tiny else (512, 32_003)
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device)

    hidden, weight = normal(rows, 64).bfloat16(), (normal(columns, 64) / 4).bfloat16()
    logits, teacher = (2 * normal(rows, columns)).bfloat16(), 2 * normal(rows, columns)
    labels = torch.randint(0, columns, (rows,), generator=draw).to(device)
    target: Teacher = DenseLogits(teacher) if kind == "dense" else vocab_parallel_topk(teacher, 64, labels=labels)
    keywords = {"labels": labels, "divergence": divergence, "kd_ratio": 0.7}
    truth = _gradients(reference.kd_loss, [logits.double()], target, **keywords)
    for backend in (None, "eager") if device.type == "cuda" else (None,):
        gradients = _gradients(kd_loss, [logits], target, backend=backend, **keywords)
        figures.within("gradient of the logits", _error(gradients, truth), BOUNDS["logits"])
    truth = _gradients(_plain_fused, [hidden.double(), weight.double()], target, **keywords)
    gradients = _gradients(fused_linear_kd_loss, [hidden, weight], target, **keywords)
    figures.within("gradients of hidden states and output layer", _error(gradients, truth), BOUNDS["fused"])


def _plain_fused(states: Tensor, layer: Tensor, target: Teacher, **keywords: Any) -> reference.KDOutput:
    """The reference of the fused loss: logits first, then the plain loss."""
    return reference.kd_loss(states @ layer.T, target, **keywords)


def _gradients(loss: Callable[..., Any], inputs: Sequence[Tensor], target: Teacher, **keywords: Any) -> list[Tensor]:
    """The gradients of copies of the inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    return list(torch.autograd.grad(loss(*leaves, target, **keywords).loss, leaves))


def _error(gradients: list[Tensor], truths: list[Tensor]) -> float:
    """The largest error of several gradients, each in L2 norm relative to that of its truth (fp64)."""
    return largest(
        float((gradient.double().cpu() - truth.cpu()).norm() / truth.norm().cpu().clamp_min(1e-30))
        for gradient, truth in zip(gradients, truths)
    )


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_top_k_kernel_finds_what_torch_finds():
    pytest.importorskip("triton")
    torch.manual_seed(0)
    logits = 2 * torch.randn(64, 262_144, device="cuda")
    found, plain = (vocab_parallel_topk(logits, 64, temperature=0.7, backend=name) for name in ("triton", "eager"))
    assert torch.equal(found.ids, plain.ids)
    torch.testing.assert_close(found.logprobs, plain.logprobs)
    torch.testing.assert_close(found.rest_logprob, plain.rest_logprob)
