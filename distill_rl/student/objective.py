"""What the student minimises: kd_weight · Σᵢ wᵢ·KDᵢ + ce_weight · CE over one or several teachers.

A teacher with the student's tokenizer is compared token by token, one with another tokenizer chunk by chunk.
Shapes as in `distill_rl.types`; N = R·S tokens of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from distill_rl.config.schema import LossConfig, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.losses import (
    Chunks,
    DenseLogits,
    HiddenStates,
    LearnableProjection,
    VocabularyProjection,
    chunk_kd_loss,
    kd_loss,
)
from distill_rl.losses.core.shards import split
from distill_rl.losses.targets import Teacher, Wire
from distill_rl.models.inputs import to_device
from distill_rl.observe.metrics import Metric
from distill_rl.student.teacher_heads import TeacherHead
from distill_rl.types import ChunkRows

Target = Wire
"""What a teacher said of a micro-batch, as it arrives."""


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """One micro-batch's share; all detached except `loss`. Sums run over the labelled tokens of the micro-batch."""

    loss: Tensor
    """scalar: the micro-batch's share of the mean over the global batch"""
    kd: Tensor
    """scalar: summed KD, teachers weighed by their share, T² included; KD of chunks counts as labels / chunks of the
    global batch, so that dividing by labels gives the mean over chunks"""
    ce: Tensor
    """scalar: summed cross-entropy with the labels, at T = 1"""
    kd_per_teacher: tuple[Tensor, ...]
    teacher_mass: Tensor
    """scalar: summed probability inside the first teacher's top k; 0 without teachers"""


@dataclass(frozen=True, slots=True)
class Blend:
    """How a step weighs its terms; the same for all of its micro-batches."""

    kd: float
    ce: float
    shares: tuple[float, ...]
    """per teacher; they sum to one"""


@dataclass(frozen=True, slots=True)
class _Term:
    """One teacher's part of a micro-batch; sums, detached but for the loss."""

    loss: Tensor
    kd: Tensor
    ce: Tensor
    teacher_mass: Tensor


