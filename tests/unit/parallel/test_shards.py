from __future__ import annotations

import pytest
import torch

from distill_rl.parallel.shards import mask_padded_columns


@pytest.mark.parametrize("size", [5, 6])
def test_logits_without_padding_are_not_written(size: int) -> None:
    logits = torch.randn(2, 3, 5)
    wanted = logits.clone()
    assert mask_padded_columns(logits, size) is logits
    assert torch.equal(logits, wanted)


def test_padding_gets_no_probability_and_no_gradient() -> None:
    weight = torch.randn(7, 4, requires_grad=True)
    hidden = torch.randn(2, 3, 4)
    masked = mask_padded_columns(hidden @ weight.T, 5)
    assert (masked[..., 5:] == -torch.inf).all()
    found = masked.log_softmax(-1)[..., 1].sum()
    found.backward()
    narrow = weight.detach()[:5].requires_grad_()
    wanted = (hidden @ narrow.T).log_softmax(-1)[..., 1].sum()
    wanted.backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(weight.grad[:5], narrow.grad)
    assert (weight.grad[5:] == 0).all()
