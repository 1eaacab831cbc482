"""From the rows of one micro-batch to its losses, with and without logits in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_rl.losses import StudentHidden
from distill_rl.models import forward
from distill_rl.models.attention.varlen import Documents, documents_for
from distill_rl.models.inputs import tensor_to_device, to_device
from distill_rl.parallel.shards import mask_padded_columns
from distill_rl.student.asked_tokens import AskedTokens
from distill_rl.student.objective import Blend, Objective, ObjectiveOutput, Target
from distill_rl.types import IGNORE_INDEX, ChunkRows, TokenRows, TokenWeights


class ForwardPass:
    """The student's model, followed by the objective. Calls are collective.

    Args:
        model: sharded; made for a fused loss if `fused` (`forward.enter_at_hidden`).
        device: of this rank.
        vocabulary_size: ids of the tokenizer. Further columns of the output layer are padding without probability.
        fused: make the logits inside the loss, a few rows at a time.
    """

    def __init__(self, model: Any, objective: Objective, device: torch.device, vocabulary_size: int, *, fused: bool):
        self._model, self._objective, self._device = model, objective, device
        self._vocabulary_size, self._fused = vocabulary_size, fused

    def __call__(
        self,
        rows: TokenRows,
        targets: Sequence[Target | None],
        num_labels: int,
        chunks: Sequence[ChunkRows | None],
        blend: Blend,
        with_agreement: bool,
        token_weights: Sequence[TokenWeights | None] = (),
    ) -> ObjectiveOutput:
        """The forward pass of a micro-batch and its loss; other arguments as in `Objective.forward`.

        With a fused loss the logits are never made as a whole. Padded columns are masked either way.

        Args:
            rows: in host memory, like `chunks`.
            targets: on any device.
            token_weights: of these rows (`RankBatch.token_weights`), as wide as they are or wider.
        """
        labels = to_device(rows.labels, self._device)
        here = [target and _on_device(target, self._device) for target in targets]
        own_labels = int(np.count_nonzero(rows.labels != IGNORE_INDEX))
        asked = [weights and AskedTokens.of(weights, labels, own_labels) for weights in token_weights]
        arguments = labels, here, num_labels, chunks, blend, own_labels, with_agreement, asked
        if not self._fused:
            return self._objective(self.logits(rows), *arguments)

        scale, softcap = forward.scale_and_cap(self._model.config)

        def loss(hidden: Tensor, layer: Any) -> ObjectiveOutput:
            bias = layer.bias if getattr(layer, "bias", None) is None else layer.bias * scale
            student = StudentHidden(hidden, layer.weight, bias, softcap, scale, self._vocabulary_size)
            return self._objective(student, *arguments)

        ids, positions, documents = self._inputs(rows)
        return forward.with_hidden(self._model, ids, positions, loss, documents)

    def logits(self, rows: TokenRows) -> Tensor:
        """Returns the logits [R, S, V] of a micro-batch's rows, with padded columns at −inf.

        Under tensor parallelism they are a DTensor sharded over the last dimension.
        """
        return mask_padded_columns(forward.logits(self._model, *self._inputs(rows)), self._vocabulary_size)

    def _inputs(self, rows: TokenRows) -> tuple[Tensor, Tensor, Documents | None]:
        """Returns a micro-batch's ids and positions [R, S] on the device, and its documents."""
        device = self._device
        ids, positions = to_device(rows.input_ids, device), to_device(rows.position_ids, device)
        return ids, positions, documents_for(self._model.config, rows.position_ids, device)


def _on_device(target: Target, device: torch.device) -> Target:
    """Returns a target with all tensors on `device`; those that are there already are shared with the original."""
    moved: dict[str, Any] = {}
    for field in fields(target):
        value = getattr(target, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = tensor_to_device(value, device)
    return replace(target, **moved)
