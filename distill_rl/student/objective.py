"""What the student minimises: kd_weight · Σᵢ wᵢ·KDᵢ + ce_weight · CE over one or several teachers.

A teacher with the student's tokenizer is compared token by token, one with another tokenizer chunk by chunk. With L
labels and C chunks in the global batch, a micro-batch contributes

    token by token     (kd · wᵢ · Σ KD(token)  +  ce · Σ CE(token)) / L
    chunk by chunk      kd · wᵢ · Σ KD(chunk) / C  +  ce · Σ CE(token) / L

so that the sum over all micro-batches and ranks is the loss of the global batch, however it is divided.

If teachers are chosen by row, token n has the weight uᵢₙ for teacher i, 0 where that is not asked, and Wᵢ = Σₙ uᵢₙ over the
labels of the global batch. KDᵢ is the mean over what teacher i is asked for, and counts by how much that is:

    KD  =  Σᵢ (wᵢ·Wᵢ / Σⱼ wⱼ·Wⱼ) · KDᵢ          KDᵢ  =  Σₙ uᵢₙ · KDᵢ(token n) / Wᵢ

or by chunks, Σ u · KDᵢ(chunk) / Σ u over the chunks of the global batch. If nothing is taught in a batch, KD is 0.
Shapes as in `distill_rl.types`; N = R·S tokens of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from distill_rl.losses.core.logits import Student, as_tree, student_of
from distill_rl.losses.targets import Teacher
from distill_rl.models.forward import to_device
from distill_rl.student.compared import ComparedTeacher, CrossTokenizer, Target
from distill_rl.types import IGNORE_INDEX, ChunkRows, RankBatch, TeacherPart, TokenWeights

TINY = 1e-300
"""In place of a denominator of 0: what it divides is 0, too."""
SUMS = 8
"""Numbers of `TeacherTerm.agreement`."""


@as_tree
@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """Sums over the labelled tokens of one micro-batch. All but `loss` are detached."""

    loss: Tensor
    """Scalar: the micro-batch's share of the mean over the global batch."""
    kd: Tensor
    """Scalar: summed KD, each teacher weighed by its share, T² included. KD of chunks is multiplied by labels / chunks of
    the global batch, so that division by the labels gives the mean over chunks."""
    ce: Tensor
    """Scalar: summed cross-entropy with the labels, at T = 1."""
    kd_per_teacher: tuple[Tensor, ...]
    """Scalars: each teacher's summed KD, weighted by its weights of the tokens if it is chosen by row. KD of chunks is
    scaled so that division by the (weighted) labels gives the mean over chunks."""
    teacher_mass: Tensor
    """Scalar: summed probability inside the first teacher's top k, of the tokens that it is asked for; 0 without
    teachers."""
    agreement: Tensor | None = None
    """fp64 [teachers, SUMS], if it was asked for (`TeacherTerm.agreement`). Zeros for what has no meaning."""


@dataclass(frozen=True, slots=True)
class Blend:
    """How a step weighs its terms; the same for all of its micro-batches."""

    kd: float
    ce: float
    shares: tuple[float, ...]
    """Per teacher; they sum to one, or are all 0 if no teacher is asked for anything in the batch."""
    router: float = 0.0
    """Weight of the balance of the student's routers (`RouterBalance`)."""
    weights: tuple[float, ...] = ()
    """If teachers are chosen by row: per teacher its share before the size of what it is asked for counts, 0 if the run
    has lost it."""


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """What a micro-batch is compared on, besides the targets."""

    labels: Tensor
    """int64 [R, S], shifted; IGNORE_INDEX where nothing is trained."""
    num_labels: int
    """Labelled tokens of the global batch: the denominator of CE and of KD by tokens, applied in the objective and nowhere
    else. KD by chunks is divided by the number of chunks that `ChunkRows` states."""
    blend: Blend
    """Of this step."""
    teachers: Sequence[TeacherPart] = ()
    """Of these rows, per teacher; weights as wide as the rows or wider."""
    own_labels: int | None = None
    """Labelled tokens of this micro-batch; None: they are counted, which waits for a GPU if the logits are made here."""
    with_agreement: bool = False
    """Also measure how far both sides agree (`ObjectiveOutput.agreement`), in a pass of its own over the vocabulary for
    every teacher."""

    @property
    def denominator(self) -> int:
        return max(self.num_labels, 1)


