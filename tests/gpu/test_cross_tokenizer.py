"""Cross-tokenizer losses on a device match the fp64 oracle and give the same bits on every call."""

from __future__ import annotations

import pytest
import torch

from distill_rl.losses import METHODS, Chunks, DenseLogits, chunk_kd_loss
from tests.gpu.conftest import Figures
from tests.helpers.chunks import assert_sums, documents, oracle

BOUND = 1e-5
"""fp32: only the order of summation differs."""
SIGNS = 1e-3
"""Bound for ULD: its gradient is made of signs, and of differences smaller than fp32's rounding any sign may come out."""


@pytest.mark.parametrize("average", ["mean", "chain"])
@pytest.mark.parametrize("method", METHODS)
def test_values_and_gradients_match_the_oracle_and_repeat(
    device: torch.device, tiny: bool, figures: Figures, method: str, average: str
) -> None:
    sizes, repeats = ((53, 71), 2) if tiny else ((2003, 3001), 8)
    data = documents(((1, 1), (2, 3), (5, 1), (1, 1), (1, 4)) * repeats, *sizes)
    keywords = {"method": method, "chunk_average": average, "uncommon_top_k": 300}
    target = data.target("dense")
    expected, truth = oracle(data, target, **keywords)
    on_device = DenseLogits(target.logits.to(device), target.label_logprob.to(device))
    chunks = Chunks(data.chunks.student.to(device), data.chunks.teacher.to(device), data.chunks.count)
    projection, labels = data.bridge.to(device), data.labels.to(device)
    gradients = []
    for _ in range(2):
        student = data.student.float().to(device).requires_grad_()
        output = chunk_kd_loss(student, on_device, chunks, projection, labels=labels, chunk_size=16, **keywords)
        (output.kd + output.ce).backward()
        on_cpu = type(output)(*(getattr(output, name).cpu() for name in type(output).__dataclass_fields__))
        assert_sums(on_cpu, expected, 1e-5)
        error = float((student.grad.cpu().double() - truth).norm() / truth.norm())
        figures.within(f"gradient, {method}, {average}", error, SIGNS if method == "uld" else BOUND)
        gradients.append(student.grad)
    if method == "xtoken":  # cuSPARSE does not fix the order of summation
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    else:
        assert torch.equal(*gradients)
