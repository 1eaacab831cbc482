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

import torch
from torch import Tensor, nn

from distill_rl.config.schema import LossConfig
from distill_rl.losses.core.logits import Student, as_tree
from distill_rl.student.compared import ComparedTeacher, Target
from distill_rl.student.terms import AskedTokens, Labels, TeacherComparison, token_term
from distill_rl.types import RankBatch, TeacherPart


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
    """fp64 [teachers, SUMS], if it was asked for (`TeacherComparison.agreement`). Zeros for what has no meaning."""


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
        labels = Labels(batch.labels, batch.own_labels, max(batch.num_labels, 1))
        kd, ce = batch.blend.kd, batch.blend.ce
        comparisons = self._comparisons(batch, targets)
        # CE takes part in the pass of the first teacher whose pass can have it, and a pass of its own if there is none.
        carrier = next((i for i, each in enumerate(comparisons) if each.can_have_ce), None)
        terms = [
            each.term(self.config, student, labels, kd, ce if i == carrier else 0.0)
            for i, each in enumerate(comparisons)
        ]
        of_ce = token_term(self.config, student, labels, None, 0.0, ce) if carrier is None else terms[carrier]
        if not terms:
            return ObjectiveOutput(of_ce.loss, of_ce.kd, of_ce.ce, (), of_ce.teacher_mass)
        first = next((i for i, each in enumerate(comparisons) if each.target is not None), 0)
        losses = [term.loss for term in terms] + ([of_ce.loss] if carrier is None else [])
        weighed = [term.kd * each.kd_factor(labels.num_global) for term, each in zip(terms, comparisons)]
        agreement = [each.agreement(student, labels) for each in comparisons] if batch.with_agreement else []
        return ObjectiveOutput(
            loss=torch.stack(losses).sum(),
            kd=torch.stack(weighed).sum(),
            ce=of_ce.ce,
            kd_per_teacher=tuple(term.kd for term in terms),
            teacher_mass=terms[first].teacher_mass,
            agreement=torch.stack(agreement) if agreement else None,
        )

    def _comparisons(self, batch: ComparedRows, targets: Sequence[Target | None]) -> list[TeacherComparison]:
        if len(targets) != len(self.teachers):
            raise ValueError(f"{len(self.teachers)} teachers need as many targets, got {len(targets)}")
        found = []
        for teacher, share, part, target in zip(
            self.teachers, batch.blend.shares, batch.teachers, targets, strict=True
        ):
            if (teacher.cross is None) != (part.chunks is None):
                rule = "chunks must be given exactly for a teacher of another tokenizer"
                raise ValueError(f"teacher {teacher.settings.name}: {rule}")
            asked = None
            if part.weights is not None:
                assert batch.own_labels is not None, "counted where teachers are chosen by row"
                asked = AskedTokens.of(part.weights, batch.labels, batch.own_labels)
            found.append(TeacherComparison(teacher, share, target, part.chunks, asked))
        return found


def asked_sizes(batch: RankBatch) -> list[float] | None:
    """Per teacher the summed weights of the tokens of the global batch that it is asked for (`Objective.blend`).

    None if teachers are not chosen by row.
    """
    if not batch.by_row:
        return None
    return [float(batch.num_labels) if part.weights is None else part.weights.total for part in batch.teachers]