class Objective(nn.Module):
    """The loss of a student with these settings.

    Teachers' weights are divided by their sum. Cross-entropy comes out of the sweep of the first teacher that is there, so that n
    teachers cost n sweeps; without a teacher it is taken alone.

    Args:
        config: `loss.*`.
        teachers: in the order of their targets; none are used where `loss.kd_weight` is 0.
        cross_tokenizer: per teacher its loss across tokenizers and the bridge between the vocabularies (one to be learnt is
            a parameter of this module), None for one that has the student's tokenizer; empty where all have.
        heads: per teacher its output layer where it sends hidden states, else None; empty where none does.

    Raises:
        ConfigError: no term has a positive weight, or a weight is negative.
    """

    def __init__(
        self,
        config: LossConfig,
        teachers: Sequence[TeacherConfig],
        cross_tokenizer: Sequence[tuple[str, VocabularyProjection | LearnableProjection] | None] = (),
        heads: Sequence[TeacherHead | None] = (),
    ):
        super().__init__()
        self.config = config
        self.teachers = tuple(teachers) if config.kd_weight > 0 else ()
        self.cross_tokenizer = tuple(cross_tokenizer) or (None,) * len(self.teachers)
        self.heads = tuple(heads) or (None,) * len(self.teachers)
        learnt = {str(n): way[1] for n, way in enumerate(self.cross_tokenizer) if way and isinstance(way[1], nn.Module)}
        self.projections = nn.ModuleDict(learnt)
        _check_weights(config, [teacher.weight for teacher in self.teachers])

    @property
    def learnt(self) -> dict[str, LearnableProjection]:
        """Projections that are trained, by their teacher's number."""
        return {name: module for name, module in self.projections.items() if isinstance(module, LearnableProjection)}

    def blend(self, scores: Sequence[float] = (), kd_scale: float = 1.0) -> Blend:
        """The weights of a step.

        Args:
            scores: per teacher, what its share falls with: its mean CE or entropy on the batch (`teachers[].score`);
                infinity: none for a teacher that the run has lost.
            kd_scale: r of `loss.dynamic_scale`, which takes the place of both weights.
        """
        weights = [teacher.weight for teacher in self.teachers]
        if scores:
            weights = [weight * math.exp(min(scores) - score) for weight, score in zip(weights, scores)]
        shares = tuple(weight / sum(weights) for weight in weights)
        if self.config.dynamic_scale == "off" or not shares:
            return Blend(self.config.kd_weight, self.config.ce_weight, shares)
        return Blend(kd_scale, 1.0, shares)

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        targets: Sequence[Target | None],
        num_labels: int,
        chunks: Sequence[ChunkRows | None] = (),
        blend: Blend | None = None,
    ) -> ObjectiveOutput:
        """The loss of one micro-batch.

        Args:
            logits: [R, S, V], a plain tensor or a DTensor Shard(-1); padded columns already −inf.
            labels: int64 [R, S], shifted, IGNORE_INDEX where nothing is learnt.
            targets: one per teacher, rows flattened to [N, …]; None for one that the run has lost, whose share is 0.
            num_labels: labelled tokens of the global batch; the loss is divided by it, here and nowhere else.
            chunks: of these rows, per teacher; for those with another tokenizer.
            blend: of this step; None: the settings' weights.

        Raises:
            ValueError: the number of targets is not that of the teachers; chunks missing, or given for no reason;
                hidden states of a teacher without an output layer.
        """
        if len(targets) != len(self.teachers):
            raise ValueError(f"{len(self.teachers)} teachers need as many targets, got {len(targets)}")
        shared = tuple(chunks) or (None,) * len(targets)
        for teacher, cross, rows in zip(self.teachers, self.cross_tokenizer, shared):
            if (cross is None) != (rows is None):
                raise ValueError(
                    f"teacher {teacher.name}: chunks must be given exactly for a teacher of another tokenizer"
                )
        blend = blend or self.blend()
        main = next((number for number, target in enumerate(targets) if target is not None), 0)
        terms = [
            self._teacher_term(
                logits, labels, target, head, rows, cross, blend.kd * share, ce=ce, denominator=max(num_labels, 1)
            )
            for target, head, rows, cross, share, ce in zip(
                targets or (None,),
                self.heads or (None,),
                shared or (None,),
                self.cross_tokenizer or (None,),
                blend.shares or (0.0,),
                [blend.ce if number == main else 0.0 for number in range(max(len(targets), 1))],
            )
        ]
        return ObjectiveOutput(
            loss=_sum(term.loss for term in terms),
            kd=_sum(term.kd * share for term, share in zip(terms, blend.shares or (0.0,))),
            ce=terms[main].ce,
            kd_per_teacher=tuple(term.kd for term in terms)[: len(self.teachers)],
            teacher_mass=terms[main].teacher_mass,
        )

    def _teacher_term(
        self,
        logits: Tensor,
        labels: Tensor,
        target: Target | None,
        head: TeacherHead | None,
        shared: ChunkRows | None,
        cross: tuple[str, VocabularyProjection | LearnableProjection] | None,
        kd: float,
        ce: float,
        denominator: int,
    ) -> _Term:
        """By whichever loss this teacher takes; `kd` and `ce` are the weights of the two. Zero for one that was lost."""
        if target is None and self.teachers:
            nothing = torch.zeros((), device=labels.device)
            return _Term(nothing, nothing, nothing, nothing)
        if cross is not None and shared is not None and target is not None:
            return self._cross_tokenizer_term(logits, labels, target, head, shared, cross, kd, ce, denominator)
        return self._term(logits, labels, _completed(target, head), kd, ce, denominator)

    def _term(
        self,
        logits: Tensor,
        labels: Tensor,
        target: Teacher | None,
        kd: float,
        ce: float,
        denominator: int,
    ) -> _Term:
        """Token by token; `kd` and `ce` are the weights of the two."""
        factor = kd + ce
        if isinstance(target, DenseLogits):
            target = _with_columns_of(logits, target)
        output = kd_loss(
            logits,
            target,
            labels=labels,
            divergence=self.config.divergence,
            beta=self.config.beta,
            temperature=self.config.temperature,
            tail=self.config.tail,
            kd_ratio=0.0 if target is None else kd / factor if factor > 0 else 1.0,
            reduction="sum",
        )
        assert output.ce_loss is not None, "labels were given"
        return _Term(output.loss * (factor / denominator), output.kd_loss, output.ce_loss, output.teacher_mass)

    def _cross_tokenizer_term(
        self,
        logits: Tensor,
        labels: Tensor,
        target: Target,
        head: TeacherHead | None,
        shared: ChunkRows,
        cross: tuple[str, VocabularyProjection | LearnableProjection],
        kd: float,
        ce: float,
        denominator: int,
    ) -> _Term:
        """Chunk by chunk: KD is a mean over the chunks of the global batch, CE over its labels."""
        method, way = cross
        output = chunk_kd_loss(
            logits,
            _given(head).logits(target) if isinstance(target, HiddenStates) else target,
            flat_chunks(shared, labels.device),
            way() if isinstance(way, nn.Module) else way,
            method=method,
            labels=labels,
            divergence=self.config.divergence,
            beta=self.config.beta,
            temperature=self.config.temperature,
            tail=self.config.tail,
            top_k=self.config.top_k,
            chunk_average=self.config.chunk_average,
            uncommon_top_k=self.config.uncommon_top_k,
            relaxed=self.config.gold_relaxed,
            tau=self.config.alm_tau,
        )
        compared = shared.num_one_to_one if method == "strict" else shared.num_chunks
        per_label = denominator / max(compared, 1)
        loss = output.kd * (kd * per_label / denominator) + output.ce * (ce / denominator)
        return _Term(loss, output.kd.detach() * per_label, output.ce.detach(), output.teacher_mass)


