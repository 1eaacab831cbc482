"""The terms of the objective: one teacher's part of a micro-batch, by tokens or by chunks, and CE in the same pass.

`objective` has the formulas. Shapes as there; N = R·S tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distill_rl.config.schema import LossConfig
from distill_rl.losses import DenseLogits, chunk_kd_loss, kd_loss
from distill_rl.losses.core.checks import Backend
from distill_rl.losses.core.logits import Student, columns_of
from distill_rl.losses.targets import Teacher
from distill_rl.student.teachers.asked_tokens import AskedTokens
from distill_rl.student.teachers.chunk_rows import flat_chunks
from distill_rl.student.teachers.projections import CrossTokenizerLoss
from distill_rl.types import ChunkRows

TINY = 1e-300
"""In place of a denominator of 0: what it divides is 0, too."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    student: Student
    labels: Tensor
    num_labels: int
    """Labelled tokens of the global batch, at least 1."""
    own_labels: int | None
    """Labelled tokens of the micro-batch."""


@dataclass(frozen=True, slots=True)
class Term:
    """One teacher's part of a micro-batch: sums, detached except the loss."""

    loss: Tensor
    kd: Tensor
    ce: Tensor
    teacher_mass: Tensor


def token_term(
    config: LossConfig,
    batch: MicroBatch,
    target: Teacher | None,
    kd: float,
    ce: float,
    asked: AskedTokens | None = None,
) -> Term:
    """Compares one teacher token by token, and adds CE in the same pass.

    `kd_loss` blends them as ratio · KD + (1 − ratio) · CE, hence ratio = kd / (kd + ce) and the factor kd + ce. With
    `asked`, kd stands for kd · labels · weight / Wᵢ.

    Args:
        target: None: CE alone.
        kd, ce: weights of the two losses; `ce` is 0 unless all labelled tokens are asked for with one weight.
        asked: None: all labelled tokens with weight 1.

    Returns:
        The loss, kd · ΣKD / Wᵢ + ce · ΣCE / labels of the global batch; and the sums, that of KD with the weights of
        the tokens.
    """
    labels, num_labels, weight = batch.labels, batch.own_labels, 1.0
    if asked is not None:
        labels, num_labels, weight = asked.labels, asked.num_labels, asked.weight
        kd = kd * weight * batch.num_labels / asked.total
    factor = kd + ce
    ratio = kd / factor if factor > 0 else 1.0
    output = kd_loss(
        batch.student,
        target,
        labels=labels,
        divergence=config.divergence,
        beta=config.beta,
        temperature=config.temperature,
        tail=config.tail,
        kd_ratio=0.0 if target is None else ratio,
        token_weights=None if asked is None else asked.weights,
        reduction="sum",
        num_labels=num_labels,
        backend=_backend(config),
    )
    assert output.ce_loss is not None, "labels were given"
    kd_sum = output.kd_loss if asked is None else output.kd_loss * weight
    return Term(output.loss * (factor / batch.num_labels), kd_sum, output.ce_loss, output.teacher_mass)


def chunk_term(
    config: LossConfig,
    batch: MicroBatch,
    target: Teacher,
    rows: ChunkRows,
    cross: CrossTokenizerLoss,
    kd: float,
    ce: float,
    asked: AskedTokens | None,
) -> Term:
    """Compares a teacher of another tokenizer chunk by chunk.

    Args:
        target: over the teacher's whole vocabulary.
        rows: the chunks of the micro-batch's rows.
        cross: the method and the projection between the vocabularies.
        kd, ce: weights of the two losses.
        asked: what it is asked for; None: everything.

    Returns:
        The loss, kd · ΣKD / chunks + ce · ΣCE / labels, both counted over the global batch (with method `strict`
        only chunks of one token on both sides count); and the sums without weights, that of KD times labels /
        chunks. With `asked`, chunks are summed and counted with their weights, and labels with those of the teacher.
    """
    method, projection = cross
    numbers = flat_chunks(rows, batch.labels.device)
    weights = None if asked is None else asked.of_chunks(numbers)
    output = chunk_kd_loss(
        batch.student,
        target,
        numbers,
        projection() if isinstance(projection, nn.Module) else projection,
        method=method,
        labels=batch.labels,
        divergence=config.divergence,
        beta=config.beta,
        temperature=config.temperature,
        tail=config.tail,
        top_k=config.top_k,
        chunk_average=config.chunk_average,
        uncommon_top_k=config.uncommon_top_k,
        relaxed=config.gold_relaxed,
        tau=config.alm_tau,
        reduction="sum" if weights is None else "none",
        backend=_backend(config),
    )
    if asked is None:
        labels_per_chunk = batch.num_labels / max(_num_chunks(method, rows), 1)
        loss = output.kd * (kd * labels_per_chunk / batch.num_labels) + output.ce * (ce / batch.num_labels)
        return Term(loss, output.kd.detach() * labels_per_chunk, output.ce.detach(), output.teacher_mass)
    num_chunks = max(_num_chunks(method, rows), TINY)
    sum_kd = output.kd * asked.weight if weights is None else (output.kd * weights.to(output.kd.dtype)).sum()
    sum_ce = output.ce if weights is None else output.ce.sum()
    loss = sum_kd * (kd / num_chunks) + sum_ce * (ce / batch.num_labels)
    return Term(loss, sum_kd.detach() * (asked.total / num_chunks), sum_ce.detach(), output.teacher_mass)


def _backend(config: LossConfig) -> Backend | None:
    """The implementation of the loss that is asked for; None: kernels where they work."""
    return None if config.backend == "auto" else config.backend


def _num_chunks(method: str, rows: ChunkRows) -> float:
    """The number of chunks of the global batch that a cross-tokenizer loss compares, or the sum of their weights."""
    every, one_to_one = rows.weighted or (rows.num_chunks, rows.num_one_to_one)
    return one_to_one if method == "strict" else every


def is_taught(asked: AskedTokens, rows: ChunkRows | None) -> bool:
    """Whether a teacher is asked for anything in a micro-batch: a token, or a chunk if it is compared by chunks."""
    return asked.num_labels > 0 if rows is None else bool((rows.student >= 0).any())


def carries_ce(asked: AskedTokens | None, rows: ChunkRows | None) -> bool:
    """Whether the pass over the vocabulary for a teacher can have the CE of all labelled tokens.

    The pass for chunks computes it for all of them. The one for tokens leaves out those that the teacher is not asked for,
    and gives KD and CE the same weights.
    """
    if asked is None:
        return True
    return is_taught(asked, rows) and (rows is not None or (asked.is_all and asked.weights is None))


def with_columns_of(student: Student, target: DenseLogits) -> DenseLogits:
    """Returns a teacher's whole logits, cut or padded with −inf to this rank's columns of the student's.

    Both models have the same tokens, but their output layers may be padded differently.
    """
    shard = columns_of(student)
    missing = max(shard.offset + shard.size - target.logits.shape[-1], 0)
    padded = nn.functional.pad(target.logits, (0, missing), value=-torch.inf)
    return DenseLogits(padded[:, shard.offset : shard.offset + shard.size], target.label_logprob)
