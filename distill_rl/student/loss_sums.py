"""From the outputs of micro-batches to metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distill_rl.config.schema import TeacherConfig
from distill_rl.observe.metrics import Metric
from distill_rl.parallel.mesh import World
from distill_rl.student.objective import Blend, Objective, ObjectiveOutput
from distill_rl.student.teachers.agreement import SUMS
from distill_rl.student.teachers.asked_tokens import AskedCounts


class LossSums:
    """Losses of several micro-batches, summed on the device in fp64 and read by the host once.

    Args:
        with_agreement: whether the micro-batches' outputs have an `agreement`.
        has_routers: whether the model is a mixture of experts, whose `router` is added.
    """

    def __init__(
        self, num_teachers: int, device: torch.device, with_agreement: bool = False, has_routers: bool = False
    ):
        self._num_teachers, self._has_routers = num_teachers, has_routers
        self._sums = torch.zeros(4 + num_teachers, dtype=torch.float64, device=device)
        """KD, CE, the teacher's mass, the routers' balance, and the KD of every teacher."""
        self._agreement = self._sums.new_zeros(num_teachers, SUMS) if with_agreement else None

    def add(self, output: ObjectiveOutput, router: Tensor | None = None) -> None:
        """Adds a micro-batch's sums, in fp64 and without waiting for the device.

        Args:
            router: summed balance of the routers (`RouterBalance.of`); None: 0.
        """
        balance = torch.zeros_like(output.kd) if router is None else router
        sums = [output.kd, output.ce, output.teacher_mass, balance, *output.kd_per_teacher]
        self._sums += torch.stack([each.to(torch.float64) for each in sums])
        if self._agreement is not None and output.agreement is not None:
            self._agreement += output.agreement

    def add_other_positions(self, world: World) -> None:
        """Adds what the ranks that hold other positions of the same rows have summed: whole rows, on each of them.

        Collective over the sequence-parallel group; does not wait for the device. Once, after the last micro-batch.
        """
        if world.sp_group is None:
            return
        for sums in (self._sums, self._agreement):
            if sums is not None:
                dist.all_reduce(sums, group=world.sp_group)

    @property
    def kd_and_ce(self) -> Tensor:
        """fp64 [2]: this rank's sums of KD and CE."""
        return self._sums[:2]

    @property
    def ce_and_kd_per_teacher(self) -> Tensor:
        """fp64 [1 + teachers]: this rank's sums of CE and of every teacher's KD."""
        return torch.cat([self._sums[1:2], self._sums[4:]])

    def loss(self, blend: Blend) -> Tensor:
        """fp64 scalar: this rank's sum of what is minimised."""
        kd, ce, router = self._sums[0], self._sums[1], self._sums[3]
        return blend.kd * kd + blend.ce * ce + blend.router * router

    def metrics(
        self,
        prefix: str,
        objective: Objective,
        blend: Blend,
        num_labels: int,
        asked: Sequence[AskedCounts] = (),
    ) -> dict[str, Metric]:
        """Returns the means of what was added, by name with `{prefix}/`.

        They are `loss` and `nll_loss`; of a mixture of experts `router_balance`; with teachers `kl_loss`, and
        `teacher_mass` if the first one has the student's tokenizer and is not known by draws, which tell no mass; with several also `kl_loss/NAME` of those that the run
        has not lost; with agreement also `top1_agreement` and `acceptance` where they have a meaning, with several teachers
        one each, `/NAME`. In addition, `tokens` is `num_labels`. If teachers are chosen by row, KD and mass are means over
        what they are asked for, and `taught/NAME` is the share of the labelled tokens that each is asked for. Waits for the
        device, once.

        Args:
            blend: of the step whose micro-batches were added.
            num_labels: this rank's labelled tokens in them: divides the sums, and is the weight of the means.
            asked: per teacher what it is asked for of them; empty: teachers are not chosen by row.
        """
        everything = self._sums if self._agreement is None else torch.cat([self._sums, self._agreement.flatten()])
        sums = everything.tolist()
        kd, ce, mass, router, *kd_per_teacher = (each / max(num_labels, 1) for each in sums[: 4 + self._num_teachers])
        means = {"loss": blend.kd * kd + blend.ce * ce + blend.router * router, "nll_loss": ce}
        if self._has_routers:
            means["router_balance"] = router
        if self._num_teachers:
            means["kl_loss"] = kd
            if objective.cross_tokenizer[0] is None and objective.teachers[0].export != "sampled":
                means["teacher_mass"] = mass
        if self._num_teachers > 1:
            for teacher, value, share in zip(objective.teachers, kd_per_teacher, blend.shares):
                if _is_here(teacher, share):  # otherwise the run has lost it, or it is asked for nothing
                    means[f"kl_loss/{teacher.name}"] = value
        metrics = {f"{prefix}/{name}": Metric(value, "mean", num_labels) for name, value in means.items()}
        if asked:
            of_teachers = self._asked_metrics(objective, blend, num_labels, asked, sums)
            metrics |= {f"{prefix}/{name}": metric for name, metric in of_teachers.items() if name in means}
            metrics |= {
                f"{prefix}/taught/{teacher.name}": Metric(each.num_labels / max(num_labels, 1), "mean", num_labels)
                for teacher, weight, each in zip(objective.teachers, blend.weights, asked)
                if _is_here(teacher, weight)
            }
        metrics |= self._agreement_metrics(prefix, objective, sums[4 + self._num_teachers :])
        return metrics | {f"{prefix}/tokens": Metric(num_labels, "sum")}

    def _asked_metrics(
        self,
        objective: Objective,
        blend: Blend,
        num_labels: int,
        asked: Sequence[AskedCounts],
        sums: Sequence[float],
    ) -> dict[str, Metric]:
        """Returns the metrics that are means over what teachers are asked for, each with the size of that as its weight.

        Args:
            sums: of `_sums`; other arguments as of `metrics`.
        """
        mass, kd = sums[2], sums[4 : 4 + self._num_teachers]
        taught = sum(weight * each.total for weight, each in zip(blend.weights, asked))
        learnt = sum(weight * value for weight, value in zip(blend.weights, kd))
        first = next((i for i, teacher in enumerate(objective.teachers) if _is_here(teacher, blend.weights[i])), 0)
        metrics = {"kl_loss": _mean(learnt, taught), "teacher_mass": _mean(mass, asked[first].num_labels)}
        for teacher, value, each in zip(objective.teachers, kd, asked):
            metrics[f"kl_loss/{teacher.name}"] = _mean(value, each.total)
        return metrics

    def _agreement_metrics(self, prefix: str, objective: Objective, sums: list[float]) -> dict[str, Metric]:
        """Returns what `ObjectiveOutput.agreement` tells of every teacher; of a top k bounds.

        Those that were measured on no row are left out.
        """
        metrics: dict[str, Metric] = {}
        for teacher, start in zip(objective.teachers, range(0, len(sums), SUMS)):
            suffix = f"/{teacher.name}" if self._num_teachers > 1 else ""
            same, compared, high, low, own, least, most, told = sums[start : start + SUMS]
            found = {"top1_agreement": (same, compared), "student_entropy": (own, told)}
            for name, lower, upper in (("acceptance", low, high), ("teacher_entropy", least, most)):
                if teacher.export == "topk":
                    found |= {f"{name}_low": (lower, told), f"{name}_high": (upper, told)}
                else:
                    found[name] = (upper, told)
            for name, (total, count) in found.items():
                if count > 0:
                    metrics[f"{prefix}/{name}{suffix}"] = Metric(total / count, "mean", count)
        return metrics


def _is_here(teacher: TeacherConfig, share: float) -> bool:
    """Whether the run still has a teacher, given its share of the KD."""
    return share > 0 or teacher.weight == 0


def _mean(total: float, size: float) -> Metric:
    """The mean of a sum over items of this size together, which is its weight; 0 without any."""
    return Metric(total / size if size > 0 else 0.0, "mean", size)
