"""Other implementations of the same losses: as installed, or else by their published formulas."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor

from distill_rl.losses import TopKLogprobs

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits of student and teacher [N, V], labels [N] (−100: ignored) → mean KD over the rows that count."""


def plain_torch(divergence: str = "forward_kl") -> Loss:
    """A loss as one writes it without a library: fp32 copies, two log_softmax, kl_div, a mask. NaN if no row counts.

    Args:
        divergence: `forward_kl`, `jsd` (β = ½) or `reverse_kl`.
    """

    def loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        p, q = F.log_softmax(teacher.float(), -1), F.log_softmax(student.float(), -1)
        if divergence == "jsd":
            m = torch.logaddexp(p, q) - math.log(2)
            terms = 0.5 * (_kl(m, p) + _kl(m, q))
        else:
            terms = _kl(*((q, p) if divergence == "forward_kl" else (p, q)))
        rows = terms.sum(-1)
        counts = labels != -100
        return (rows * counts).sum() / counts.sum()

    return loss


def _kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """The terms of KL(p ‖ q), one per entry of the vocabulary and not summed, from log-probabilities of one shape."""
    return F.kl_div(log_q, log_p, reduction="none", log_target=True)


def trl(beta: float = 0.0) -> tuple[str, Loss]:
    """The name and loss of TRL's generalized JSD (GKD trainer); its formula where TRL is not installed.

    Args:
        beta: 0 is forward KL, 1 reverse KL.
    """
    try:
        from trl.experimental.gkd import GKDTrainer
    except ImportError:
        return "TRL (formula)", lambda student, teacher, labels: _generalized_jsd(student, teacher, labels, beta)
    return f"TRL {importlib.metadata.version('trl')}", lambda student, teacher, labels: GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], labels=labels[None], beta=beta
    )


def _generalized_jsd(student: Tensor, teacher: Tensor, labels: Tensor, beta: float) -> Tensor:
    """β·KL(p‖m) + (1 − β)·KL(q‖m) with m = β·p + (1 − β)·q, from logits; KL(p‖q) at β = 0, KL(q‖p) at β = 1.

    p is the teacher, q the student. The mean is over rows that count; 0 if there are none.
    """
    q, p = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta in (0, 1):
        terms = F.kl_div(*((q, p) if beta == 0 else (p, q)), reduction="none", log_target=True)
    else:
        share = torch.tensor(beta, dtype=q.dtype)
        m = torch.stack([q + torch.log1p(-share), p + share.log()]).logsumexp(0)
        terms = share * F.kl_div(m, p, reduction="none", log_target=True)
        terms = terms + (1 - share) * F.kl_div(m, q, reduction="none", log_target=True)
    counts = labels != -100
    return terms[counts].sum() / counts.sum().clamp_min(1)


def torchtune() -> tuple[str, Loss]:
    """The name and loss of torchtune's ForwardKLLoss; its formula where it is not installed."""
    module = _torchtune_module()
    if module is None:
        return "torchtune (formula)", lambda student, teacher, labels: _cross_entropy_of_teacher(
            student, teacher, labels, student
        )
    loss = module.ForwardKLLoss()
    return f"torchtune {importlib.metadata.version('torchtune')}", lambda student, teacher, labels: loss(
        student, teacher, labels
    )


@cache
def _torchtune_module() -> Any:
    """torchtune's `kd_losses.py` as a module, or None where there is no such file.

    It is loaded without importing the package, which needs dependencies that the losses do not.
    """
    try:
        files = importlib.metadata.files("torchtune") or []
        path = next(file.locate() for file in files if str(file).endswith("modules/loss/kd_losses.py"))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        return None
    spec = importlib.util.spec_from_file_location("torchtune_kd_losses", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def automodel() -> tuple[str, Loss]:
    """The name and formula of NeMo Automodel's KDLoss (#1499), whether it is installed or not.

    Rows that count are selected, then −Σ p·log q with infinite logits of the student left out; 0 if no row counts.
    """

    def loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        counts = labels != -100
        if not counts.any():
            return student.new_zeros(())
        return _cross_entropy_of_teacher(student[counts], teacher[counts], labels[counts], student[counts])

    return "Automodel (formula)", loss


def _cross_entropy_of_teacher(student: Tensor, teacher: Tensor, labels: Tensor, infinite: Tensor) -> Tensor:
    """The mean of −Σ p·log q over the rows that count, which has forward KL's gradient; NaN if there are none.

    Args:
        infinite: logits [N, V]; terms where they are infinite are left out.
    """
    p, q = teacher.softmax(-1, dtype=torch.float32), student.log_softmax(-1, dtype=torch.float32)
    rows = (p * q).masked_fill(infinite.isinf(), 0).sum(-1)
    counts = labels != -100
    return -(rows * counts).sum() / counts.sum()


class StreamedLogprobs(torch.autograd.Function):
    """log q(label) as SkyRL #1806 streams it: softmax of a chunk of rows at a time, recomputed in backward."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:
        """The labels' log-probs [n] from logits [n, V], `chunk` rows at a time."""
        ctx.save_for_backward(logits, labels)
        ctx.chunk = chunk
        parts = [
            rows.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
            for rows, ids in zip(logits.split(chunk), labels.split(chunk))
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradient of the logits, for which the softmax is recomputed `chunk` rows at a time."""
        logits, labels = ctx.saved_tensors
        out = torch.empty_like(logits)
        for target, rows, ids, weight in zip(*(each.split(ctx.chunk) for each in (out, logits, labels, grad))):
            share = rows.float().softmax(-1).mul_(-weight[:, None])
            target.copy_(share.scatter_add_(1, ids[:, None], weight[:, None]))
        return out, None, None


def top_k_kl(student: Tensor, teacher: TopKLogprobs) -> Tensor:
    """The mean over rows of verl's top-k KL: Σ p·(log p − log q) over the teacher's k columns, without the rest.

    log q, over the whole vocabulary, comes from a gather and one logsumexp.

    Args:
        student: logits [N, V].
        teacher: N rows with int64 ids.
    """
    wide = student.float()
    q = wide.gather(1, teacher.ids) - wide.logsumexp(-1, keepdim=True)
    return (teacher.logprobs.exp() * (teacher.logprobs - q)).sum(-1).mean()


def top_k_and_rest_kl(student: Tensor, teacher: TopKLogprobs) -> Tensor:
    """Forward KL over the k columns and, as one more outcome, the rest; as one writes it without a library."""
    q = student.float().log_softmax(-1).gather(-1, teacher.ids)
    rest = torch.log1p(-q.exp().sum(-1).clamp_max(1 - 1e-6))
    assert teacher.rest_logprob is not None
    of_rest = teacher.rest_logprob.exp() * (teacher.rest_logprob - rest)
    return ((teacher.logprobs.exp() * (teacher.logprobs - q)).sum(-1) + of_rest).mean()
