"""While a teacher makes targets it holds these and the logits of one chunk of tokens, for any number of tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from distill_rl.losses import SampledTokens
from distill_rl.teacher.engine import TargetHead, hidden_targets, logits_targets, sampled_targets, topk_targets
from tests.bench.losses.losses import peak_bytes

CHUNK, VOCABULARY, HIDDEN, K = 64, 8192, 16, 8
COPIES = 2
"""Allowed copies of a chunk of fp32 logits: the logits, and half as much for log-probs, top-k and masked padding."""


def _sampled(hidden: torch.Tensor, labels: torch.Tensor, head: TargetHead) -> SampledTokens:
    return sampled_targets(hidden, labels, head, draws=K, keys=labels)


MAKE = {
    "topk": partial(topk_targets, k=K),
    "sampled": _sampled,
    "hidden": hidden_targets,
    "hidden and entropy": partial(hidden_targets, with_entropy=True),
    "logits": partial(logits_targets, wire_dtype=torch.float16),
}
PER_TOKEN = {
    "topk": 8 * K + 8,
    "sampled": 6 * K + 8,
    "hidden": 4,
    "hidden and entropy": 8,
    "logits": 2 * VOCABULARY + 4,
}
"""Bytes of the targets per token. Hidden states exist already and do not count."""


@pytest.mark.parametrize("export", MAKE)
@pytest.mark.parametrize("chunks", [4, 32])
def test_only_one_chunk_of_logits_exists_at_a_time(export: str, chunks: int) -> None:
    weight, tokens = torch.randn(VOCABULARY, HIDDEN), chunks * CHUNK
    hidden, labels = torch.randn(tokens, HIDDEN), torch.zeros(tokens, dtype=torch.int64)
    head = TargetHead(lambda rows: linear(rows, weight), 1.0, VOCABULARY - 5, CHUNK)
    peak = peak_bytes(lambda: MAKE[export](hidden, labels, head))
    logits = CHUNK * VOCABULARY * 4
    assert logits <= peak <= COPIES * logits + tokens * PER_TOKEN[export]
