"""The label's part of a gradient, in the terms of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from distill_rl.losses.core.labels import LabelTerm


class LabelWeights:
    """The label's part of a gradient, in the terms of the kernels; see `labels.LabelGradient`."""

    def __init__(
        self, term: LabelTerm | None, rows: slice, like: Tensor, ce: Tensor | None, logprob_grad: Tensor | None
    ):
        """
        Args:
            like: any tensor with n rows and the dtype of the arithmetic.
            ce, logprob_grad: [n], weights of the cross-entropy and of the label's log-probability.
        """
        nothing = like.new_zeros(like.shape[0])
        self.given, self.apart = term is not None, False
        self.shared = self.weight = self.at_one = self.lse = nothing
        self.columns = nothing
        self._logprob_grad, self._others = logprob_grad, nothing
        if term is None:
            return
        self.columns = term.columns[rows]
        if logprob_grad is not None:
            self.shared, self._others = logprob_grad.to(like.dtype) * (-1 / term.temperature), term.others[rows]
        if ce is not None and term.temperature == 1:
            self.shared = self.shared + ce.to(like.dtype)
        elif ce is not None:  # may be one number, expanded
            self.apart, self.at_one, self.lse = True, ce.to(like.dtype).contiguous(), term.lse[rows]
        self.temperature = term.temperature
        self.weight = self.shared + self.at_one

    def at_entries(self, values: Tensor, columns: Tensor, top: Tensor) -> Tensor:
        """The gradient at a row's entries [n, k] with the label terms that `shared` has not added.

        Args:
            values: the gradient there, `shared` included.
            columns: of the entries.
            top: the entries' centred u.
        """
        if not self.given:
            return values
        at_label = columns == self.columns[:, None]
        if self._logprob_grad is None:
            values = values - torch.where(at_label, self.shared[:, None], 0)
        else:
            exact = torch.where(self._logprob_grad[:, None] != 0, -(self.shared * self._others)[:, None], values)
            shared = torch.where(self._logprob_grad != 0, 0, self.shared)[:, None]
            values = torch.where(at_label, exact - shared, values)
        if self.apart:
            softmax = (top * self.temperature - self.lse[:, None]).exp()
            values = values + self.at_one[:, None] * (softmax - at_label.to(values.dtype))
        return values
