"""The losses of one optimizer step, by which all ranks decide alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distill_rl.parallel.mesh import World
from distill_rl.student.compared import ComparedTeacher
from distill_rl.student.loss_sums import LossSums
from distill_rl.student.objective import Blend


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
        self._loss += sums.loss(blend) / max(num_labels, 1)
        self._ce_and_kd += sums.ce_and_kd_per_teacher

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


def ce_over_kd(sums: LossSums, world: World) -> float:
    """Returns CE / KD of the global batch, the same on every rank; 1 if the KD is not above 0.

    Collective over the data dimension of the mesh; the ratio does not change if every row is counted sp times.
    """
    total = sums.kd_and_ce.clone()
    dist.all_reduce(total, group=world.dp_group)
    kd, ce = total.tolist()
    return ce / kd if kd > 0 else 1.0
