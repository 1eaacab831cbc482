"""The terms of the objective: one teacher's part of a micro-batch, by tokens or by chunks, and CE in the same pass.

`objective` has the formulas. Shapes as there; N = R·S tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from distill_rl.config.schema import LossConfig
from distill_rl.losses import (
    Chunks,
    DenseLogits,
    SampledTokens,
    TopKLogprobs,
    VocabularyProjection,
    chunk_kd_loss,
    kd_loss,
    token_agreement,
)
from distill_rl.losses.agreement import top_tokens
from distill_rl.losses.core.checks import Backend
from distill_rl.losses.core.logits import Student, columns_of
from distill_rl.losses.targets import Teacher
from distill_rl.models.forward import to_device
from distill_rl.student.compared import ComparedTeacher, CrossTokenizer, Target
from distill_rl.types import IGNORE_INDEX, ChunkRows, TokenWeights

TINY = 1e-300
"""In place of a denominator of 0: what it divides is 0, too."""
SUMS = 8
"""Numbers of `agreement`."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a micro-batch."""

    tokens: Tensor
    """int64 [R, S], shifted; IGNORE_INDEX where nothing is trained."""
    num_own: int | None
    """Labelled ones among them; None: not counted."""
    num_global: int
    """Labelled tokens of the global batch, at least 1."""


@dataclass(frozen=True, slots=True)
class AskedTokens:
    """The labelled tokens of a micro-batch that a teacher is asked for, if that is chosen by row."""

    labels: Tensor
    """int64 [R, S]: those of the micro-batch where the teacher is asked, IGNORE_INDEX elsewhere."""
    num_labels: int
    """Of them."""
    is_all: bool
    """Whether they are all labels of the micro-batch."""
    weight: float
    """Of every one of them, if they have one weight; otherwise 1."""
    weights: Tensor | None
    """fp32 [R, S]: of each, if they differ."""
    total: float
    """`TokenWeights.total`, over the global batch."""

    @classmethod
    def of(cls, weights: TokenWeights, labels: Tensor, num_labels: int) -> AskedTokens:
        """Decided on the host, which does not wait for the device.

        Args:
            weights: of the micro-batch's rows, as wide as `labels` or wider.
            labels: int64 [R, S], on the device.
            num_labels: labelled tokens among them.
        """
        of_tokens = weights.of_tokens[:, : labels.shape[1]]
        own = of_tokens[of_tokens > 0]
        is_all, is_even = len(own) == num_labels, bool((own == own[:1]).all())
        if not is_all and len(own):
            kept = torch.from_numpy(of_tokens > 0).to(labels.device, non_blocking=True)
            labels = torch.where(kept, labels, IGNORE_INDEX)
        tensor = None
        if not is_even:
            tensor = torch.tensor(of_tokens).to(labels.device, non_blocking=True)  # a copy: the array may be read-only
        weight = float(own[0]) if is_even and len(own) else 1.0
        return cls(labels, len(own), is_all, weight, tensor, weights.total)

    def of_chunks(self, chunks: Chunks) -> Tensor | None:
        """fp32 [chunks.count], the weight of each chunk; None if all have `weight`.

        A chunk lies within one document, so all of its tokens have its weight.

        Args:
            chunks: of the micro-batch.
        """
        if self.weights is None:
            return None
        inside = chunks.student >= 0
        of_tokens = self.weights.flatten()
        found = of_tokens.new_zeros(chunks.count + 1)  # the last entry is that of tokens in no chunk
        return found.index_copy_(0, torch.where(inside, chunks.student, chunks.count), of_tokens)[: chunks.count]


@dataclass(frozen=True, slots=True)
class Term:
    """One teacher's part of the losses of a micro-batch: sums, detached except the loss."""

    loss: Tensor
    kd: Tensor
    ce: Tensor
    teacher_mass: Tensor


