"""What the student minimises: kd_weight · Σᵢ wᵢ·KDᵢ + ce_weight · CE over one or several teachers.

A teacher with the student's tokenizer is compared token by token, one with another tokenizer chunk by chunk. With L
labels and C chunks in the global batch, a micro-batch contributes

    token by token     (kd · wᵢ · Σ KD(token)  +  ce · Σ CE(token)) / L
    chunk by chunk      kd · wᵢ · Σ KD(chunk) / C  +  ce · Σ CE(token) / L

so that the sum over all micro-batches and ranks is the loss of the global batch, however it is divided.
Shapes as in `distill_rl.types`; N = R·S tokens of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distill_rl.config.schema import LossConfig, TeacherConfig
from distill_rl.losses import (
    DenseLogits,
    HiddenStates,
    chunk_kd_loss,
    kd_loss,
)
from distill_rl.losses.core.student import Student, columns_of
from distill_rl.losses.core.trees import as_tree
from distill_rl.losses.targets import Teacher, Wire
from distill_rl.student.agreement import agreement_of_chunks, agreement_of_tokens
from distill_rl.student.chunk_rows import flat_chunks
from distill_rl.student.projections import CrossTokenizerLoss
from distill_rl.student.teacher_heads import TeacherHead
from distill_rl.types import ChunkRows

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
    teacher_mass: Tensor
    """Scalar: summed probability inside the first teacher's top k; 0 without teachers."""
    agreement: Tensor | None = None
    """fp64 [teachers, 4], if it was asked for: rows with the same most likely token on both sides, and rows compared;
    summed acceptance, and rows compared. Zeros for what has no meaning."""


@dataclass(frozen=True, slots=True)
class Blend:
    """How a step weighs its terms; the same for all of its micro-batches."""

    kd: float
    ce: float
    shares: tuple[float, ...]
    """Per teacher; they sum to one."""


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    student: Student
    labels: Tensor
    num_labels: int
    """Labelled tokens of the global batch, at least 1."""
    own_labels: int | None
    """Labelled tokens of the micro-batch."""


