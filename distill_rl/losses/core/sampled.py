"""KD against a teacher that is known by draws from its distribution (random sampling KD, arXiv 2503.16870).

Notation: w are the weights of a row's ids, each id's share of the draws; q the student, u = z/T its logits.

    D          Σ w_v · (log p_v − log q_v)
    gradient   ∂D/∂u_v = q_v − w_v

Both are linear in w, and the expectation of w_v is the teacher's probability p_v. So D is forward KL in expectation, and its
gradient is that of forward KL: no column is left out, unlike with a top k. Of the teacher's log-probabilities only the sum
Σ w log p is needed, which comes with the draws; as it is taken at the same ids as the student's, a student that equals the
teacher has D = 0 whatever was drawn. D of single rows may be negative, and is not clamped, which would bias it.

Divergences that are not linear in p have no unbiased estimate of this kind.

The student's logits at the ids are summed over the ranks together with the normaliser (m + 1 numbers per row, two
collectives).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distill_rl.losses.core.labels import LabelGradient, LabelTerm, given, weight_of
from distill_rl.losses.core.row_function import RowFunction
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import Buffers, Centre, LogSums, all_reduce_sums
from distill_rl.losses.targets import SampledTokens


class SampledRows(RowFunction):
    """Per row T²·D and, with labels, the cross-entropy; as constants the compared masses, which are 1 on both sides.

    An id of −1 is an absent entry. A row without draws has the value 0 and no gradient.
    """

    def __init__(
        self,
        teacher: SampledTokens,
        shard: VocabularyShard,
        temperature: float,
        label: LabelTerm | None,
        like: Tensor,
    ):
        """
        Args:
            label: the labels of all rows; None: no cross-entropy.
            like: any tensor with the device and dtype of the arithmetic.
        """
        self.teacher, self.shard, self.temperature, self.label = teacher, shard, temperature, label
        num_rows, m = teacher.ids.shape
        self.centre = Centre(num_rows, like, shard, 1 / temperature)
        self.sums = LogSums(num_rows, (1.0,) if label is None else label.powers, self.centre, whole=True)
        self.drawn = like.new_empty(num_rows, m)
        # Kept for backward, per row: the logsumexp, and Σ w, which is 1, or 0 without draws; NaN where D is.
        self.lse, self.total = (like.new_empty(num_rows) for _ in range(2))
        self.values = [like.new_empty(num_rows) for _ in range(1 + (label is not None))]

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, self.values = tuple(self.values), []
        self.drawn = self.drawn.new_empty(0)
        one = torch.ones_like(values[0])
        return values, (one, one.clone())

    def to_save(self) -> tuple[Tensor, ...]:
        teacher = self.teacher
        nothing = teacher.ids.new_empty(0)
        self.teacher = SampledTokens(nothing, nothing, temperature=teacher.temperature)
        return teacher.ids, teacher.counts

    def restore(self, tensors: Sequence[Tensor]) -> None:
        ids, counts = tensors
        self.teacher = SampledTokens(ids, counts, temperature=self.teacher.temperature)

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        """Gathers the logits at the ids into `drawn` (0 where another rank has the column) and sums all columns."""
        if self.label is not None:
            self.label.collect(rows, u)
        columns = self.shard.columns(self.teacher.ids[rows])
        self.drawn[rows] = torch.where(columns < self.shard.size, u.gather(1, columns), 0)
        self.sums.add(rows, u, buffers.buffer("work", u.shape[0]))

    def complete(self, rows: slice) -> None:
        """Sums over the ranks; sets T²·D of these rows and, with labels, the cross-entropy."""
        picked = [(self.drawn, self.shard.columns(self.teacher.ids[rows]))]
        all_reduce_sums(self.shard, rows, [self.sums], picked + ([self.label.picked(rows)] if self.label else []))
        lse = self.lse[rows] = self.sums.log(rows)
        weights = self._weights(rows, lse.dtype)
        total = (weights.amax(1) > 0).to(lse.dtype)
        value = -(weights * (self.drawn[rows] - lse[:, None])).sum(1)
        if self.teacher.mean_logprob is not None:
            value = value + total * self.teacher.mean_logprob[rows].to(lse.dtype)
        self.values[0][rows] = self.temperature**2 * value
        self.total[rows] = total.masked_fill(value.isnan(), torch.nan)
        if self.label is not None:
            self.values[1][rows] = self.label.cross_entropy(rows, self.sums.log(rows, -1))

    def _weights(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """The weights of these rows' ids, [n, m]."""
        return SampledTokens(self.teacher.ids[rows], self.teacher.counts[rows]).weights(dtype)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        """T·g·(q_v − w_v) plus the gradient of the cross-entropy, [n, width]; u is overwritten.

        Args:
            grads: g = ∂loss/∂(T²·D) and that of the cross-entropy, [n]; None for one that nothing uses.
        """
        label = LabelGradient(self.label, rows, u, given(grads, 1), buffers)
        kd = weight_of(grads, 0, u) * self.temperature
        gradient = u.sub_(self.lse[rows, None]).exp_()
        gradient.mul_((kd * self.total[rows] + label.shared)[:, None])
        # Ids are distinct but for absent ones, which meet in a dummy column. So nothing is added up in an order that varies.
        columns = self.shard.columns(self.teacher.ids[rows])
        at_ids = gradient.gather(1, columns).addcmul_(self._weights(rows, u.dtype), kd[:, None], value=-1)
        return label.add_to(gradient.scatter_(1, columns, at_ids))
