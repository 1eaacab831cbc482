"""Which loss is suggested for a pair of tokenizers."""

from __future__ import annotations

import pytest

from distill_rl.align.advice import FEW_SINGLES, advise


@pytest.mark.parametrize(
    ("share", "chunks", "common", "loss", "reason"),
    [
        (0.87, 412, 96, "hybrid", "87.0% of the chunks are 1:1 and compare 96 common tokens; the others"),
        (0.47, 412, 96, "alm", "only 47.0% of the chunks are 1:1"),
        (1.0, 5, 30000, "hybrid", "100.0% of the chunks are 1:1 and compare 30,000 common tokens"),
        (FEW_SINGLES, 1000, 1, "hybrid", "60.0% of the chunks are 1:1"),
        (FEW_SINGLES - 0.01, 1000, 1, "alm", "only 59.0% of the chunks are 1:1"),
        (0.0, 1000, 0, "alm", "no token of the two vocabularies spells the same"),
        (0.0, 0, 96, "none", "no text could be aligned"),
    ],
)
def test_advice(share, chunks, common, loss, reason):
    advice = advise(share, chunks, common)
    assert advice.loss == loss
    assert advice.reason.startswith(reason)
    assert str(advice).startswith(f"loss.cross_tokenizer={loss}: {reason}")