@dataclass(frozen=True, slots=True)
class _Term:
    """One teacher's part of a micro-batch: sums, detached except the loss."""

    loss: Tensor
    kd: Tensor
    ce: Tensor
    teacher_mass: Tensor


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
        self.backend = None if config.backend == "auto" else config.backend
        self.teachers = tuple(teachers) if config.kd_weight > 0 else ()
        self.cross_tokenizer = tuple(cross_tokenizer) or (None,) * len(self.teachers)
        self.heads = tuple(heads) or (None,) * len(self.teachers)
        self.projections = nn.ModuleDict()
        """The projections that are trained, by the index of their teacher."""
        for i, loss in enumerate(self.cross_tokenizer):
            if loss is not None and isinstance(loss[1], nn.Module):
                self.projections[str(i)] = loss[1]

    def blend(self, scores: Sequence[float] = (), kd_scale: float = 1.0) -> Blend:
        """Returns the weights of a step: the share of each teacher wᵢ ∝ weightᵢ · exp(−scoreᵢ), and those of KD and CE.

        Args:
            scores: per teacher its mean CE or entropy on the batch (`teachers[].score`), infinity for a teacher that
                the run has lost, but not for all. Empty: shares follow from the weights alone.
            kd_scale: weight of KD under `loss.dynamic_scale`, where CE has the weight 1. Ignored if that is off or
                there are no teachers; the configured weights then apply.
        """
        weights = [teacher.weight for teacher in self.teachers]
        if scores:
            weights = [weight * math.exp(min(scores) - score) for weight, score in zip(weights, scores)]
        shares = tuple(weight / sum(weights) for weight in weights)
        if self.config.dynamic_scale == "off" or not shares:
            return Blend(self.config.kd_weight, self.config.ce_weight, shares)
        return Blend(kd_scale, 1.0, shares)

    def num_compared(self, num_labels: int, chunks: Sequence[ChunkRows | None] = ()) -> int:
        """Returns how many labels and chunks of a global batch enter the loss; with 0 its gradient is zero.

        KD with one tokenizer compares labels, KD across tokenizers chunks, and CE labels again.

        Args:
            num_labels: labelled tokens of the global batch.
            chunks: as for `forward`; each states the number of the global batch.
        """
        has_ce = not self.teachers or self.config.ce_weight > 0 or self.config.dynamic_scale != "off"
        count = num_labels if has_ce else 0
        for teacher, cross, rows in zip(
            self.teachers, self.cross_tokenizer, tuple(chunks) or (None,) * len(self.teachers)
        ):
            if teacher.weight > 0:
                count += num_labels if cross is None or rows is None else _num_chunks(cross[0], rows)
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

        Raises:
            ValueError: the number of targets is not that of the teachers; chunks are missing or superfluous; or hidden
                states of a teacher without an output layer.
        """
        chunks = self._chunks_of(targets, chunks)
        blend = blend or self.blend()
        batch = _MicroBatch(student, labels, max(num_labels, 1), own_labels)
        if not self.teachers:
            term = self._token_term(batch, None, 0.0, blend.ce)
            return ObjectiveOutput(term.loss, term.kd, term.ce, (), term.teacher_mass)

        first = next((i for i, target in enumerate(targets) if target is not None), 0)
        terms = [
            self._term(batch, i, target, chunks[i], blend.kd * blend.shares[i], blend.ce if i == first else 0.0)
            for i, target in enumerate(targets)
        ]
        return ObjectiveOutput(
            loss=torch.stack([term.loss for term in terms]).sum(),
            kd=torch.stack([term.kd * share for term, share in zip(terms, blend.shares)]).sum(),
            ce=terms[first].ce,
            kd_per_teacher=tuple(term.kd for term in terms),
            teacher_mass=terms[first].teacher_mass,
            agreement=self._agreement(batch, targets, chunks) if with_agreement else None,
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
        self, batch: _MicroBatch, teacher: int, target: Target | None, rows: ChunkRows | None, kd: float, ce: float
    ) -> _Term:
        """Compares one teacher, by tokens or by chunks; zeros for one that the run has lost.

        Args:
            teacher: its index.
            rows: its chunks; None for the student's tokenizer.
            kd, ce: weights of the two losses.
        """
        cross = self.cross_tokenizer[teacher]
        if target is None:
            zero = torch.zeros((), device=batch.labels.device)
            return _Term(zero, zero, zero, zero)
        if cross is not None and rows is not None:
            return self._chunk_term(batch, self._with_head(target, teacher), rows, cross, kd, ce)
        return self._token_term(batch, self._comparable(batch.student, target, teacher), kd, ce)

    def _token_term(self, batch: _MicroBatch, target: Teacher | None, kd: float, ce: float) -> _Term:
        """Compares one teacher token by token, and adds CE in the same pass.

        `kd_loss` blends them as ratio · KD + (1 − ratio) · CE, hence ratio = kd / (kd + ce) and the factor kd + ce.

        Args:
            target: None: CE alone.
            kd, ce: weights of the two losses.

        Returns:
            The loss, (kd · ΣKD + ce · ΣCE) / labels of the global batch, and the sums without weights.
        """
        factor = kd + ce
        ratio = kd / factor if factor > 0 else 1.0
        output = kd_loss(
            batch.student,
            target,
            labels=batch.labels,
            divergence=self.config.divergence,
            beta=self.config.beta,
            temperature=self.config.temperature,
            tail=self.config.tail,
            kd_ratio=0.0 if target is None else ratio,
            reduction="sum",
            num_labels=batch.own_labels,
            backend=self.backend,
        )
        assert output.ce_loss is not None, "labels were given"
        return _Term(output.loss * (factor / batch.num_labels), output.kd_loss, output.ce_loss, output.teacher_mass)

    def _chunk_term(
        self,
        batch: _MicroBatch,
        target: Teacher,
        rows: ChunkRows,
        cross: CrossTokenizerLoss,
        kd: float,
        ce: float,
    ) -> _Term:
        """Compares a teacher of another tokenizer chunk by chunk.

        Args:
            target: over the teacher's whole vocabulary.
            rows: the chunks of the micro-batch's rows.
            cross: the method and the projection between the vocabularies.
            kd, ce: weights of the two losses.

        Returns:
            The loss, kd · ΣKD / chunks + ce · ΣCE / labels, both counted over the global batch (with method `strict`
            only chunks of one token on both sides count); and the sums without weights, that of KD times labels /
            chunks.
        """
        method, projection = cross
        output = chunk_kd_loss(
            batch.student,
            target,
            flat_chunks(rows, batch.labels.device),
            projection() if isinstance(projection, nn.Module) else projection,
            method=method,
            labels=batch.labels,
            divergence=self.config.divergence,
            beta=self.config.beta,
            temperature=self.config.temperature,
            tail=self.config.tail,
            top_k=self.config.top_k,
            chunk_average=self.config.chunk_average,
            uncommon_top_k=self.config.uncommon_top_k,
            relaxed=self.config.gold_relaxed,
            tau=self.config.alm_tau,
            backend=self.backend,
        )
        labels_per_chunk = batch.num_labels / max(_num_chunks(method, rows), 1)
        loss = output.kd * (kd * labels_per_chunk / batch.num_labels) + output.ce * (ce / batch.num_labels)
        return _Term(loss, output.kd.detach() * labels_per_chunk, output.ce.detach(), output.teacher_mass)

    def _agreement(
        self, batch: _MicroBatch, targets: Sequence[Target | None], chunks: Sequence[ChunkRows | None]
    ) -> Tensor:
        """Measures how far the student agrees with each teacher: `ObjectiveOutput.agreement`."""
        found: list[Tensor] = []
        for i, (target, rows, cross) in enumerate(zip(targets, chunks, self.cross_tokenizer)):
            if target is None:
                found.append(torch.zeros(4, dtype=torch.float64, device=batch.labels.device))
            elif cross is not None and rows is not None:
                teacher, projection = self._with_head(target, i), cross[1]
                fixed = projection() if isinstance(projection, nn.Module) else projection
                found.append(agreement_of_chunks(batch.student, batch.labels, teacher, rows, fixed))
            else:
                teacher = self._comparable(batch.student, target, i)
                found.append(agreement_of_tokens(batch.student, batch.labels, teacher, batch.own_labels))
        return torch.stack(found)

    def _comparable(self, student: Student, target: Target, teacher: int) -> Teacher:
        """Returns the targets of a teacher with the student's tokenizer, in this rank's columns (logits only)."""
        found = self._with_head(target, teacher)
        return _with_columns_of(student, found) if isinstance(found, DenseLogits) else found

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


def _num_chunks(method: str, rows: ChunkRows) -> int:
    """The number of chunks of the global batch that a cross-tokenizer loss compares."""
    return rows.num_one_to_one if method == "strict" else rows.num_chunks


def _with_columns_of(student: Student, target: DenseLogits) -> DenseLogits:
    """Returns a teacher's whole logits, cut or padded with −inf to this rank's columns of the student's.

    Both models have the same tokens, but their output layers may be padded differently.
    """
    shard = columns_of(student)
    missing = max(shard.offset + shard.size - target.logits.shape[-1], 0)
    padded = nn.functional.pad(target.logits, (0, missing), value=-torch.inf)
    return DenseLogits(padded[:, shard.offset : shard.offset + shard.size], target.label_logprob)
