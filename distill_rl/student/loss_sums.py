"""From the outputs of micro-batches to metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from distill_rl.observe.metrics import Metric
from distill_rl.student.objective import Blend, Objective, ObjectiveOutput


class LossSums:
    """Losses of several micro-batches, summed on the device in fp64 and read by the host once.

    Args:
        with_agreement: whether the micro-batches' outputs have an `agreement`.
    """

    def __init__(self, num_teachers: int, device: torch.device, with_agreement: bool = False):
        self._num_teachers = num_teachers
        self._sums = torch.zeros(3 + num_teachers, dtype=torch.float64, device=device)
        self._agreement = self._sums.new_zeros(num_teachers, 4) if with_agreement else None

    def add(self, output: ObjectiveOutput) -> None:
        """Adds a micro-batch's sums, in fp64 and without waiting for the device."""
        self._sums += torch.stack([output.kd, output.ce, output.teacher_mass, *output.kd_per_teacher]).to(torch.float64)
        if self._agreement is not None and output.agreement is not None:
            self._agreement += output.agreement

    @property
    def kd_and_ce(self) -> Tensor:
        """fp64 [2]: this rank's sums of KD and CE."""
        return self._sums[:2]

    @property
    def ce_and_kd_per_teacher(self) -> Tensor:
        """fp64 [1 + teachers]: this rank's sums of CE and of every teacher's KD."""
        return torch.cat([self._sums[1:2], self._sums[3:]])

    def metrics(self, prefix: str, objective: Objective, blend: Blend, num_labels: int) -> dict[str, Metric]:
        """Returns the means of what was added, by name with `{prefix}/`.

        They are `loss` and `nll_loss`; with teachers `kl_loss`, and `teacher_mass` if the first one has the student's
        tokenizer; with several also `kl_loss/NAME` of those that the run has not lost; with agreement also
        `top1_agreement` and `acceptance` where they have a meaning, with several teachers one each, `/NAME`. In
        addition, `tokens` is `num_labels`. Waits for the device, once.

        Args:
            blend: of the step whose micro-batches were added.
            num_labels: this rank's labelled tokens in them: divides the sums, and is the weight of the means.
        """
        everything = self._sums if self._agreement is None else torch.cat([self._sums, self._agreement.flatten()])
        sums = everything.tolist()
        kd, ce, mass, *kd_per_teacher = (each / max(num_labels, 1) for each in sums[: 3 + self._num_teachers])
        means = {"loss": blend.kd * kd + blend.ce * ce, "nll_loss": ce}
        if self._num_teachers:
            means["kl_loss"] = kd
            if objective.cross_tokenizer[0] is None:
                means["teacher_mass"] = mass
        if self._num_teachers > 1:
            for teacher, value, share in zip(objective.teachers, kd_per_teacher, blend.shares):
                if share > 0 or teacher.weight == 0:  # otherwise the run has lost it
                    means[f"kl_loss/{teacher.name}"] = value
        metrics = {f"{prefix}/{name}": Metric(value, "mean", num_labels) for name, value in means.items()}
        metrics |= self._agreement_metrics(prefix, objective, sums[3 + self._num_teachers :])
        return metrics | {f"{prefix}/tokens": Metric(num_labels, "sum")}

    def _agreement_metrics(self, prefix: str, objective: Objective, sums: list[float]) -> dict[str, Metric]:
        """Returns `top1_agreement` and `acceptance` of every teacher, from rows of `ObjectiveOutput.agreement`.

        Those that were measured on no row are left out.
        """
        metrics: dict[str, Metric] = {}
        for teacher, start in zip(objective.teachers, range(0, len(sums), 4)):
            suffix = f"/{teacher.name}" if self._num_teachers > 1 else ""
            same, compared, accepted, drafted = sums[start : start + 4]
            for name, total, count in (("top1_agreement", same, compared), ("acceptance", accepted, drafted)):
                if count > 0:
                    metrics[f"{prefix}/{name}{suffix}"] = Metric(total / count, "mean", count)
        return metrics
