"""Losses against plain fp64 references: one vocabulary, fused with the output layer, and across tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from distill_rl.losses import (
    METHODS,
    Chunks,
    DenseLogits,
    VocabularyProjection,
    chunk_kd_loss,
    fused_linear_kd_loss,
    kd_loss,
    reference,
    reference_chunks,
    vocab_parallel_topk,
)  # fmt: skip
from distill_rl.losses.targets import Teacher
from tests.bench.gpu.engines import random_projection
from tests.gpu.check.material import largest

# A bf16 gradient is rounded once, by at most 2^-9 of itself; the fused loss also rounds the gradient of its logits before
# the matrix products. In fp32 only the order of summation differs.
BOUNDS = {"logits": 3e-3, "fused": 1e-2, "chunks": 1e-5}


def check(device: torch.device, tiny: bool) -> dict[str, float]:
    """Compares the gradients of all losses on this device with the fp64 references.

    Args:
        tiny: small vocabularies and few rows.

    Returns:
        The largest relative error by kind of loss; in fp32 for cross-tokenizer losses, in bf16 for the others.

    Raises:
        AssertionError: an error is above its bound in `BOUNDS`; names the loss.
    """
    rows, columns = (24, 503) if tiny else (512, 32_003)
    draw = torch.Generator().manual_seed(0)
    worst = dict.fromkeys(BOUNDS, 0.0)
    for kind, name, error in [*_same_vocabulary(device, rows, columns, draw), *_two_vocabularies(device, tiny, draw)]:
        assert error <= BOUNDS[kind], f"{name}: gradient off by {error:.1e} of its norm; the bound is {BOUNDS[kind]:g}"
        worst[kind] = max(worst[kind], error)
    return {f"{kind}_gradient_error": error for kind, error in worst.items()}


def _same_vocabulary(
    device: torch.device, rows: int, columns: int, draw: torch.Generator
) -> Iterator[tuple[str, str, float]]:
    """Yields (kind, case, error) of every divergence with dense and top-k targets, from logits and fused, in bf16.

    The error is that of the gradient, relative to the fp64 reference on the same rounded inputs. The kind is `logits`
    or `fused`, a key of BOUNDS.

    Args:
        rows, columns: of the logits.
        draw: generator of the random inputs.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device)

    hidden, weight = normal(rows, 64).bfloat16(), (normal(columns, 64) / 4).bfloat16()
    logits, teacher = (2 * normal(rows, columns)).bfloat16(), 2 * normal(rows, columns)
    labels = torch.randint(0, columns, (rows,), generator=draw).to(device)
    targets: dict[str, Teacher] = {
        "dense": DenseLogits(teacher), "top-k": vocab_parallel_topk(teacher, 64, labels=labels),
    }  # fmt: skip
    backends = (None, "eager") if device.type == "cuda" else (None,)
    for divergence in reference.DIVERGENCES:
        keywords = {"labels": labels, "divergence": divergence, "kd_ratio": 0.7}
        for target_name, target in targets.items():
            name = f"{divergence}, {target_name}"
            truth = _gradients(reference.kd_loss, [logits.double()], target, **keywords)
            for backend in backends:
                gradients = _gradients(kd_loss, [logits], target, backend=backend, **keywords)
                yield "logits", f"{name}, {backend or 'default'} backend", _error(gradients, truth)
            truth = _gradients(_plain_fused, [hidden.double(), weight.double()], target, **keywords)
            gradients = _gradients(fused_linear_kd_loss, [hidden, weight], target, **keywords)
            yield "fused", f"{name}, fused", _error(gradients, truth)


def _plain_fused(states: Tensor, layer: Tensor, target: Teacher, **keywords: Any) -> reference.KDOutput:
    """The reference of the fused loss: logits first, then the plain loss."""
    return reference.kd_loss(states @ layer.T, target, **keywords)


def _two_vocabularies(device: torch.device, tiny: bool, draw: torch.Generator) -> Iterator[tuple[str, str, float]]:
    """Yields (`chunks`, case, error) of every cross-tokenizer method with both chunk averages, in fp32.

    The error is that of the gradient, relative to the fp64 reference. The reference runs on the CPU, the loss on
    `device`.

    Args:
        tiny: smaller vocabularies and fewer chunks.
        draw: generator of the random logits and labels.
    """
    columns, repeats = ((53, 71), 2) if tiny else ((2003, 3001), 8)
    lengths = ((1, 1), (2, 3), (5, 1), (1, 1), (1, 4)) * repeats
    sides = [torch.repeat_interleave(torch.tensor(side)) for side in zip(*lengths)]
    projection = random_projection(*columns)
    logits, teacher_logits = (
        2 * torch.randn(len(side), size, generator=draw, dtype=torch.float64) for side, size in zip(sides, columns)
    )
    labels, teacher_labels = (
        torch.randint(0, size, (len(side),), generator=draw) for side, size in zip(sides, columns)
    )
    label_logprob = teacher_logits.log_softmax(1).gather(1, teacher_labels[:, None])[:, 0]

    def arguments(on: torch.device) -> tuple[DenseLogits, Chunks, VocabularyProjection]:
        chunks = Chunks(sides[0].to(on), sides[1].to(on), len(lengths))
        return DenseLogits(teacher_logits.to(on), label_logprob.to(on)), chunks, projection.to(on)

    expected, tested = arguments(torch.device("cpu")), arguments(device)
    for method in METHODS:
        for average in ("mean", "chain"):
            settings = {"method": method, "chunk_average": average, "uncommon_top_k": 300}
            truth = _gradients(reference_chunks.chunk_kd_loss, [logits], *expected, labels=labels, **settings)
            keywords = settings | {"labels": labels.to(device), "chunk_size": 16}
            gradients = _gradients(chunk_kd_loss, [logits.float().to(device)], *tested, **keywords)
            yield "chunks", f"{method}, {average}", _error(gradients, truth)


def _gradients(loss: Callable[..., Any], inputs: Sequence[Tensor], *arguments: Any, **keywords: Any) -> list[Tensor]:
    """The gradients of copies of `inputs` for the loss of one vocabulary, or for KD + CE across tokenizers.

    Args:
        loss: called with the inputs, then `arguments` and `keywords`.
    """
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = loss(*leaves, *arguments, **keywords)
    total = output.loss if hasattr(output, "loss") else output.kd + output.ce
    return list(torch.autograd.grad(total, leaves))


def _error(gradients: list[Tensor], truths: list[Tensor]) -> float:
    """The largest error of several gradients, each in L2 norm relative to that of its truth (fp64)."""
    return largest(
        float((gradient.double().cpu() - truth.cpu()).norm() / truth.norm().cpu().clamp_min(1e-30))
        for gradient, truth in zip(gradients, truths)
    )