def flat_chunks(rows: ChunkRows, device: torch.device) -> Chunks:
    """Chunks of a micro-batch numbered through, over its flattened rows."""
    counts = rows.student.max(axis=1, initial=-1) + 1
    first = np.cumsum(counts) - counts

    def flattened(side: np.ndarray) -> Tensor:
        return to_device(np.where(side >= 0, side + first[:, None], -1).ravel(), device)

    return Chunks(flattened(rows.student), flattened(rows.teacher), int(counts.sum()))


def _completed(target: Target | None, head: TeacherHead | None) -> Teacher | None:
    return _given(head).attach(target) if isinstance(target, HiddenStates) else target


def _given(head: TeacherHead | None) -> TeacherHead:
    if head is None:
        raise ValueError("hidden states: need the output layer of their teacher (`heads`); got None")
    return head


def _with_columns_of(logits: Tensor, target: DenseLogits) -> DenseLogits:
    """A teacher's whole logits cut, or filled up with −inf, to this rank's columns of the student's.

    Both models know the same tokens; their output layers may be padded differently.
    """
    _, shard = split(logits, None, dim=-1, name="logits")
    missing = max(shard.offset + shard.size - target.logits.shape[-1], 0)
    theirs = nn.functional.pad(target.logits, (0, missing), value=-torch.inf)
    return DenseLogits(theirs[:, shard.offset : shard.offset + shard.size], target.label_logprob)


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum()


def _check_weights(config: LossConfig, weights: Sequence[float]) -> None:
    if min([config.kd_weight, config.ce_weight, *weights]) < 0:
        raise ConfigError(
            "loss weights",
            "none may be negative",
            f"kd {config.kd_weight}, ce {config.ce_weight}, teachers {list(weights)}",
        )
    if (weights and sum(weights) == 0) or (not weights and config.ce_weight == 0):
        raise ConfigError(
            "loss.kd_weight, loss.ce_weight, teachers[].weight",
            "some term must have a positive weight",
            f"kd {config.kd_weight}, ce {config.ce_weight}, {len(weights)} teachers",
        )


class LossSums:
    """Losses of several micro-batches, added up on the device in fp64 and read once."""

    def __init__(self, num_teachers: int, device: torch.device):
        self._num_teachers = num_teachers
        self._sums = torch.zeros(3 + num_teachers, dtype=torch.float64, device=device)

    def add(self, output: ObjectiveOutput) -> None:
        self._sums += torch.stack([output.kd, output.ce, output.teacher_mass, *output.kd_per_teacher]).to(torch.float64)

    @property
    def kd_and_ce(self) -> Tensor:
        """fp64 [2], this rank's sums."""
        return self._sums[:2]

    def metrics(self, prefix: str, objective: Objective, blend: Blend, num_labels: int) -> dict[str, Metric]:
        """Means over this rank's `num_labels` labelled tokens, and weighted by them; `{prefix}/tokens` is their number."""
        kd, ce, mass, *kd_per_teacher = (self._sums / max(num_labels, 1)).tolist()
        means = {"loss": blend.kd * kd + blend.ce * ce, "nll_loss": ce}
        if self._num_teachers:
            means["kl_loss"] = kd
            if objective.cross_tokenizer[0] is None:
                means["teacher_mass"] = mass
        if self._num_teachers > 1:
            told = zip(objective.teachers, kd_per_teacher, blend.shares)
            means |= {f"kl_loss/{t.name}": value for t, value, share in told if share > 0 or t.weight == 0}
        metrics = {f"{prefix}/{name}": Metric(value, "mean", num_labels) for name, value in means.items()}
        return metrics | {f"{prefix}/tokens": Metric(num_labels, "sum")}
