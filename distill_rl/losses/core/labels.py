"""The label's log-probability.

Alone (`LabelRows`), or as the cross-entropy that KD's pass over the logits yields as well (`LabelTerm` forward,
`LabelGradient` backward).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distill_rl.losses.core.row_function import RowFunction
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import Buffers, Centre, LogSums, Picked, all_reduce_sums


class LabelTerm:
    """The label's logit per row, collected in a pass over logits divided by T, and what follows from it.

    The cross-entropy is at T = 1. A label that no rank holds (an ignored row) counts as a logit of 0, which is finite;
    the caller masks the row.
    """

    def __init__(self, labels: Tensor, shard: VocabularyShard, like: Tensor, temperature: float = 1.0):
        """
        Args:
            labels: [N], global ids.
            temperature: T, by which the logits of the pass are divided.
        """
        self.ids, self.columns, self.size = labels, shard.columns(labels), shard.size
        self.temperature = temperature
        self.logit = like.new_empty(labels.shape[0])
        self.lse = like.new_empty(labels.shape[0])
        self.others = like.new_empty(labels.shape[0])
        """[N], probability at T of all other columns; set by `logprob`."""

    def picked(self, rows: slice) -> Picked:
        """(the labels' logits [N], the local columns [n] of the labels of these rows), for `all_reduce_sums`."""
        return self.logit, self.columns[rows]

    @property
    def powers(self) -> tuple[float, ...]:
        """Powers of the totals that both softmaxes need (`LogSums`). The last one is that of T = 1."""
        return (1.0,) if self.temperature == 1 else (1.0, self.temperature)

    def collect(self, rows: slice, u: Tensor) -> None:
        """Stores the labels' logits of these rows from u [n, width]; 0 where another rank holds the label."""
        columns = self.columns[rows, None]
        self.logit[rows] = torch.where(columns < self.size, u.gather(1, columns), 0)[:, 0]

    def cross_entropy(self, rows: slice, lse: Tensor) -> Tensor:
        """The cross-entropy of these rows' labels at temperature 1, [n]. Keeps `lse` for the gradient.

        Call it after the ranks have been summed.

        Args:
            lse: [n], the logsumexp over the whole vocabulary of the logits that are not divided by T.
        """
        self.lse[rows] = lse
        return lse - self.logit[rows] * self.temperature

    def logprob(self, rows: slice, others: Tensor) -> Tensor:
        """The label's log-probability at T, [n]. Keeps 1 − q(label) for the gradient (`others`).

        Computed from the other columns, so that it keeps its digits where q(label) is close to 1; so does 1 − q(label).

        Args:
            others: [n], the logsumexp of u over all other columns of the whole vocabulary.
        """
        self.others[rows] = (others - self.logit[rows]).sigmoid()
        return logsigmoid(self.logit[rows] - others)

    def subtract(self, rows: slice, gradient: Tensor, weight: Tensor) -> Tensor:
        """Subtracts `weight` [n] from the label's column of `gradient` [n, width], in place, and returns it.

        A label that another rank holds changes a dummy column only.
        """
        return gradient.scatter_add_(1, self.columns[rows, None], -weight[:, None])


class LabelGradient:
    """The label's part of a chunk's gradient.

        cross-entropy at T = 1           ce · (softmax(z) − 1[label])
        label's log-probability at T     logprob_grad · (1[label] − softmax(z/T)) / T

    Terms with the softmax at T, which KD computes anyway, are added by the caller: their weight is `shared` [n]. A
    cross-entropy at T ≠ 1 needs a softmax of its own, computed here before the chunk is overwritten.

    `logprob_grad` may be as large as 1/(1 − q). Therefore 1 − q(label) is taken from `LabelTerm.others` instead of from
    the softmax, where rounding has lost it when q is close to 1. Rows with a `logprob_grad` have no KD.
    """

    def __init__(
        self,
        term: LabelTerm | None,
        rows: slice,
        u: Tensor,
        ce: Tensor | None,
        buffers: Buffers,
        logprob_grad: Tensor | None = None,
    ):
        self.term, self.rows, self._logprob_grad = term, rows, logprob_grad
        self.shared = u.new_zeros(u.shape[0])
        self._ce: Tensor | None = None
        self._apart: Tensor | None = None
        if term is None:
            return
        if logprob_grad is not None:
            self.shared = logprob_grad.to(u.dtype) * (-1 / term.temperature)
        if ce is not None and term.temperature == 1:
            self.shared = self.shared + ce.to(u.dtype)
        elif ce is not None:
            self._ce = ce.to(u.dtype)
            logits = torch.mul(u, term.temperature, out=buffers.buffer("label", u.shape[0]))
            self._apart = logits.sub_(term.lse[rows, None]).exp_().mul_(self._ce[:, None])

    def add_to(self, gradient: Tensor) -> Tensor:
        """Adds, in place, the parts of the label terms that the caller has not added with `shared`; returns `gradient`.

        These are the label's own column, and for a cross-entropy at T ≠ 1 all columns.

        Args:
            gradient: [n, width], to which `shared` · softmax(z/T) has been added already.
        """
        if self.term is None:
            return gradient
        self.term.subtract(self.rows, gradient, self.shared)
        if self._logprob_grad is not None:
            columns = self.term.columns[self.rows, None]
            exact = self.shared * -self.term.others[self.rows]
            exact = torch.where(self._logprob_grad != 0, exact, gradient.gather(1, columns)[:, 0])
            gradient.scatter_(1, columns, exact[:, None])
        if self._apart is not None and self._ce is not None:
            self.term.subtract(self.rows, gradient.add_(self._apart), self._ce)
        return gradient


def given(grads: Sequence[Tensor | None], number: int) -> Tensor | None:
    """The entry `number` of the values' gradients; None if it is None or there are fewer."""
    return grads[number] if number < len(grads) else None


def weight_of(grads: Sequence[Tensor | None], number: int, u: Tensor) -> Tensor:
    """The gradient [n] of value `number` in the dtype of u; zeros if it is None or there are fewer values.

    Args:
        grads: [n] per value, already those of the rows of chunk u.
        u: the chunk, for number of rows, dtype and device.
    """
    grad = given(grads, number)
    return u.new_zeros(u.shape[0]) if grad is None else grad.to(u.dtype)


class LabelRows(RowFunction):
    """log q(target) per row and, on request, the entropy of q, for q at temperature T.

    ∂ log q(t)/∂u_v = 1[v = t] − q_v        ∂ entropy/∂u_v = −q_v·(log q_v + entropy)
    """

    def __init__(self, targets: Tensor, shard: VocabularyShard, like: Tensor, temperature: float, entropy: bool):
        """
        Args:
            targets: [N], global ids.
            like: any tensor with the device and dtype of the arithmetic.
        """
        num_rows = targets.shape[0]
        self.shard, self.temperature, self.with_entropy = shard, temperature, entropy
        self.centre = Centre(num_rows, like, shard, 1 / temperature)
        self.label = LabelTerm(targets, shard, like)
        self.sums = LogSums(num_rows, (1.0,), self.centre, whole=True, weighted=entropy)
        self.lse = like.new_empty(num_rows)
        self.entropy = like.new_empty(num_rows if entropy else 0)
        self.values = [like.new_empty(num_rows) for _ in range(1 + entropy)]

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        """Stores this rank's label logits and its sums of exponentials for these rows; with `entropy` also Σ e^u·u."""
        self.label.collect(rows, u)
        exponentials = self.sums.add(rows, u, buffers.buffer("work", u.shape[0]))
        if self.sums.weighted is not None:
            self.sums.weigh(rows, exponentials, u)

    def complete(self, rows: slice) -> None:
        """Sums over the ranks; sets these rows' label log-probability and, if asked for, the entropy (nats)."""
        all_reduce_sums(self.shard, rows, [self.sums], [self.label.picked(rows)])
        self.lse[rows] = self.sums.log(rows)
        self.values[0][rows] = self.label.logit[rows] - self.lse[rows]
        if self.with_entropy:
            self.entropy[rows] = (self.lse[rows] - self.sums.mean(rows)).clamp_min(0)
            self.values[1][rows] = self.entropy[rows]

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        """The gradient of log-probability and entropy by a chunk's logits, [n, width]; u is overwritten."""
        label, entropy = (weight_of(grads, number, u) / self.temperature for number in (0, 1))
        log_q = u.sub_(self.lse[rows, None])
        if self.with_entropy:
            q = torch.exp(log_q, out=buffers.buffer("work", u.shape[0]))
            gradient = log_q.add_(self.entropy[rows, None]).mul_(q).mul_(-entropy[:, None])
            gradient.addcmul_(q, -label[:, None])
        else:
            gradient = log_q.exp_().mul_(-label[:, None])
        return self.label.subtract(rows, gradient, -label)