@dataclass(frozen=True, slots=True)
class TeacherComparison:
    """A micro-batch beside one teacher."""

    teacher: ComparedTeacher
    share: float
    """Of the KD (`Blend.shares`)."""
    target: Target | None
    """None: the run has lost the teacher."""
    chunks: ChunkRows | None
    """For a teacher of another tokenizer."""
    asked: AskedTokens | None
    """None: it is asked for all labelled tokens, with weight 1."""

    @property
    def is_taught(self) -> bool:
        """Whether the teacher is asked for anything: a token, or a chunk if it is compared by chunks."""
        if self.target is None or self.asked is None:
            return self.target is not None
        return self.asked.num_labels > 0 if self.chunks is None else bool((self.chunks.student >= 0).any())

    @property
    def can_have_ce(self) -> bool:
        """Whether the pass over the vocabulary for this teacher can have the CE of all labelled tokens.

        The pass for chunks computes it for all of them. The one for tokens leaves out those that the teacher is not asked
        for, and gives KD and CE the same weights.
        """
        if not self.is_taught or self.asked is None:
            return self.is_taught
        return self.chunks is not None or (self.asked.is_all and self.asked.weights is None)

    def term(self, config: LossConfig, student: Student, labels: Labels, kd: float, ce: float) -> Term:
        """The losses, of which KD has the weight kd · share; zeros if nothing is taught."""
        if self.target is None or not self.is_taught:
            zero = torch.zeros((), device=labels.tokens.device)
            return Term(zero, zero, zero, zero)
        if self.teacher.cross is not None and self.chunks is not None:
            target = self.teacher.with_head(self.target)
            return chunk_term(
                config, student, labels, target, self.chunks, self.teacher.cross, kd * self.share, ce, self.asked
            )
        return token_term(config, student, labels, self._comparable(student), kd * self.share, ce, self.asked)

    def kd_factor(self, num_labels: int) -> float:
        """By which its KD enters the sum over the labels of the global batch (`ObjectiveOutput.kd`)."""
        return self.share * (1.0 if self.asked is None else num_labels / max(self.asked.total, TINY))

    def agreement(self, student: Student, labels: Labels) -> Tensor:
        """How far the student agrees with the teacher, fp64 [SUMS]: what validation measures besides the losses.

        Rows on which both sides' most likely tokens are the same, and the rows compared; the summed acceptance Σ min(p, q),
        or an upper bound of it, and a lower bound; the student's entropy; a lower and an upper bound of the teacher's; and
        the rows that these five are summed over. What has no meaning has zeros.
        """
        if self.target is None or not self.is_taught:
            return torch.zeros(SUMS, dtype=torch.float64, device=labels.tokens.device)
        if self.teacher.cross is not None and self.chunks is not None:
            target = self.teacher.with_head(self.target)
            return agreement_of_chunks(student, labels.tokens, target, self.chunks, self.teacher.cross.fixed())
        tokens, count = labels.tokens, labels.num_own
        if self.asked is not None:
            tokens, count = self.asked.labels, self.asked.num_labels
        return agreement_of_tokens(student, tokens, self._comparable(student), count)

    def _comparable(self, student: Student) -> Teacher:
        assert self.target is not None
        target = self.teacher.with_head(self.target)
        return with_columns_of(student, target) if isinstance(target, DenseLogits) else target


