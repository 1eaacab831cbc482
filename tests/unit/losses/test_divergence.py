from __future__ import annotations

import math

import pytest
import torch

from distill_rl.losses import reference
from distill_rl.losses.divergence import DIVERGENCES, Distribution, resolve


def logs(seed: int) -> torch.Tensor:
    return torch.randn(4, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 2


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_value_is_the_references_line_and_slope_its_derivative(name: str, beta: float) -> None:
    log_p, log_q = logs(0), logs(1).requires_grad_()
    divergence, truth = resolve(name, beta), reference.LOG_DIVERGENCES[name](log_p, log_q, beta)
    p, q = Distribution(log_p), Distribution(log_q.detach())
    torch.testing.assert_close(divergence.value(p, q), truth.detach(), rtol=1e-12, atol=1e-14)
    (derivative,) = torch.autograd.grad(truth.sum(), log_q)
    torch.testing.assert_close(divergence.slope(p, q), derivative, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_balance_makes_every_term_positive_and_is_the_references(name: str) -> None:
    divergence, p, q = resolve(name, 0.3), logs(0), logs(1)
    balanced = divergence.value(Distribution(p), Distribution(q)) + divergence.balance * (q.exp() - p.exp())
    assert (balanced > 0).all()
    expected = reference.BALANCES[name](p.exp(), q.exp(), 0.3)
    torch.testing.assert_close(divergence.balance * (q.exp() - p.exp()), expected, rtol=1e-14, atol=1e-15)


def test_only_reverse_kl_is_infinite_where_the_teacher_has_nothing() -> None:
    assert [name for name in DIVERGENCES if resolve(name, 0.3).needs_support] == ["reverse_kl"]


@pytest.mark.parametrize(
    ("name", "beta", "limit"),
    [
        ("jsd", 0, "forward_kl"),
        ("jsd", 1, "reverse_kl"),
        ("skewed_forward_kl", 0, "forward_kl"),
        ("skewed_reverse_kl", 0, "reverse_kl"),
    ],
)
def test_the_ends_of_the_range_are_the_plain_kls(name: str, beta: float, limit: str) -> None:
    assert type(resolve(name, beta)) is DIVERGENCES[limit]


def test_both_sides_without_mass_compare_as_equal() -> None:
    nothing = Distribution(torch.full((1, 2), torch.finfo(torch.float32).min / 4))
    for name in DIVERGENCES:
        divergence = resolve(name, 0.3)
        assert divergence.value(nothing, nothing).eq(0).all()
        assert divergence.slope(nothing, nothing).eq(0).all()


@pytest.mark.parametrize(
    ("name", "beta", "message"),
    [
        ("kl", 0.5, "divergence: must be one of forward_kl, reverse_kl, jsd, .*; got 'kl'"),
        ("jsd", 1.5, r"beta: must lie in \[0, 1\]; got 1.5"),
        ("jsd", math.nan, r"beta: must lie in \[0, 1\]; got nan"),
        ("skewed_reverse_kl", 1, "beta: a skew of 1 compares a distribution with itself"),
    ],
)
def test_unknown_names_and_impossible_betas_are_refused(name: str, beta: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(name, beta)
