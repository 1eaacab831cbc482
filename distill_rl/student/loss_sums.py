"""From the outputs of micro-batches to metrics, and to the numbers by which all ranks decide on a step alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distill_rl.observe.metrics import Metric
from distill_rl.parallel.mesh import DP, World
from distill_rl.student.compared import ComparedTeacher
from distill_rl.student.objective import SUMS, Blend, Objective, ObjectiveOutput
from distill_rl.types import IGNORE_INDEX, RankBatch


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
        self.sums = torch.zeros(4 + num_teachers, dtype=torch.float64, device=device)
        """KD, CE, the teacher's mass, the routers' balance, and the KD of every teacher, on this rank."""
        self._agreement = self.sums.new_zeros(num_teachers, SUMS) if with_agreement else None

    def add(self, output: ObjectiveOutput, router: Tensor | None = None) -> None:
        """Adds a micro-batch's sums, in fp64 and without waiting for the device.

        Args:
            router: summed balance of the routers (`RouterBalance.of`); None: 0.
        """
        balance = torch.zeros_like(output.kd) if router is None else router
        sums = [output.kd, output.ce, output.teacher_mass, balance, *output.kd_per_teacher]
        self.sums += torch.stack([each.to(torch.float64) for each in sums])
        if self._agreement is not None and output.agreement is not None:
            self._agreement += output.agreement

    def add_other_positions(self, world: World) -> None:
        """Adds what the ranks that hold other positions of the same rows have summed: whole rows, on each of them.

        Collective over the sequence-parallel group; does not wait for the device. Once, after the last micro-batch.
        """
        if world.sp_group is None:
            return
        for sums in (self.sums, self._agreement):
            if sums is not None:
                dist.all_reduce(sums, group=world.sp_group)

    def metrics(self, prefix: str, objective: Objective, blend: Blend, batch: RankBatch) -> dict[str, Metric]:
        """Returns the means of what was added, by name with `{prefix}/`.

        They are `loss` and `nll_loss`; of a mixture of experts `router_balance`; with teachers `kl_loss`, and
        `teacher_mass` if the first one has the student's tokenizer and is not known by draws, which tell no mass; with several also `kl_loss/NAME` of those that the run
        has not lost; with agreement also `top1_agreement` and `acceptance` where they have a meaning, with several teachers
        one each, `/NAME`. In addition, `tokens` is the number of labelled tokens. If teachers are chosen by row, KD and mass
        are means over what they are asked for, and `taught/NAME` is the share of the labelled tokens that each is asked for.
        Waits for the device, once.

        Args:
            blend: of the step whose micro-batches were added.
            batch: this rank's rows in them. Their labelled tokens divide the sums, and are the weight of the means.
        """
        num_labels = int(np.count_nonzero(batch.rows.labels != IGNORE_INDEX))
        everything = self.sums if self._agreement is None else torch.cat([self.sums, self._agreement.flatten()])
        sums = everything.tolist()
        kd, ce, mass, router = (each / max(num_labels, 1) for each in sums[:4])
        teachers = self._of_teachers(objective, blend, batch, num_labels, sums[4:])
        means = {"loss": blend.kd * kd + blend.ce * ce + blend.router * router, "nll_loss": ce}
        if self._has_routers:
            means["router_balance"] = router
        if teachers:
            means["kl_loss"] = kd
            if teachers[0].teacher.cross is None and teachers[0].teacher.settings.export != "sampled":
                means["teacher_mass"] = mass
        if len(teachers) > 1:
            # One with the share 0 is lost to the run, or asked for nothing.
            means |= {each.kl_name: each.kd / max(num_labels, 1) for each in teachers if each.is_here(each.share)}
        metrics = {name: Metric(value, "mean", num_labels) for name, value in means.items()}
        if batch.by_row:
            asked = _means_of_asked(teachers, sums[2])
            metrics |= {name: metric for name, metric in asked.items() if name in means}
            taught = {each.teacher.settings.name: each.num_asked for each in teachers if each.is_here(each.weight)}
            for name, count in taught.items():
                metrics[f"taught/{name}"] = Metric(count / max(num_labels, 1), "mean", num_labels)
        for each in teachers:
            suffix = f"/{each.teacher.settings.name}" if len(teachers) > 1 else ""
            metrics |= {f"{name}{suffix}": metric for name, metric in each.agreement_metrics().items()}
        metrics["tokens"] = Metric(num_labels, "sum")
        return {f"{prefix}/{name}": metric for name, metric in metrics.items()}

    def _of_teachers(
        self, objective: Objective, blend: Blend, batch: RankBatch, num_labels: int, sums: list[float]
    ) -> list[_TeacherSums]:
        found = []
        for i, (teacher, part) in enumerate(zip(objective.teachers, batch.teachers)):
            agreement = sums[self._num_teachers + i * SUMS : self._num_teachers + (i + 1) * SUMS]
            size, num_asked = float(num_labels), num_labels
            if part.weights is not None:
                of_tokens = part.weights.of_tokens
                size, num_asked = float(of_tokens.sum(dtype=np.float64)), int(np.count_nonzero(of_tokens))
            weight = blend.weights[i] if blend.weights else 0.0
            found.append(_TeacherSums(teacher, sums[i], blend.shares[i], weight, size, num_asked, agreement))
        return found


@dataclass(frozen=True, slots=True)
class _TeacherSums:
    """What was summed of a teacher over this rank's rows."""

    teacher: ComparedTeacher
    kd: float
    share: float
    weight: float
    """As in `Blend`."""
    size: float
    """Summed weights of the labelled tokens that it is asked for."""
    num_asked: int
    """These tokens."""
    agreement: list[float]
    """Of `TeacherTerm.agreement`; empty if it was not measured."""

    @property
    def kl_name(self) -> str:
        return f"kl_loss/{self.teacher.settings.name}"

    def is_here(self, share: float) -> bool:
        """Whether the run still has the teacher, given its share of the KD."""
        return share > 0 or self.teacher.settings.weight == 0

    def agreement_metrics(self) -> dict[str, Metric]:
        """What the agreement tells, by name; of a top k bounds. What was measured on no row is left out."""
        if not self.agreement:
            return {}
        same, compared, high, low, own, least, most, told = self.agreement
        found = {"top1_agreement": (same, compared), "student_entropy": (own, told)}
        for name, lower, upper in (("acceptance", low, high), ("teacher_entropy", least, most)):
            if self.teacher.settings.export == "topk":
                found |= {f"{name}_low": (lower, told), f"{name}_high": (upper, told)}
            else:
                found[name] = (upper, told)
        return {name: Metric(total / count, "mean", count) for name, (total, count) in found.items() if count > 0}