class Objective(nn.Module):
    """The loss of a student with these settings.

    The weights of the teachers are divided by their sum. The cross-entropy is computed in the pass over the vocabulary
    that the first remaining teacher needs anyway, so n teachers cost n passes. Without teachers it takes a pass alone.

    Args:
        config: `loss.*`.
        teachers: in the order of their targets. None of them is used if `loss.kd_weight` is 0. Learnable projections become
            submodules of this module.
    """

    def __init__(self, config: LossConfig, teachers: Sequence[ComparedTeacher]):
        super().__init__()
        self.config = config
        self.teachers = tuple(teachers) if config.kd_weight > 0 else ()
        self.projections = nn.ModuleDict()
        """The projections that are trained, by the index of their teacher."""
        for i, teacher in enumerate(self.teachers):
            if teacher.cross is not None and isinstance(teacher.cross.projection, nn.Module):
                self.projections[str(i)] = teacher.cross.projection

    def blend(self, scores: Sequence[float] = (), kd_scale: float = 1.0, asked: Sequence[float] | None = None) -> Blend:
        """Returns the weights of a step: the share of each teacher wᵢ ∝ weightᵢ · exp(−scoreᵢ), and those of KD and CE.

        Args:
            scores: per teacher its mean CE or entropy on the batch (`teachers[].score`), infinity for a teacher that
                the run has lost, but not for all. Empty: shares follow from the weights alone.
            kd_scale: weight of KD under `loss.dynamic_scale`, where CE has the weight 1. Ignored if that is off or
                there are no teachers; the configured weights then apply.
            asked: per teacher the summed weights of the labelled tokens of the global batch that it is asked for, by
                which its share is multiplied; None: teachers are not chosen by row.
        """
        weights = [teacher.settings.weight for teacher in self.teachers]
        if scores:
            weights = [weight * math.exp(min(scores) - score) for weight, score in zip(weights, scores)]
        shares = tuple(weight / sum(weights) for weight in weights)
        alone: tuple[float, ...] = ()
        if asked is not None:
            alone = shares
            products = [share * size for share, size in zip(shares, asked)]
            total = sum(products)
            shares = tuple(product / total if total > 0 else 0.0 for product in products)
        if self.config.dynamic_scale == "off" or not shares:
            return Blend(self.config.kd_weight, self.config.ce_weight, shares, self.config.router_weight, alone)
        return Blend(kd_scale, 1.0, shares, self.config.router_weight, alone)

    def num_compared(self, num_labels: int, parts: Sequence[TeacherPart]) -> int:
        """Returns how many labels and chunks of a global batch enter the loss; with 0 its gradient is zero.

        KD with one tokenizer compares labels, KD across tokenizers chunks, and CE labels again.

        Args:
            num_labels: labelled tokens of the global batch.
            parts: one per teacher; each states the numbers of the global batch.
        """
        has_ce = not self.teachers or self.config.ce_weight > 0 or self.config.dynamic_scale != "off"
        count = num_labels if has_ce else 0
        for teacher, part in zip(self.teachers, parts):
            if teacher.settings.weight == 0:
                continue
            if teacher.cross is not None and part.chunks is not None:
                count += part.chunks.num_one_to_one if teacher.cross.method == "strict" else part.chunks.num_chunks
            else:
                count += num_labels if part.weights is None else part.weights.num_labels
        return count

    def forward(self, student: Student, batch: ComparedRows, targets: Sequence[Target | None]) -> ObjectiveOutput:
        """Returns the loss of one micro-batch, with its parts as detached sums.

        Args:
            student: logits [R, S, V], a plain tensor or a DTensor Shard(-1), padded columns already −inf; or hidden
                states with the output layer, whose logits the losses make a chunk at a time.
            targets: one per teacher, rows flattened to [N, …]. None for a teacher that the run has lost; the blend must
                then give it the share 0, and at least one target must remain.

        Raises:
            ValueError: the number of targets is not that of the teachers; chunks are missing or superfluous; or hidden
                states of a teacher without an output layer.
        """
        comparisons = self._comparisons(student, batch, targets)
        # CE takes part in the pass of the first teacher whose pass can have it, and a pass of its own if there is none.
        carrier = next((i for i, each in enumerate(comparisons) if each.can_have_ce), None)
        ce = batch.blend.ce
        carried = [ce if i == carrier else 0.0 for i in range(len(comparisons))]
        terms = [each.term(self.config, student, batch, weight) for each, weight in zip(comparisons, carried)]
        weighed = [term.kd * each.kd_factor(batch) for term, each in zip(terms, comparisons)]
        of_ce = token_term(self.config, student, batch, None, 0.0, ce) if carrier is None else terms[carrier]
        if not terms:
            return ObjectiveOutput(of_ce.loss, of_ce.kd, of_ce.ce, (), of_ce.teacher_mass)
        first = next((i for i, each in enumerate(comparisons) if each.target is not None), 0)
        losses = [term.loss for term in terms] + ([of_ce.loss] if carrier is None else [])
        agreement = [each.agreement(student, batch) for each in comparisons] if batch.with_agreement else []
        return ObjectiveOutput(
            loss=torch.stack(losses).sum(),
            kd=torch.stack(weighed).sum(),
            ce=of_ce.ce,
            kd_per_teacher=tuple(term.kd for term in terms),
            teacher_mass=terms[first].teacher_mass,
            agreement=torch.stack(agreement) if agreement else None,
        )

    def _comparisons(
        self, student: Student, batch: ComparedRows, targets: Sequence[Target | None]
    ) -> list[TeacherTerm]:
        if len(targets) != len(self.teachers):
            raise ValueError(f"{len(self.teachers)} teachers need as many targets, got {len(targets)}")
        found = []
        for teacher, share, part, sent in zip(self.teachers, batch.blend.shares, batch.teachers, targets, strict=True):
            if (teacher.cross is None) != (part.chunks is None):
                rule = "chunks must be given exactly for a teacher of another tokenizer"
                raise ValueError(f"teacher {teacher.settings.name}: {rule}")
            asked = None
            if part.weights is not None:
                assert batch.own_labels is not None, "counted where teachers are chosen by row"
                asked = AskedTokens.of(part.weights, batch.labels, batch.own_labels)
            target = None if sent is None else teacher.with_head(sent)
            if isinstance(target, DenseLogits) and teacher.cross is None:
                target = with_columns_of(student, target)
            found.append(TeacherTerm(share, target, teacher.cross, part.chunks, asked))
        return found


