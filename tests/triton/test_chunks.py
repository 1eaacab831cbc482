"""The losses across tokenizers with interpreted kernels, against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch

from distill_rl.losses import METHODS, DenseLogits, StudentHidden, TeacherHidden, chunk_kd_loss
from distill_rl.losses.kernels import CHUNK_METHODS
from tests.helpers.chunks import assert_gradient, assert_sums, documents, oracle

BOUND = 5e-6
"""fp32 sums of rows of this size, in another order than the oracle's."""
WEIGHTS = (1.7, 0.6)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
@pytest.mark.parametrize("target", ["topk", "topk_no_rest", "dense"])
@pytest.mark.parametrize("method", CHUNK_METHODS)
def test_value_and_gradient_equal_the_oracle(method: str, target: str, divergence: str, temperature: float):
    data = documents()
    keywords = {"method": method, "divergence": divergence, "temperature": temperature, "top_k": 7, "tau": 1.3}
    targets = data.target(target, temperature)
    expected, gradient = oracle(data, targets, WEIGHTS, **keywords)
    student = data.student.float().requires_grad_()
    output = chunk_kd_loss(student, targets, data.chunks, data.bridge, labels=data.labels, backend="triton", **keywords)
    (WEIGHTS[0] * output.kd + WEIGHTS[1] * output.ce).backward()
    assert_sums(output, expected, BOUND)
    assert_gradient(student.grad, gradient, BOUND)


@pytest.mark.parametrize("method", CHUNK_METHODS)
def test_logits_that_are_computed_on_the_way(method: str):
    """Both sides come as hidden states. The output layers are identities, so hidden states are logits."""
    data = documents()
    dense = data.target("dense")
    assert isinstance(dense, DenseLogits)
    expected, gradient = oracle(data, dense, WEIGHTS, method=method, top_k=7)
    hidden, weight = data.student.float().requires_grad_(), torch.eye(53).requires_grad_()
    teacher = TeacherHidden(dense.logits.float(), torch.eye(71), label_logprob=dense.label_logprob)
    output = chunk_kd_loss(
        StudentHidden(hidden, weight), teacher, data.chunks, data.bridge, labels=data.labels, method=method, top_k=7,
        chunk_size=5, backend="triton",
    )  # fmt: skip
    (WEIGHTS[0] * output.kd + WEIGHTS[1] * output.ce).backward()
    assert_sums(output, expected, BOUND)
    assert_gradient(hidden.grad, gradient, BOUND)
    assert_gradient(weight.grad, gradient.T @ data.student, BOUND)


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(CHUNK_METHODS)))
def test_methods_without_kernels_are_refused(method: str):
    data = documents()
    with pytest.raises(ValueError, match="backend: triton has kernels for top-k targets"):
        chunk_kd_loss(
            data.student.float(), data.target("dense"), data.chunks, data.bridge, labels=data.labels, method=method,
            backend="triton",
        )  # fmt: skip
