"""Draws from a sharded vocabulary are those of the whole one, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distill_rl.losses import SampledTokens, vocab_parallel_sample
from tests.helpers.losses import sharded
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

ROWS, DRAWS = 30, 20


def whole(vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits with masked columns at the end, a row with a NaN and a row without a finite logit."""
    draw = torch.Generator().manual_seed(8)
    logits = (3 * torch.randn(ROWS, vocabulary, generator=draw, dtype=torch.float64)).to(dtype)
    logits[:, vocabulary - vocabulary // 5 :] = -torch.inf
    logits[3, vocabulary // 2] = torch.nan
    logits[7] = -torch.inf
    return logits


def drawn(logits: torch.Tensor, **settings) -> SampledTokens:
    keys, labels = torch.arange(ROWS) * 31, torch.arange(ROWS) % 4
    return vocab_parallel_sample(logits, DRAWS, keys=keys, labels=labels, temperature=1.5, chunk_size=7, **settings)


def compare(vocabulary: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Compares a DTensor's draws with those of the whole; returns them."""
    logits = whole(vocabulary, dtype)
    expected = drawn(logits)
    found = drawn(sharded(logits, init_device_mesh("cpu", (dist.get_world_size(),)), 1))
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.counts, expected.counts)
    for name in ("mean_logprob", "label_logprob"):
        # The same terms, added up in another order in fp64.
        value, truth = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(value, truth, rtol=1e-6, atol=1e-7, equal_nan=True)
        assert truth.isnan().nonzero().flatten().tolist() == [3, 7]
    return {name: getattr(found, name) for name in ("ids", "counts", "mean_logprob", "label_logprob")}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_uneven_and_empty_shards_draw_the_same_ids(ranks: int) -> None:
    for vocabulary, dtype in ((507, torch.float32), (5, torch.float64), (96, torch.bfloat16)):
        first, *others = run_ranks(ranks, compare, vocabulary, dtype)
        for other in others:
            for name, value in first.items():
                assert torch.equal(value.nan_to_num(1), other[name].nan_to_num(1)), name


def compare_plain_shards() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    logits = whole(24 * size, torch.float32)
    group = dist.new_group(list(range(size)))
    found, expected = drawn(logits[:, 24 * rank : 24 * (rank + 1)], tp_group=group), drawn(logits)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.counts, expected.counts)
    narrow = logits[:, : 24 - rank]
    with pytest.raises(ValueError, match="plain shards must be equally wide"):
        drawn(narrow, tp_group=group)


def test_plain_shards_draw_the_same_ids() -> None:
    run_ranks(2, compare_plain_shards)
