"""Sorted L1 (arXiv 2402.12030) over a sharded vocabulary: distributions compared by rank, whatever their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import floor_of


class SortedL1:
    """Σ_i |q_(i) − p_(i)| over the largest `length` probabilities of either side.

    A side with fewer is filled up with zeros (`filled`), or the sum ends where the shorter side does. Of equal
    probabilities the lower id comes first, so that the derivative does not depend on the sharding.
    """

    def __init__(self, shard: VocabularyShard, columns: Tensor | None, total: int, length: int, *, filled: bool):
        """
        Args:
            columns: local columns of the student that are compared, None for all; `total` of them over all ranks.
            length: at most this many probabilities are compared.
            filled: whether the shorter side is filled up with zeros; otherwise no more are compared than the side with
                fewer unmasked columns has.
        """
        self.shard, self.columns, self.length, self.filled = shard, columns, length, filled
        self._width = min(length, total)
        """how many a rank may have among the largest"""

    def compare(self, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """The distance of each row's sorted probabilities, and which columns it counted. Called by all ranks alike.

        Args:
            log_q: [n, width], the student's log-probabilities of this rank's columns.
            log_p: [n, any], those of the teacher.

        Returns:
            The sum [n], the same on every rank; and `counted` for `add_slope`, int32 [n, m]: positions (from 1) of this
            rank's largest columns, with the sign of q − p, 0 for those that do not count.
        """
        own = self._own(log_q)
        values, places = own.exp().sort(dim=1, descending=True, stable=True)
        values, places = values[:, : self._width], places[:, : self._width]
        held, present = values.shape[1], _present(own)
        if self.shard.group is None:
            ranked, order = values, None
        else:
            padded = values.new_zeros(values.shape[0], self._width + 1)
            padded[:, :held], padded[:, -1] = values, present
            parts = self.shard.gather(padded)
            present = torch.stack([part[:, -1] for part in parts]).sum(0)
            candidates = torch.cat([part[:, :-1] for part in parts], 1)
            ranked, order = candidates.sort(dim=1, descending=True, stable=True)
            ranked, order = ranked[:, : self.length], order[:, : self.length]
        difference = self._padded(ranked) - self._padded(log_p.topk(min(self.length, log_p.shape[1]), 1).values.exp())
        if not self.filled:
            places_left = torch.minimum(present, _present(log_p))
            beyond = torch.arange(self.length, device=difference.device) >= places_left[:, None]
            difference = difference.masked_fill(beyond, 0)
        sides = difference[:, : ranked.shape[1]].sign()
        if order is not None:
            first = self.shard.rank * self._width
            sides = torch.zeros_like(candidates).scatter_(1, order, sides)[:, first : first + held]
        return difference.abs().sum(1), sides.to(torch.int32) * (places + 1).to(torch.int32)

    def add_slope(self, slope: Tensor, log_q: Tensor, counted: Tensor) -> None:
        """Adds the derivative of the sum with respect to log q to `slope` [n, width], in place.

        Args:
            log_q: as in `compare`.
            counted: from `compare`.
        """
        places = counted.abs().long() - 1
        columns = places.clamp_min(0) if self.columns is None else self.columns[places.clamp_min(0)]
        if columns.shape[1]:
            slope.scatter_add_(1, columns, counted.sign() * log_q.gather(1, columns).exp())

    def _own(self, log_q: Tensor) -> Tensor:
        """This rank's columns of log q that are compared, [n, held]; dummy columns are never among them."""
        return log_q[:, : self.shard.size] if self.columns is None else log_q[:, self.columns]

    def _padded(self, values: Tensor) -> Tensor:
        """The values [n, m] with zeros appended up to `length` columns; unchanged if there are as many."""
        missing = self.length - values.shape[1]
        return torch.nn.functional.pad(values, (0, missing)) if missing > 0 else values


def _present(logprobs: Tensor) -> Tensor:
    """[n], how many of a row's columns are not masked, in the dtype of the row."""
    return (logprobs > floor_of(logprobs.dtype) / 2).sum(1).to(logprobs.dtype)