def token_term(
    config: LossConfig,
    student: Student,
    labels: Labels,
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
    tokens, num_labels, weight = labels.tokens, labels.num_own, 1.0
    if asked is not None:
        tokens, num_labels, weight = asked.labels, asked.num_labels, asked.weight
        kd = kd * weight * labels.num_global / asked.total
    factor = kd + ce
    ratio = kd / factor if factor > 0 else 1.0
    output = kd_loss(
        student,
        target,
        labels=tokens,
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
    return Term(output.loss * (factor / labels.num_global), kd_sum, output.ce_loss, output.teacher_mass)


def chunk_term(
    config: LossConfig,
    student: Student,
    labels: Labels,
    target: Teacher,
    rows: ChunkRows,
    cross: CrossTokenizer,
    kd: float,
    ce: float,
    asked: AskedTokens | None,
) -> Term:
    """Compares a teacher of another tokenizer chunk by chunk.

    Args:
        target: over the teacher's whole vocabulary.
        rows: the chunks of the micro-batch's rows.
        kd, ce: weights of the two losses.
        asked: what it is asked for; None: everything.

    Returns:
        The loss, kd · ΣKD / chunks + ce · ΣCE / labels, both counted over the global batch (with method `strict`
        only chunks of one token on both sides count); and the sums without weights, that of KD times labels /
        chunks. With `asked`, chunks are summed and counted with their weights, and labels with those of the teacher.
    """
    numbers = flat_chunks(rows, labels.tokens.device)
    weights = None if asked is None else asked.of_chunks(numbers)
    output = chunk_kd_loss(
        student,
        target,
        numbers,
        cross.fixed(),
        method=cross.method,
        labels=labels.tokens,
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
    every, one_to_one = rows.weighted or (rows.num_chunks, rows.num_one_to_one)
    num_chunks = one_to_one if cross.method == "strict" else every
    if asked is None:
        labels_per_chunk = labels.num_global / max(num_chunks, 1)
        loss = output.kd * (kd * labels_per_chunk / labels.num_global) + output.ce * (ce / labels.num_global)
        return Term(loss, output.kd.detach() * labels_per_chunk, output.ce.detach(), output.teacher_mass)
    num_chunks = max(num_chunks, TINY)
    sum_kd = output.kd * asked.weight if weights is None else (output.kd * weights.to(output.kd.dtype)).sum()
    sum_ce = output.ce if weights is None else output.ce.sum()
    loss = sum_kd * (kd / num_chunks) + sum_ce * (ce / labels.num_global)
    return Term(loss, sum_kd.detach() * (asked.total / num_chunks), sum_ce.detach(), output.teacher_mass)


def _backend(config: LossConfig) -> Backend | None:
    """The implementation of the loss that is asked for; None: kernels where they work."""
    return None if config.backend == "auto" else config.backend


def with_columns_of(student: Student, target: DenseLogits) -> DenseLogits:
    """Returns a teacher's whole logits, cut or padded with −inf to this rank's columns of the student's.

    Both models have the same tokens, but their output layers may be padded differently.
    """
    shard = columns_of(student)
    missing = max(shard.offset + shard.size - target.logits.shape[-1], 0)
    padded = nn.functional.pad(target.logits, (0, missing), value=-torch.inf)
    return DenseLogits(padded[:, shard.offset : shard.offset + shard.size], target.label_logprob)


def agreement_of_tokens(student: Student, labels: Tensor, teacher: Teacher, num_labels: int | None) -> Tensor:
    """Compares with a teacher of the student's tokenizer, at every labelled position.

    Acceptance and entropies are those of sampling at temperature 1. Top-k targets of another temperature do not tell them,
    and draws do not either: Σ min(w, q) over their weights w would be too low. The most likely token of a teacher that is known by
    draws is taken to be the one drawn most often.

    Args:
        teacher: over this rank's columns of the student's logits.
        num_labels: labelled positions; None: they are counted.
    """
    known = not isinstance(teacher, SampledTokens)
    if isinstance(teacher, SampledTokens):
        ids = teacher.most_drawn()[:, None]
        teacher = TopKLogprobs(ids, torch.zeros_like(ids, dtype=torch.float32), temperature=teacher.temperature)
    temperature = teacher.temperature if isinstance(teacher, TopKLogprobs) else 1.0
    found = token_agreement(student, teacher, labels=labels, temperature=temperature, num_labels=num_labels)
    count = found.num_tokens
    entropies = found.student_entropy, found.teacher_entropy_low, found.teacher_entropy_high
    sums = found.acceptance, found.acceptance_low, *entropies, count
    told = sums if known and temperature == 1 else (torch.zeros_like(count),) * len(sums)
    return torch.stack([each.double() for each in (found.top1, count, *told)])


def agreement_of_chunks(
    student: Student, labels: Tensor, teacher: Teacher, rows: ChunkRows, projection: VocabularyProjection
) -> Tensor:
    """Compares with a teacher of another tokenizer, in chunks of one token on either side.

    A chunk counts if the teacher's most likely token has a counterpart in the student's vocabulary; otherwise the student
    could not agree. No acceptance: a draft is verified token by token, which takes one tokenizer.

    Args:
        labels: int64 [R, S], for their shape and device.
        teacher: over its own vocabulary.
    """
    student_rows, teacher_rows = (to_device(each, labels.device) for each in one_to_one_rows(rows))
    counterparts = projection.to_student[top_tokens(teacher, teacher_rows)]
    ids = labels.new_zeros(labels.numel()).index_copy_(0, student_rows, counterparts)
    target = TopKLogprobs(ids[:, None], torch.zeros_like(ids[:, None], dtype=torch.float32))
    compared = torch.full_like(ids, IGNORE_INDEX).index_fill_(0, student_rows, 0)
    # Without a look at the values: a row whose only id is −1, no counterpart, is not compared.
    found = token_agreement(student, target, labels=compared, num_labels=len(student_rows), validate=False)
    nothing = torch.zeros_like(found.top1)
    return torch.stack([each.double() for each in (found.top1, found.num_tokens, *[nothing] * (SUMS - 2))])


def flat_chunks(rows: ChunkRows, device: torch.device) -> Chunks:
    """Converts the chunks of a micro-batch from rows to flattened tokens on `device`, numbered over all rows."""
    student, teacher, count = _flattened(rows)
    return Chunks(to_device(student, device), to_device(teacher, device), count)


def one_to_one_rows(rows: ChunkRows) -> tuple[np.ndarray, np.ndarray]:
    """The positions of both sides in chunks of one token on either side: int64 [n], numbers of flattened tokens.

    Position i of either array is of the same chunk.
    """
    student, teacher, count = _flattened(rows)
    sizes = [np.bincount(side[side >= 0], minlength=count) for side in (student, teacher)]
    single = np.append((sizes[0] == 1) & (sizes[1] == 1), False)  # the last entry is that of −1, no chunk
    positions = [np.flatnonzero(single[side]) for side in (student, teacher)]
    ours, theirs = (place[np.argsort(side[place])] for side, place in zip((student, teacher), positions))
    return ours, theirs


def _flattened(rows: ChunkRows) -> tuple[np.ndarray, np.ndarray, int]:
    """The chunk of every flattened token of student and teacher, and the number of chunks."""
    # Every row numbers its chunks from 0, and −1 stands for no chunk; in the result they are numbered consecutively
    # over all rows.
    counts = rows.student.max(axis=1, initial=-1) + 1
    first = np.cumsum(counts) - counts
    student, teacher = (np.where(side >= 0, side + first[:, None], -1).ravel() for side in (rows.student, rows.teacher))
    return student, teacher, int(counts.sum())