def _means_of_asked(teachers: Sequence[_TeacherSums], mass: float) -> dict[str, Metric]:
    """The metrics that are means over what teachers are asked for, each with the size of that as its weight."""
    taught = sum(each.weight * each.size for each in teachers)
    learnt = sum(each.weight * each.kd for each in teachers)
    first = next((each for each in teachers if each.is_here(each.weight)), teachers[0])
    metrics = {"kl_loss": _mean(learnt, taught), "teacher_mass": _mean(mass, first.num_asked)}
    return metrics | {each.kl_name: _mean(each.kd, each.size) for each in teachers}


def _mean(total: float, size: float) -> Metric:
    """The mean of a sum over items of this size together, which is its weight; 0 without any."""
    return Metric(total / size if size > 0 else 0.0, "mean", size)


class StepLosses:
    """The losses of a step on this rank's rows, added up over its sub-batches on the device in fp64."""

    def __init__(self, world: World, num_teachers: int):
        self._world = world
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._ce_and_kd = torch.zeros(1 + num_teachers, dtype=torch.float64, device=world.device)
        """Sums of CE and of every teacher's KD."""

    def add(self, sums: LossSums, blend: Blend, num_labels: int) -> None:
        """Adds the losses of a sub-batch, without waiting for the device.

        Args:
            num_labels: of the global batch; divides the loss.
        """
        kd, ce, _, router, *_ = sums.sums
        self._loss += (blend.kd * kd + blend.ce * ce + blend.router * router) / max(num_labels, 1)
        self._ce_and_kd += torch.cat([sums.sums[1:2], sums.sums[4:]])

    def total(self) -> float:
        """Returns the loss of the step's global batch so far, the same on every rank; NaN if it is NaN on one.

        Collective.
        """
        if self._world.world_size == 1:
            return self._loss.item()
        total = self._loss.clone()
        # Over all ranks, so that a NaN on one reaches all. The ranks that work on the same rows add the same loss.
        dist.all_reduce(total)
        return total.item() / (self._world.sp * self._world.tp)

    def blamed(self, teachers: Sequence[ComparedTeacher]) -> list[str]:
        """Returns the teachers whose KD is not finite in this step although the student's CE is, on every rank alike.

        Collective.

        Args:
            teachers: those of the objective, in its order.
        """
        total = self._ce_and_kd.clone()
        if self._world.world_size > 1:
            dist.all_reduce(total)
        ce, *kd = total.tolist()
        if not math.isfinite(ce):
            return []
        return [teacher.settings.name for teacher, value in zip(teachers, kd) if not math.isfinite(value)]


def ce_over_kd(sums: LossSums, world: World, otherwise: float = 1.0) -> float:
    """Returns CE / KD of the global batch, the same on every rank; `otherwise` if its KD is not above 0, as without a label.

    Collective over the data dimension of the mesh; the ratio does not change if every row is counted sp times.
    """
    total = sums.sums[:2].clone()
    dist.all_reduce(total, group=world.mesh.get_group(DP))  # the ranks that see other tokens
    kd, ce = total.tolist()
    return ce / kd if kd > 0 else otherwise