def asked_sizes(batch: RankBatch) -> list[float] | None:
    """Per teacher the summed weights of the tokens of the global batch that it is asked for (`Objective.blend`).

    None if teachers are not chosen by row.
    """
    if not batch.by_row:
        return None
    return [float(batch.num_labels) if part.weights is None else part.weights.total for part in batch.teachers]


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
        # A copy, because the array may be read-only.
        tensor = None if is_even else torch.tensor(of_tokens).to(labels.device, non_blocking=True)
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
class TeacherTerm:
    """A micro-batch beside one teacher."""

    share: float
    """Of the KD (`Blend.shares`)."""
    target: Teacher | None
    """Over this rank's columns of the student's logits, or for chunks over its own vocabulary. None: the run has lost the
    teacher."""
    cross: CrossTokenizer | None
    chunks: ChunkRows | None
    """For a teacher of another tokenizer, as `cross`."""
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

    def term(self, config: LossConfig, student: Student, batch: ComparedRows, ce: float) -> Term:
        """The losses, of which CE has the weight `ce`; zeros if nothing is taught."""
        kd = batch.blend.kd * self.share
        if self.target is None or not self.is_taught:
            zero = torch.zeros((), device=batch.labels.device)
            return Term(zero, zero, zero, zero)
        if self.chunks is not None:
            return self._chunk_term(config, student, batch, kd, ce)
        return token_term(config, student, batch, self.target, kd, ce, self.asked)

    def kd_factor(self, batch: ComparedRows) -> float:
        """By which its KD enters the sum over the labels of the global batch (`ObjectiveOutput.kd`)."""
        return self.share * (1.0 if self.asked is None else batch.denominator / max(self.asked.total, TINY))

    def agreement(self, student: Student, batch: ComparedRows) -> Tensor:
        """How far the student agrees with the teacher, fp64 [SUMS]: what validation measures besides the losses.

        Rows on which both sides' most likely tokens are the same, and the rows compared; the summed acceptance Σ min(p, q),
        or an upper bound of it, and a lower bound; the student's entropy; a lower and an upper bound of the teacher's; and
        the rows that these five are summed over. What has no meaning has zeros.
        """
        if self.target is None or not self.is_taught:
            return torch.zeros(SUMS, dtype=torch.float64, device=batch.labels.device)
        if self.cross is not None and self.chunks is not None:
            return agreement_of_chunks(student, batch.labels, self.target, self.chunks, self.cross.fixed())
        if self.asked is not None:
            return agreement_of_tokens(student, self.asked.labels, self.target, self.asked.num_labels)
        return agreement_of_tokens(student, batch.labels, self.target, batch.own_labels)

    def _chunk_term(self, config: LossConfig, student: Student, batch: ComparedRows, kd: float, ce: float) -> Term:
        """Compares a teacher of another tokenizer chunk by chunk."""
        # The loss is kd · ΣKD / chunks + ce · ΣCE / labels, both counted over the global batch (with method `strict` only chunks of one
        # token on both sides count). The sums have no weights; that of KD is times labels / chunks. With `asked`, chunks are summed and
        # counted with their weights, and labels with those of the teacher.
        assert self.target is not None and self.cross is not None and self.chunks is not None  # noqa: PT018
        numbers, asked = flat_chunks(self.chunks, batch.labels.device), self.asked
        weights = None if asked is None else asked.of_chunks(numbers)
        output = chunk_kd_loss(
            student,
            self.target,
            numbers,
            self.cross.fixed(),
            method=self.cross.method,
            labels=batch.labels,
            relaxed=config.gold_relaxed,
            tau=config.alm_tau,
            reduction="sum" if weights is None else "none",
            **_settings(config, "top_k", "chunk_average", "uncommon_top_k"),
        )
        every, one_to_one = self.chunks.weighted or (self.chunks.num_chunks, self.chunks.num_one_to_one)
        num_chunks = one_to_one if self.cross.method == "strict" else every
        if asked is None:
            labels_per_chunk = batch.denominator / max(num_chunks, 1)
            loss = output.kd * (kd * labels_per_chunk / batch.denominator) + output.ce * (ce / batch.denominator)
            return Term(loss, output.kd.detach() * labels_per_chunk, output.ce.detach(), output.teacher_mass)
        num_chunks = max(num_chunks, TINY)
        sum_kd = output.kd * asked.weight if weights is None else (output.kd * weights.to(output.kd.dtype)).sum()
        sum_ce = output.ce if weights is None else output.ce.sum()
        loss = sum_kd * (kd / num_chunks) + sum_ce * (ce / batch.denominator)
        return Term(loss, sum_kd.detach() * (asked.total / num_chunks), sum_ce.detach(), output.teacher_mass)


