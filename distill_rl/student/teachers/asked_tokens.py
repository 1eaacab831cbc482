"""What a teacher that is chosen by row is asked for in a micro-batch, from its weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distill_rl.losses import Chunks
from distill_rl.types import IGNORE_INDEX, RankBatch, TokenWeights


@dataclass(frozen=True, slots=True)
class AskedTokens:
    """The labelled tokens of a micro-batch that a teacher is asked for."""

    labels: Tensor
    """int64 [R, S]: those of the micro-batch where the teacher is asked, IGNORE_INDEX elsewhere."""
    num_labels: int
    """Of them."""
    is_all: bool
    """Whether they are all labels of the micro-batch."""
    weight: float
    """Of every one of them, if they have one weight; otherwise 1."""
    weights: Tensor | None
    """fp32 [R, S]: of each, if they differ."""
    total: float
    """`TokenWeights.total`, over the global batch."""

    @classmethod
    def of(cls, weights: TokenWeights, labels: Tensor, num_labels: int) -> AskedTokens:
        """Decided on the host, which does not wait for the device.

        Args:
            weights: of the micro-batch's rows, as wide as `labels` or wider.
            labels: int64 [R, S], on the device.
            num_labels: labelled tokens among them.
        """
        of_tokens = weights.of_tokens[:, : labels.shape[1]]
        own = of_tokens[of_tokens > 0]
        is_all, is_even = len(own) == num_labels, bool((own == own[:1]).all())
        if not is_all and len(own):
            kept = torch.from_numpy(of_tokens > 0).to(labels.device, non_blocking=True)
            labels = torch.where(kept, labels, IGNORE_INDEX)
        tensor = None
        if not is_even:
            tensor = torch.tensor(of_tokens).to(labels.device, non_blocking=True)  # a copy: the array may be read-only
        weight = float(own[0]) if is_even and len(own) else 1.0
        return cls(labels, len(own), is_all, weight, tensor, weights.total)

    def of_chunks(self, chunks: Chunks) -> Tensor | None:
        """fp32 [chunks.count], the weight of each chunk; None if all have `weight`.

        A chunk lies within one document, so all of its tokens have its weight.

        Args:
            chunks: of the micro-batch.
        """
        if self.weights is None:
            return None
        inside = chunks.student >= 0
        of_tokens = self.weights.flatten()
        found = of_tokens.new_zeros(chunks.count + 1)  # the last entry is that of tokens in no chunk
        return found.index_copy_(0, torch.where(inside, chunks.student, chunks.count), of_tokens)[: chunks.count]


@dataclass(frozen=True, slots=True)
class AskedCounts:
    """How much of this rank's part of a batch a teacher is asked for."""

    total: float
    """Summed weights of the labelled tokens."""
    num_labels: int
    """Labelled tokens with a weight above 0."""

    @classmethod
    def of(cls, weights: TokenWeights | None, num_labels: int) -> AskedCounts:
        """Of the rank's rows.

        Args:
            weights: None: all labelled tokens have weight 1.
            num_labels: labelled tokens of the rank's rows.
        """
        if weights is None:
            return cls(float(num_labels), num_labels)
        of_tokens = weights.of_tokens
        return cls(float(of_tokens.sum(dtype=np.float64)), int(np.count_nonzero(of_tokens)))


def asked_sizes(batch: RankBatch) -> list[float] | None:
    """Per teacher the summed weights of the tokens of the global batch that it is asked for (`Objective.blend`).

    None if teachers are not chosen by row.
    """
    if not batch.token_weights:
        return None
    return [float(batch.num_labels) if weights is None else weights.total for weights in batch.token_weights]
