"""From the rows of one micro-batch to its losses, with and without logits in between.

Under sequence parallelism a rank gets the whole rows and their whole targets, and takes its own positions of both: the
labels are shifted already, so the one that a rank's last position predicts does not depend on the next rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from distill_rl.losses import StudentHidden
from distill_rl.models import forward
from distill_rl.models.attention.varlen import Documents, documents_for
from distill_rl.models.inputs import tensor_to_device, to_device
from distill_rl.parallel.mesh import World
from distill_rl.parallel.sequence import own_positions, part_of_rows
from distill_rl.parallel.shards import mask_padded_columns
from distill_rl.student.compared import Target
from distill_rl.student.objective import Blend, MicroBatch, Objective, ObjectiveOutput
from distill_rl.types import IGNORE_INDEX, TeacherPart, TokenRows


class ForwardPass:
    """The student's model, followed by the objective. Calls are collective.

    Args:
        model: sharded; made for a fused loss if `fused` (`forward.enter_at_hidden`).
        world: this rank.
        vocabulary_size: ids of the tokenizer. Further columns of the output layer are padding without probability.
        fused: make the logits inside the loss, a few rows at a time.
    """

    def __init__(self, model: Any, objective: Objective, world: World, vocabulary_size: int, *, fused: bool):
        self._model, self._objective, self._world, self._device = model, objective, world, world.device
        self._vocabulary_size, self._fused = vocabulary_size, fused

    def __call__(
        self,
        rows: TokenRows,
        num_labels: int,
        blend: Blend,
        teachers: Sequence[TeacherPart],
        targets: Sequence[Target | None],
        with_agreement: bool = False,
    ) -> ObjectiveOutput:
        """The forward pass of a micro-batch and its loss.

        With a fused loss the logits are never made as a whole. Padded columns are masked either way.

        Args:
            rows: in host memory; whole.
            num_labels, blend, with_agreement: as in `MicroBatch`.
            teachers: of these rows, per teacher.
            targets: per teacher, of the whole rows, on any device; None for a teacher that the run has lost.

        Returns:
            The loss and its sums over this rank's positions.

        Raises:
            ValueError: as `Objective.forward`, or chunks under sequence parallelism.
        """
        num_rows, width = rows.shape
        part = own_positions(self._world, width)
        own = rows.labels[:, part]
        if self._world.sp > 1:
            if any(teacher.chunks for teacher in teachers):
                raise ValueError("chunks: may cross the border between two ranks, so student.parallel.sp must be 1")
            targets = [
                target and _each(target, lambda whole: part_of_rows(whole, num_rows, part)) for target in targets
            ]
        here = [target and _each(target, lambda tensor: tensor_to_device(tensor, self._device)) for target in targets]
        batch = MicroBatch(
            to_device(own, self._device),
            num_labels,
            blend,
            [teacher.of_positions(part) for teacher in teachers],
            int(np.count_nonzero(own != IGNORE_INDEX)),
            with_agreement,
        )
        if not self._fused:
            return self._objective(self.logits(rows), batch, here)

        scale, softcap = forward.scale_and_cap(self._model.config)

        def loss(hidden: Tensor, layer: Any) -> ObjectiveOutput:
            bias = layer.bias if getattr(layer, "bias", None) is None else layer.bias * scale
            student = StudentHidden(hidden, layer.weight, bias, softcap, scale, self._vocabulary_size)
            return self._objective(student, batch, here)

        ids, positions, documents = self._inputs(rows)
        return forward.with_hidden(self._model, ids, positions, loss, documents)

    def logits(self, rows: TokenRows) -> Tensor:
        """Returns the logits [R, S, V] of a micro-batch's rows, with padded columns at −inf.

        Under tensor parallelism they are a DTensor sharded over the last dimension, under sequence parallelism those of
        this rank's positions [R, S / sp, V].
        """
        return mask_padded_columns(forward.logits(self._model, *self._inputs(rows)), self._vocabulary_size)

    def _inputs(self, rows: TokenRows) -> tuple[Tensor, Tensor, Documents | None]:
        """Returns ids and positions [R, S / sp] that this rank holds of a micro-batch on the device, and its documents."""
        device, part = self._device, own_positions(self._world, rows.shape[1])
        ids, positions = to_device(rows.input_ids[:, part], device), to_device(rows.position_ids[:, part], device)
        return ids, positions, documents_for(self._model.config, rows.position_ids, device, self._world.sp_group)


def _each(target: Target, change: Callable[[Tensor], Tensor]) -> Target:
    """Returns a target with `change` applied to every tensor."""
    changed: dict[str, Any] = {}
    for field in fields(target):
        value = getattr(target, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = change(value)
    return replace(target, **changed)
