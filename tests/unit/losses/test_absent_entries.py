"""Rows of a top k that have fewer entries than others: what is absent has no probability on either side."""

from __future__ import annotations

import pytest
import torch

from distill_rl.losses import TopKLogprobs, kd_loss, reference, token_agreement
from distill_rl.losses.cross_tokenizer.hybrid import translated
from tests.helpers.losses import DIVERGENCES, TAILS

ROWS, VOCABULARY, K = 5, 23, 6
COUNTS = (6, 1, 3, 5, 2)


def case(seed: int = 0) -> tuple[torch.Tensor, TopKLogprobs, list[TopKLogprobs]]:
    """Student logits; targets with absent entries; and each row alone with the entries that it has."""
    torch.manual_seed(seed)
    logits = torch.randn(ROWS, VOCABULARY, dtype=torch.float64)
    logprobs, ids = (2 * torch.randn(ROWS, VOCABULARY, dtype=torch.float64)).log_softmax(1).topk(K)
    alone = []
    for row, count in enumerate(COUNTS):
        ids[row, count:], logprobs[row, count:] = -1, -torch.inf
        alone.append(
            TopKLogprobs(ids[row : row + 1, :count], logprobs[row : row + 1, :count], rest(logprobs[row : row + 1]))
        )
    return logits, TopKLogprobs(ids, logprobs, rest(logprobs)), alone


def rest(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.log1p(-logprobs.exp().sum(1))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_value_and_gradient_are_those_of_the_entries_that_are_there(divergence, tail):
    logits, targets, alone = case()
    settings = {"divergence": divergence, "tail": tail, "beta": 0.3}
    logits.requires_grad_()
    rows = kd_loss(logits, targets, **settings, reduction="none").loss
    (gradient,) = torch.autograd.grad(rows.sum(), logits)
    for row, of_row in enumerate(alone):
        one = logits.detach()[row : row + 1].requires_grad_()
        expected = reference.kd_loss(one, of_row, **settings, reduction="sum").loss
        (slope,) = torch.autograd.grad(expected, one)
        torch.testing.assert_close(rows[row].double(), expected, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(gradient[row : row + 1], slope, rtol=1e-9, atol=1e-13)


def test_agreement_is_that_of_the_entries_that_are_there():
    logits, targets, alone = case(1)
    found = token_agreement(logits, targets)
    expected = [reference.token_agreement(logits[row : row + 1], of_row) for row, of_row in enumerate(alone)]
    assert float(found.top1) == sum(float(top1) for top1, *_ in expected)
    for sums, place in ((found.acceptance, 1), (found.acceptance_low, 2)):
        torch.testing.assert_close(sums.double(), sum(row[place].sum() for row in expected))


def test_an_entry_that_is_absent_has_no_probability():
    logits, targets, _ = case()
    targets.logprobs[1, -1] = -3.0
    with pytest.raises(ValueError, match="must be -inf where the id is -1"):
        kd_loss(logits, targets)


def test_absent_entries_join_nothing_when_they_are_translated():
    """Across tokenizers the rest takes what has no counterpart; an absent entry has nothing to give."""

    class Same:
        to_student = torch.arange(VOCABULARY)

    _, targets, _ = case()
    found = translated(targets, Same, torch.float64)
    assert torch.equal(found.ids, targets.ids)
    torch.testing.assert_close(found.rest_logprob, targets.rest_logprob, rtol=1e-12, atol=0)
