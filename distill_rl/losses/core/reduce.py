"""From values per row to a loss: mask, weights, and the only division."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

ReductionName = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[ReductionName, ...] = ("mean", "sum", "none")


@dataclass(frozen=True)
class Reduction:
    """How [N] values become one. Invalid rows count as 0 whatever they hold.

    A mean divides by a number of rows, never by weights: by `num_items_in_batch` if given, the count over the *global*
    batch, so that micro-batches and data-parallel ranks simply add up; otherwise by the valid rows here.
    """

    name: ReductionName
    valid: Tensor
    """bool [N]"""
    weights: Tensor | None = None
    """[N]"""
    num_items_in_batch: int | float | Tensor | None = None

    @property
    def num_tokens(self) -> Tensor:
        """int64 scalar, the number of valid rows."""
        return self.valid.sum()

    def select(self, kept: Tensor) -> Reduction:
        """The reduction of the rows with the numbers `kept` only. `num_items_in_batch` stays as it is."""
        weights = None if self.weights is None else self.weights[kept]
        return replace(self, valid=self.valid[kept], weights=weights)

    def row_weights(self, dtype: torch.dtype) -> Tensor:
        """[N], the factor of each row in the reduced loss: 0 for invalid rows, otherwise its weight (or 1).

        For "mean" divided by the denominator.
        """
        weights = self.valid.to(dtype)
        if self.weights is not None:
            weights = weights * self.weights
        return weights if self.name != "mean" else weights / self._denominator()

    def __call__(self, rows: Tensor, *, weighted: bool = True) -> Tensor:
        """Reduces [N] to a scalar, or to [N] for "none", where invalid rows are 0.

        The result stays connected to the graph when no row is valid.

        Args:
            rows: values [N].
            weighted: multiply by the token weights, if there are any.
        """
        if weighted and self.weights is not None:
            rows = rows * self.weights
        rows = torch.where(self.valid, rows, 0)
        if self.name == "none":
            return rows
        total = rows.sum()
        return total if self.name == "sum" else total / self._denominator()

    def _denominator(self) -> Tensor | float:
        """What a mean divides by: `num_items_in_batch` if given, otherwise the number of valid rows; at least 1."""
        count = self.num_tokens if self.num_items_in_batch is None else self.num_items_in_batch
        return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
