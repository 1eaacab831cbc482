"""The divergences, each as two lines.

A divergence between a teacher p and a student q is a sum over the vocabulary (or over a few columns and a bucket for
the rest), D = Σ_v f(p_v, q_v). Two elementwise expressions define it:

    value   f(p, q)
    slope   ∂f/∂(log q) = q · ∂f/∂q

because q is a softmax of u, so that ∂D/∂u_v = slope_v − q_v · Σ_w slope_w. To add one:

1. a class with these two lines, and its entry in `DIVERGENCES`; with β also what it is at β = 0 (`_AT_ZERO`);
2. its name in `LossConfig.divergence` of `config/schema/`, with β also in `MIXED`, and in docs/configuration.md, which
   is generated;
3. a line each in `LOG_DIVERGENCES` and `BALANCES` of `reference.py`, from which the tests take the truth.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor


class Distribution:
    """Log-probabilities of any shape. Probabilities and mixtures are computed on first use and kept."""

    def __init__(self, log: Tensor):
        self.log = log
        self._mixtures: dict[tuple[int, float], Distribution] = {}

    @cached_property
    def prob(self) -> Tensor:
        return self.log.exp()

    def mixed(self, other: Distribution, share: float) -> Distribution:
        """The mixture share · self + (1 − share) · other, for a share strictly between 0 and 1. Never exactly 0.

        Kept per `other` and `share`, so later calls return the same object.
        """
        key = id(other), share
        if key not in self._mixtures:
            # The smallest normal number keeps the log finite where both underflow. Elsewhere it is below rounding.
            prob = torch.add(self.prob * share, other.prob, alpha=1 - share).add_(torch.finfo(self.log.dtype).tiny)
            self._mixtures[key] = Distribution(prob.log_())
        return self._mixtures[key]


class Divergence:
    """Base class. `beta` is β, or the skew α."""

    leads: Literal["teacher", "student"] | None = None
    """The side whose probabilities weigh log(p/q), for the two KLs, which need a single pass (`core/rows.py`)."""

    def __init__(self, beta: float = 0.0):
        self.beta = beta

    def value(self, p: Distribution, q: Distribution) -> Tensor:
        """The divergence's term per token; its sum over the vocabulary is the divergence."""
        raise NotImplementedError

    def slope(self, p: Distribution, q: Distribution) -> Tensor:
        """The derivative of each token's term with respect to its log q, with p held fixed."""
        raise NotImplementedError

    def slope_(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """The slope and q, from log-probabilities, which it may overwrite."""
        q = Distribution(log_q)
        return self.slope(Distribution(log_p), q), q.prob

    @cached_property
    def balance(self) -> float:
        """The κ that makes value + κ·(q − p) never negative, term by term, and zero only where p = q.

        The terms of a KL have either sign; their sum is non-negative only because both sides sum to one. Probabilities
        that were rounded in transit do not. With q − p added to each p·log(p/q), every term is a divergence by itself.
        κ is −slope at p = q = 1, where the balanced term has its minimum: 1 for forward KL, −1 for reverse KL, 0 for
        JSD.
        """
        return -float(self.slope(_constant(0.0), _constant(0.0)))

    @cached_property
    def needs_support(self) -> bool:
        """Whether D is infinite where the teacher has no mass and the student has some (reverse KL)."""
        return bool(self.value(_constant(-math.inf), _constant(0.0)).isinf())


def _constant(log: float) -> Distribution:
    """A distribution of one scalar entry with this log-probability, fp64 on the CPU."""
    return Distribution(torch.tensor(log, dtype=torch.float64, device="cpu"))


class ForwardKL(Divergence):
    """KL(p‖q)"""

    leads = "teacher"

    def value(self, p: Distribution, q: Distribution) -> Tensor:
        return p.prob * (p.log - q.log)

    def slope(self, p: Distribution, q: Distribution) -> Tensor:
        return -p.prob

    def slope_(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        return log_p.exp_().neg_(), log_q.exp_()


class ReverseKL(Divergence):
    """KL(q‖p)"""

    leads = "student"

    def value(self, p: Distribution, q: Distribution) -> Tensor:
        return q.prob * (q.log - p.log)

    def slope(self, p: Distribution, q: Distribution) -> Tensor:
        return q.prob * (q.log - p.log + 1)

    def slope_(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.sub(log_q, log_p, out=log_p).add_(1)
        return factor.mul_(log_q.exp_()), log_q


class JensenShannon(Divergence):
    """β·KL(p‖m) + (1 − β)·KL(q‖m) with m = β·p + (1 − β)·q (GKD, arXiv 2306.13649)"""

    def value(self, p: Distribution, q: Distribution) -> Tensor:
        m = p.mixed(q, self.beta)
        return self.beta * p.prob * (p.log - m.log) + (1 - self.beta) * q.prob * (q.log - m.log)

    def slope(self, p: Distribution, q: Distribution) -> Tensor:
        return (1 - self.beta) * q.prob * (q.log - p.mixed(q, self.beta).log)


class SkewedForwardKL(Divergence):
    """KL(p‖m) with m = α·p + (1 − α)·q, α = beta (DistiLLM, arXiv 2402.03898)"""

    def value(self, p: Distribution, q: Distribution) -> Tensor:
        return p.prob * (p.log - p.mixed(q, self.beta).log)

    def slope(self, p: Distribution, q: Distribution) -> Tensor:
        return (self.beta - 1) * q.prob * (p.log - p.mixed(q, self.beta).log).exp()


class SkewedReverseKL(Divergence):
    """KL(q‖m) with m = α·q + (1 − α)·p, α = beta (DistiLLM, arXiv 2402.03898)"""

    def value(self, p: Distribution, q: Distribution) -> Tensor:
        return q.prob * (q.log - q.mixed(p, self.beta).log)

    def slope(self, p: Distribution, q: Distribution) -> Tensor:
        log_ratio = q.log - q.mixed(p, self.beta).log
        return q.prob * (log_ratio + 1 - self.beta * log_ratio.exp())


class TotalVariation(Divergence):
    """½ Σ |p − q|"""

    def value(self, p: Distribution, q: Distribution) -> Tensor:
        return 0.5 * (p.prob - q.prob).abs()

    def slope(self, p: Distribution, q: Distribution) -> Tensor:
        return 0.5 * q.prob * (q.prob - p.prob).sign()


DIVERGENCES: dict[str, type[Divergence]] = {
    "forward_kl": ForwardKL,
    "reverse_kl": ReverseKL,
    "jsd": JensenShannon,
    "skewed_forward_kl": SkewedForwardKL,
    "skewed_reverse_kl": SkewedReverseKL,
    "tvd": TotalVariation,
}

_AT_ZERO = {"skewed_forward_kl": "forward_kl", "skewed_reverse_kl": "reverse_kl", "jsd": "forward_kl"}


@lru_cache
def resolve(name: str, beta: float) -> Divergence:
    """The divergence of that name with its β (the skew α of the skewed ones). The others ignore β.

    At the ends of the range, where the formula degenerates, its scaled limit is used: JSD(0) is forward KL, JSD(1)
    reverse KL, and a skew of 0 the plain KL.

    Raises:
        ValueError: unknown name, β outside [0, 1], or a skew of 1, which compares a distribution with itself.
    """
    if name not in DIVERGENCES:
        raise ValueError(f"divergence: must be one of {', '.join(DIVERGENCES)}; got {name!r}")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta: must lie in [0, 1]; got {beta!r}")
    if name.startswith("skewed") and beta == 1:
        raise ValueError("beta: a skew of 1 compares a distribution with itself, take less than 1; got 1")
    if beta == 0:
        name = _AT_ZERO.get(name, name)
    if beta == 1 and name == "jsd":
        name = "reverse_kl"
    return DIVERGENCES[name](beta)