def token_term(
    config: LossConfig,
    student: Student,
    batch: ComparedRows,
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
    labels, num_labels, weight, weights = batch.labels, batch.own_labels, 1.0, None
    if asked is not None:
        labels, num_labels, weight, weights = asked.labels, asked.num_labels, asked.weight, asked.weights
        kd = kd * weight * batch.denominator / asked.total
    factor = kd + ce
    ratio = kd / factor if factor > 0 else 1.0
    output = kd_loss(
        student,
        target,
        labels=labels,
        kd_ratio=0.0 if target is None else ratio,
        token_weights=weights,
        reduction="sum",
        num_labels=num_labels,
        **_settings(config),
    )
    assert output.ce_loss is not None, "labels were given"
    kd_sum = output.kd_loss if asked is None else output.kd_loss * weight
    return Term(output.loss * (factor / batch.denominator), kd_sum, output.ce_loss, output.teacher_mass)


def _settings(config: LossConfig, *further: str) -> dict[str, Any]:
    """The keywords that comparisons by tokens and by chunks have in common, and those of `further` names."""
    found = {name: getattr(config, name) for name in ("divergence", "beta", "temperature", "tail", *further)}
    return found | {"backend": None if config.backend == "auto" else config.backend}


def with_columns_of(student: Student, target: DenseLogits) -> DenseLogits:
    """Returns a teacher's whole logits, cut or padded with −inf to this rank's columns of the student's.

    Both models have the same tokens, but their output layers may be padded differently.
    """
    _, shard, _ = student_of(student, None, "student_logits")
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
    top = top_tokens(teacher, teacher_rows)  # −1: an absent entry
    counterparts = projection.to_student[top.clamp_min(0)].masked_fill(top < 0, -1)
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

    def positions(side: np.ndarray) -> np.ndarray:
        inside = np.flatnonzero(single[side])
        return inside[np.argsort(side[inside])]

    return positions(student), positions(teacher)


def _flattened(rows: ChunkRows) -> tuple[np.ndarray, np.ndarray, int]:
    """The chunk of every flattened token of student and teacher, and the number of chunks."""
    # Every row numbers its chunks from 0, and −1 stands for no chunk; in the result they are numbered consecutively
    # over all rows.
    counts = rows.student.max(axis=1, initial=-1) + 1
    first = np.cumsum(counts) - counts
    student, teacher = (np.where(side >= 0, side + first[:, None], -1).ravel() for side in (rows.student, rows.teacher))
    return student, teacher, int(counts.sum())
