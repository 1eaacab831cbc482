"""The teacher's targets for N tokens. Those sent between processes are plain tensors of N rows, their own wire format.

Legend: N tokens, V vocabulary, Vl this rank's columns of it, k or m entries per token, Ht the teacher's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


def with_each_tensor(target: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The target, of any kind, with what `change` makes of each of its tensors."""
    values = {field.name: getattr(target, field.name) for field in fields(target)}
    return replace(target, **{name: change(value) for name, value in values.items() if isinstance(value, Tensor)})


def _in_fp32(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that are present."""
    return {name: tensor.float() for name, tensor in tensors.items() if tensor is not None}


@dataclass(frozen=True, slots=True)
class DenseLogits:
    """Logits over the whole vocabulary, before any temperature."""

    logits: Tensor
    """[N, Vl] or [B, S, Vl], this rank's shard; or a DTensor Shard(-1)"""
    label_logprob: Tensor | None = None
    """[N], the teacher's log-probability of the actual next token"""

    def to_tensors(self, wire_dtype: torch.dtype) -> dict[str, Tensor]:
        """The wire format: `logits` in `wire_dtype`, in their present shape; `label_logprob` fp32 [N] where present."""
        return {"logits": self.logits.to(wire_dtype)} | _in_fp32(label_logprob=self.label_logprob)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Targets of a few ids per row. The tensors come before the temperature."""

    def select(self, kept: Tensor) -> Self:
        """The targets of the rows with the numbers `kept` only."""
        return with_each_tensor(self, lambda tensor: tensor[kept])

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], temperature: float) -> Self:
        """The inverse of `to_tensors`. The tensors are kept in their wire dtypes, not copied, and never written to.

        Args:
            temperature: of the distribution that log-probabilities or draws were taken from.

        Raises:
            ValueError: one of the first two tensors is missing.
        """
        names = [field.name for field in fields(cls)]
        if missing := set(names[:2]) - set(tensors):
            raise ValueError(f"tensors: must hold {' and '.join(names[:2])}; {', '.join(sorted(missing))} missing")
        present = {name: tensors[name] for name in names if name in tensors}
        return cls(**present, temperature=temperature)  # type: ignore[call-arg]  # a field of the subclasses


@dataclass(frozen=True, slots=True)
class TopKLogprobs(_Entries):
    """The teacher's k most likely tokens, with log-probabilities taken over the whole vocabulary.

    Nothing is renormalised: exp(logprobs) and exp(rest_logprob) sum to one, up to the dtype they travelled in.
    """

    ids: Tensor
    """int32 or int64 [N, k], global vocabulary ids, distinct within a row; −1 for an absent entry"""
    logprobs: Tensor
    """any float [N, k], at `temperature`; −inf for an absent entry"""
    rest_logprob: Tensor | None = None
    """[N], log of the mass outside the k; derived from the others when absent"""
    temperature: float = 1.0
    label_logprob: Tensor | None = None
    """[N], log-probability of the actual next token, at `temperature`"""

    def to_tensors(self, wire_dtype: torch.dtype) -> dict[str, Tensor]:
        """The wire format: `ids` int32 [N, k], `logprobs` in `wire_dtype` [N, k]; where present, in fp32 [N],
        `rest_logprob` and `label_logprob`. The temperature is not part of it.
        """
        tensors = {"ids": self.ids.to(torch.int32), "logprobs": self.logprobs.to(wire_dtype)}
        return tensors | _in_fp32(rest_logprob=self.rest_logprob, label_logprob=self.label_logprob)


@dataclass(frozen=True, slots=True)
class SampledTokens(_Entries):
    """Draws from the teacher's distribution: an unbiased estimate of the whole of it (arXiv 2503.16870).

    The weight of an id is its share of the row's draws, which is its probability in expectation. There is no rest: an id
    that was not drawn has the weight 0, and the weights of a row sum to one.
    """

    ids: Tensor
    """int32 or int64 [N, m], global vocabulary ids, distinct within a row; −1 for an absent entry"""
    counts: Tensor
    """any integer [N, m], how often each id was drawn; 0 for an absent entry"""
    mean_logprob: Tensor | None = None
    """[N], Σ weight · log p at `temperature`. Without it the loss is a cross-entropy with the teacher, which lacks the
    teacher's entropy and has the same gradient"""
    temperature: float = 1.0
    label_logprob: Tensor | None = None
    """[N], log-probability of the actual next token, at `temperature`"""

    def weights(self, dtype: torch.dtype) -> Tensor:
        """The estimated probabilities, [N, m]: each id's share of its row's draws. 0 in a row without draws."""
        counts = self.counts.to(dtype)
        return counts / counts.sum(1, keepdim=True).clamp_min(1)

    def most_drawn(self) -> Tensor:
        """The id that was drawn most often in each row, [N]; of equal counts the lowest id. −1 in a row without draws."""
        most = self.counts.amax(1, keepdim=True)
        beyond = torch.iinfo(self.ids.dtype).max
        lowest = self.ids.masked_fill((self.counts < most) | (self.counts == 0), beyond).amin(1)
        return lowest.masked_fill(lowest == beyond, -1)

    def to_tensors(self, wire_dtype: torch.dtype) -> dict[str, Tensor]:
        """The wire format: `ids` int32 [N, m], `counts` int16 [N, m]; where present, in fp32 [N], `mean_logprob` and
        `label_logprob`. The temperature is not part of it.

        `wire_dtype` has no effect: weights that were rounded to 16 bits would be biased, counts are exact.
        """
        tensors = {"ids": self.ids.to(torch.int32), "counts": self.counts.to(torch.int16)}
        return tensors | _in_fp32(mean_logprob=self.mean_logprob, label_logprob=self.label_logprob)


@dataclass(frozen=True, slots=True)
class TeacherHidden:
    """Last hidden states and the output layer: exact dense KD whose logits never exist as a whole."""

    hidden: Tensor
    """[N, Ht] or [B, S, Ht]"""
    lm_head_weight: Tensor
    """[Vl, Ht], this rank's rows; or a DTensor Shard(0)"""
    softcap: float | None = None
    """logits = softcap · tanh(logits / softcap), as Gemma 2 does"""
    logit_scale: float = 1.0
    """factor on the logits before the softcap, as Cohere and Granite have"""
    label_logprob: Tensor | None = None
    """[N]"""
    bias: Tensor | None = None
    """[Vl] or a DTensor Shard(0), added before the softcap; −inf masks a column"""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Last hidden states alone, as they are sent. The reader adds the output layer, which makes them TeacherHidden."""

    hidden: Tensor
    """[N, Ht] in the teacher's dtype"""
    label_logprob: Tensor | None = None
    """[N]"""

    def to_tensors(self, wire_dtype: torch.dtype) -> dict[str, Tensor]:
        """The wire format: `hidden` as it is, [N, Ht], and `label_logprob` fp32 [N] where present.

        `wire_dtype` has no effect.
        """
        return {"hidden": self.hidden} | _in_fp32(label_logprob=self.label_logprob)


Teacher = DenseLogits | TopKLogprobs | SampledTokens | TeacherHidden
Wire = DenseLogits | TopKLogprobs | SampledTokens | HiddenStates
"""Targets in the form in which they are sent."""


def target_of(tensors: Mapping[str, Tensor], temperature: float) -> Wire:
    """The target whose wire format these tensors are, recognised by `hidden`, `logits` or `counts`, otherwise top-k.

    The tensors are kept without a copy and never written to.

    Args:
        temperature: of top-k log-probabilities and of draws; the other kinds do not keep it.

    Raises:
        ValueError: none of the four kinds.
    """
    if "hidden" in tensors:
        return HiddenStates(tensors["hidden"], tensors.get("label_logprob"))
    if "logits" in tensors:
        return DenseLogits(tensors["logits"], tensors.get("label_logprob"))
    if "counts" in tensors:
        return SampledTokens.from_tensors(tensors, temperature)
    return TopKLogprobs.from_tensors(tensors, temperature)
