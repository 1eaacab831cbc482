"""What the student minimises: kd_weight · Σᵢ wᵢ·KDᵢ + ce_weight · CE over one or several teachers.

Shapes as in `distill_rl.types`; N = R·S tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill_rl.config.schema import LossConfig, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.losses import KDOutput, TopKLogprobs, kd_loss
from distill_rl.observe.metrics import Metric


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """One micro-batch's share; all detached except `loss`. Sums run over the labelled tokens of the micro-batch."""

    loss: Tensor
    """scalar: the micro-batch's share of the mean over the global batch"""
    kd: Tensor
    """scalar: summed KD, teachers weighed by their share, T² included"""
    ce: Tensor
    """scalar: summed cross-entropy with the labels, at T = 1"""
    kd_per_teacher: tuple[Tensor, ...]
    teacher_mass: Tensor
    """scalar: summed probability inside the first teacher's top k; 0 without teachers"""


@dataclass(frozen=True, slots=True)
class _Term:
    """One sweep over the student's logits: `factor · (kd_ratio·KD + (1 − kd_ratio)·CE)`."""

    factor: float
    kd_ratio: float
    share: float


class Objective:
    """The loss of a student with these settings; holds no tensor.

    Teachers' weights are divided by their sum. Cross-entropy comes out of the first teacher's sweep, so that n
    teachers cost n sweeps; without a teacher it is taken alone.

    Raises:
        ConfigError: no term has a positive weight, or a weight is negative.
    """

    def __init__(self, config: LossConfig, teachers: Sequence[TeacherConfig]):
        self.config = config
        self.teachers = tuple(teachers) if config.kd_weight > 0 else ()
        self.terms = _terms(config, [teacher.weight for teacher in self.teachers])

    def __call__(
        self, logits: Tensor, labels: Tensor, targets: Sequence[TopKLogprobs], num_labels: int
    ) -> ObjectiveOutput:
        """The loss of one micro-batch.

        Args:
            logits: [R, S, V], a plain tensor or a DTensor Shard(-1); padded columns already −inf.
            labels: int64 [R, S], shifted, IGNORE_INDEX where nothing is learnt.
            targets: one per teacher, rows flattened to [N, …].
            num_labels: labelled tokens of the global batch; the loss is divided by it, here and nowhere else.

        Raises:
            ValueError: the number of targets is not that of the teachers.
        """
        if len(targets) != len(self.teachers):
            raise ValueError(f"{len(self.teachers)} teachers need as many targets, got {len(targets)}")
        denominator = max(num_labels, 1)
        outputs = [self._sweep(logits, labels, *pair) for pair in zip(targets or (None,), self.terms)]
        kd_per_teacher, ce = tuple(output.kd_loss for output in outputs), outputs[0].ce_loss
        assert ce is not None, "labels were given"
        return ObjectiveOutput(
            loss=_sum(output.loss * (term.factor / denominator) for output, term in zip(outputs, self.terms)),
            kd=_sum(kd * term.share for kd, term in zip(kd_per_teacher, self.terms)),
            ce=ce,
            kd_per_teacher=kd_per_teacher[: len(self.teachers)],
            teacher_mass=outputs[0].teacher_mass,
        )

    def _sweep(self, logits: Tensor, labels: Tensor, target: TopKLogprobs | None, term: _Term) -> KDOutput:
        return kd_loss(
            logits,
            target,
            labels=labels,
            divergence=self.config.divergence,
            beta=self.config.beta,
            temperature=self.config.temperature,
            tail=self.config.tail,
            kd_ratio=term.kd_ratio,
            reduction="sum",
        )


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum()


def _terms(config: LossConfig, weights: Sequence[float]) -> tuple[_Term, ...]:
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
    if not weights:
        return (_Term(factor=config.ce_weight, kd_ratio=0.0, share=0.0),)
    terms = []
    for position, weight in enumerate(weights):
        share = weight / sum(weights)
        kd = config.kd_weight * share
        ce = config.ce_weight if position == 0 else 0.0
        terms.append(_Term(factor=kd + ce, kd_ratio=kd / (kd + ce) if kd + ce > 0 else 1.0, share=share))
    return tuple(terms)


class LossSums:
    """Losses of several micro-batches, added up on the device in fp64 and read once."""

    def __init__(self, num_teachers: int, device: torch.device):
        self._num_teachers = num_teachers
        self._sums = torch.zeros(3 + num_teachers, dtype=torch.float64, device=device)

    def add(self, output: ObjectiveOutput) -> None:
        self._sums += torch.stack([output.kd, output.ce, output.teacher_mass, *output.kd_per_teacher]).to(torch.float64)

    def metrics(self, prefix: str, objective: Objective, num_labels: int) -> dict[str, Metric]:
        """Means over this rank's `num_labels` labelled tokens, and weighted by them; `{prefix}/tokens` is their number."""
        kd, ce, mass, *kd_per_teacher = (self._sums / max(num_labels, 1)).tolist()
        weights = objective.config
        means = {"loss": weights.kd_weight * kd + weights.ce_weight * ce, "nll_loss": ce}
        if self._num_teachers:
            means |= {"kl_loss": kd, "teacher_mass": mass}
        if self._num_teachers > 1:
            means |= {f"kl_loss/{t.name}": value for t, value in zip(objective.teachers, kd_per_teacher)}
        metrics = {f"{prefix}/{name}": Metric(value, "mean", num_labels) for name, value in means.items()}
        return metrics | {f"{prefix}/tokens": Metric(num_labels, "sum")}
