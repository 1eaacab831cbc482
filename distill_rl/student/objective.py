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

from distill_rl.config.schema import LossConfig, TeacherConfig
from distill_rl.losses import DenseLogits, HiddenStates
from distill_rl.losses.core.logits import Student, as_tree
from distill_rl.losses.targets import Teacher, Wire
from distill_rl.student.teachers.agreement import SUMS, agreement_of_chunks, agreement_of_tokens
from distill_rl.student.teachers.asked_tokens import AskedTokens
from distill_rl.student.teachers.heads import TeacherHead
from distill_rl.student.teachers.projections import CrossTokenizerLoss
from distill_rl.student.teachers.terms import (
    TINY,
    MicroBatch,
    Term,
    carries_ce,
    chunk_term,
    is_taught,
    token_term,
    with_columns_of,
)
from distill_rl.types import ChunkRows, TokenWeights

Target = Wire
"""A teacher's targets for one micro-batch, as they arrive."""


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
    """fp64 [teachers, SUMS], if it was asked for (`teachers.agreement`). Zeros for what has no meaning."""


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


class Objective(nn.Module):
    """The loss of a student with these settings.

    The weights of the teachers are divided by their sum. The cross-entropy is computed in the pass over the vocabulary
    that the first remaining teacher needs anyway, so n teachers cost n passes. Without teachers it takes a pass alone.

    Args:
        config: `loss.*`.
        teachers: in the order of their targets. None of them is used if `loss.kd_weight` is 0.
        cross_tokenizer: per teacher its cross-tokenizer loss and the projection between the vocabularies (a learnable
            one becomes a submodule of this module), None for a teacher with the student's tokenizer. Empty if all have
            it.
        heads: per teacher its output layer if it sends hidden states, else None. Empty if no teacher does.
    """

    def __init__(
        self,
        config: LossConfig,
        teachers: Sequence[TeacherConfig],
        cross_tokenizer: Sequence[CrossTokenizerLoss | None] = (),
        heads: Sequence[TeacherHead | None] = (),
    ):
        super().__init__()
        self.config = config
        self.teachers = tuple(teachers) if config.kd_weight > 0 else ()
        self.cross_tokenizer = tuple(cross_tokenizer) or (None,) * len(self.teachers)
        self.heads = tuple(heads) or (None,) * len(self.teachers)
        self.projections = nn.ModuleDict()
        """The projections that are trained, by the index of their teacher."""
        for i, loss in enumerate(self.cross_tokenizer):
            if loss is not None and isinstance(loss[1], nn.Module):
                self.projections[str(i)] = loss[1]

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
        weights = [teacher.weight for teacher in self.teachers]
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

    def num_compared(
        self,
        num_labels: int,
        chunks: Sequence[ChunkRows | None] = (),
        token_weights: Sequence[TokenWeights | None] = (),
    ) -> int:
        """Returns how many labels and chunks of a global batch enter the loss; with 0 its gradient is zero.

        KD with one tokenizer compares labels, KD across tokenizers chunks, and CE labels again.

        Args:
            num_labels: labelled tokens of the global batch.
            chunks: as for `forward`; each states the number of the global batch.
            token_weights: of the teachers (`RankBatch.token_weights`).
        """
        has_ce = not self.teachers or self.config.ce_weight > 0 or self.config.dynamic_scale != "off"
        count = num_labels if has_ce else 0
        nothing = (None,) * len(self.teachers)
        for teacher, cross, rows, weights in zip(
            self.teachers, self.cross_tokenizer, tuple(chunks) or nothing, tuple(token_weights) or nothing
        ):
            if teacher.weight == 0:
                continue
            if cross is not None and rows is not None:
                count += rows.num_one_to_one if cross[0] == "strict" else rows.num_chunks
            else:
                count += num_labels if weights is None else weights.num_labels
        return count

    def forward(
        self,
        student: Student,
        labels: Tensor,
        targets: Sequence[Target | None],
        num_labels: int,
        chunks: Sequence[ChunkRows | None] = (),
        blend: Blend | None = None,
        own_labels: int | None = None,
        with_agreement: bool = False,
        asked: Sequence[AskedTokens | None] = (),
    ) -> ObjectiveOutput:
        """Returns the loss of one micro-batch, with its parts as detached sums.

        Args:
            student: logits [R, S, V], a plain tensor or a DTensor Shard(-1), padded columns already −inf; or hidden
                states with the output layer, whose logits the losses make a chunk at a time.
            labels: int64 [R, S], shifted; IGNORE_INDEX where nothing is trained.
            targets: one per teacher, rows flattened to [N, …]. None for a teacher that the run has lost; `blend` must
                then give it the share 0, and at least one target must remain.
            num_labels: labelled tokens of the global batch: the denominator of CE and of KD by tokens, applied here and
                nowhere else. KD by chunks is divided by the number of chunks that `chunks` states.
            chunks: of these rows, per teacher; required for those with another tokenizer, None for the others. Empty:
                all None.
            blend: of this step; None: the weights of the settings.
            own_labels: labelled tokens of this micro-batch; None: they are counted, which waits for a GPU if the logits
                are made here.
            with_agreement: also measure how far both sides agree (`ObjectiveOutput.agreement`), in a pass of its own
                over the vocabulary for every teacher.
            asked: per teacher what it is asked for in this micro-batch, None for all labelled tokens with weight 1;
                `blend` must have been made with the sizes. Empty: all None.

        Raises:
            ValueError: the number of targets is not that of the teachers; chunks are missing or superfluous; or hidden
                states of a teacher without an output layer.
        """
        chunks = self._chunks_of(targets, chunks)
        blend = blend or self.blend()
        batch = MicroBatch(student, labels, max(num_labels, 1), own_labels)
        if not self.teachers:
            term = token_term(self.config, batch, None, 0.0, blend.ce)
            return ObjectiveOutput(term.loss, term.kd, term.ce, (), term.teacher_mass)

        first = next((i for i, target in enumerate(targets) if target is not None), 0)
        parts = tuple(asked) or (None,) * len(targets)
        # CE takes part in the pass of the first teacher whose pass can have it, and a pass of its own if there is none.
        carriers = (i for i, part in enumerate(parts) if targets[i] is not None and carries_ce(part, chunks[i]))
        carrier = next(carriers, first if not asked else None)
        terms = [
            self._term(
                batch, i, target, chunks[i], blend.kd * blend.shares[i], blend.ce if i == carrier else 0.0, parts[i]
            )
            for i, target in enumerate(targets)
        ]
        of_ce = token_term(self.config, batch, None, 0.0, blend.ce) if carrier is None else terms[carrier]
        losses = [term.loss for term in terms] + ([of_ce.loss] if carrier is None else [])
        # The KD of what a teacher is asked for counts as a mean over all labels does (`ObjectiveOutput.kd`).
        scales = [1.0 if part is None else batch.num_labels / max(part.total, TINY) for part in parts]
        return ObjectiveOutput(
            loss=torch.stack(losses).sum(),
            kd=torch.stack(
                [term.kd * (share * scale) for term, share, scale in zip(terms, blend.shares, scales)]
            ).sum(),
            ce=of_ce.ce,
            kd_per_teacher=tuple(term.kd for term in terms),
            teacher_mass=terms[first].teacher_mass,
            agreement=self._agreement(batch, targets, chunks, parts) if with_agreement else None,
        )

    def _chunks_of(
        self, targets: Sequence[Target | None], chunks: Sequence[ChunkRows | None]
    ) -> tuple[ChunkRows | None, ...]:
        """Returns the chunks per teacher; arguments and errors as for `forward`."""
        if len(targets) != len(self.teachers):
            raise ValueError(f"{len(self.teachers)} teachers need as many targets, got {len(targets)}")
        per_teacher = tuple(chunks) or (None,) * len(targets)
        for teacher, cross, rows in zip(self.teachers, self.cross_tokenizer, per_teacher):
            if (cross is None) != (rows is None):
                raise ValueError(
                    f"teacher {teacher.name}: chunks must be given exactly for a teacher of another tokenizer"
                )
        return per_teacher

    def _term(
        self,
        batch: MicroBatch,
        teacher: int,
        target: Target | None,
        rows: ChunkRows | None,
        kd: float,
        ce: float,
        asked: AskedTokens | None,
    ) -> Term:
        """Compares one teacher, by tokens or by chunks; zeros for one that the run has lost, or that is not asked.

        Args:
            teacher: its index.
            rows: its chunks; None for the student's tokenizer.
            kd, ce: weights of the two losses.
            asked: what it is asked for; None: everything.
        """
        cross = self.cross_tokenizer[teacher]
        if target is None or (asked is not None and not is_taught(asked, rows)):
            zero = torch.zeros((), device=batch.labels.device)
            return Term(zero, zero, zero, zero)
        if cross is not None and rows is not None:
            return chunk_term(self.config, batch, self._with_head(target, teacher), rows, cross, kd, ce, asked)
        return token_term(self.config, batch, self._comparable(batch.student, target, teacher), kd, ce, asked)

    def _agreement(
        self,
        batch: MicroBatch,
        targets: Sequence[Target | None],
        chunks: Sequence[ChunkRows | None],
        asked: Sequence[AskedTokens | None],
    ) -> Tensor:
        """Measures how far the student agrees with each teacher: `ObjectiveOutput.agreement`."""
        found: list[Tensor] = []
        for i, (target, rows, cross, part) in enumerate(zip(targets, chunks, self.cross_tokenizer, asked)):
            if target is None or (part is not None and not is_taught(part, rows)):
                found.append(torch.zeros(SUMS, dtype=torch.float64, device=batch.labels.device))
            elif cross is not None and rows is not None:
                teacher, projection = self._with_head(target, i), cross[1]
                fixed = projection() if isinstance(projection, nn.Module) else projection
                found.append(agreement_of_chunks(batch.student, batch.labels, teacher, rows, fixed))
            else:
                teacher = self._comparable(batch.student, target, i)
                labels, count = (batch.labels, batch.own_labels) if part is None else (part.labels, part.num_labels)
                found.append(agreement_of_tokens(batch.student, labels, teacher, count))
        return torch.stack(found)

    def _comparable(self, student: Student, target: Target, teacher: int) -> Teacher:
        """Returns the targets of a teacher with the student's tokenizer, in this rank's columns (logits only)."""
        found = self._with_head(target, teacher)
        return with_columns_of(student, found) if isinstance(found, DenseLogits) else found

    def _with_head(self, target: Target, teacher: int) -> Teacher:
        """Joins hidden states with their teacher's output layer, so that logits are computed a chunk at a time.

        Other targets are returned as they are.

        Args:
            teacher: index of the teacher.

        Raises:
            ValueError: hidden states of a teacher without an output layer.
        """
        if not isinstance(target, HiddenStates):
            return target
        head = self.heads[teacher]
        if head is None:
            raise ValueError("hidden states: need the output layer of their teacher (`heads`); got None")
        return head.attach(target)
