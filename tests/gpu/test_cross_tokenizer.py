"""Cross-tokenizer losses on a CUDA device match the fp64 oracle and give the same bits on every call."""

import pytest
import torch

from distill_rl.losses import METHODS, Chunks, DenseLogits, chunk_kd_loss
from tests.helpers.chunks import assert_gradient, assert_sums, documents, oracle

pytestmark = pytest.mark.gpu

SIGNS = 1e-3
"""Bound for ULD: its gradient is made of signs, and of differences smaller than fp32's rounding any sign may come out."""


@pytest.mark.parametrize("average", ["mean", "chain"])
@pytest.mark.parametrize("method", METHODS)
def test_values_and_gradients_match_the_oracle_and_repeat(method, average):
    data = documents(((1, 1), (2, 3), (5, 1), (1, 1), (1, 4)) * 8, student=2003, teacher=3001)
    keywords = {"method": method, "chunk_average": average, "uncommon_top_k": 300}
    expected, gradient = oracle(data, data.target("dense"), **keywords)
    target = data.target("dense")
    on_device = DenseLogits(target.logits.cuda(), target.label_logprob.cuda())
    chunks = Chunks(data.chunks.student.cuda(), data.chunks.teacher.cuda(), data.chunks.count)
    projection, labels = data.bridge.to("cuda"), data.labels.cuda()
    gradients = []
    for _ in range(2):
        student = data.student.float().cuda().requires_grad_()
        output = chunk_kd_loss(student, on_device, chunks, projection, labels=labels, chunk_size=16, **keywords)
        (output.kd + output.ce).backward()
        on_cpu = type(output)(*(getattr(output, name).cpu() for name in type(output).__dataclass_fields__))
        assert_sums(on_cpu, expected, 1e-5)
        assert_gradient(student.grad.cpu(), gradient, SIGNS if method == "uld" else 1e-5)
        gradients.append(student.grad)
    if method == "xtoken":  # cuSPARSE does not fix the order of summation
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    else:
        assert torch.equal(*gradients)
