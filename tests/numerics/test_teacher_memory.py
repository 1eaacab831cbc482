"""What a teacher holds while it makes targets: logits of one chunk of tokens, whatever the number of tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from distill_rl.bench.losses import peak_bytes
from distill_rl.teacher.targets import hidden_targets, topk_targets

CHUNK, VOCABULARY, HIDDEN, K = 64, 8192, 16, 8
COPIES = 4
"""of a chunk of fp32 logits: themselves, their log-probs, and what top-k and the masking of padding take"""


@pytest.mark.parametrize("export", ["topk", "hidden"])
@pytest.mark.parametrize("chunks", [4, 32])
def test_logits_of_more_than_a_chunk_never_exist(export: str, chunks: int) -> None:
    weight, tokens = torch.randn(VOCABULARY, HIDDEN), chunks * CHUNK
    hidden, labels = torch.randn(tokens, HIDDEN), torch.zeros(tokens, dtype=torch.int64)
    make = partial(topk_targets, k=K) if export == "topk" else partial(hidden_targets, with_entropy=False)
    common = {"temperature": 1.0, "vocabulary_size": VOCABULARY - 5, "chunk": CHUNK}
    peak = peak_bytes(lambda: make(hidden, lambda rows: linear(rows, weight), labels, **common))
    logits = CHUNK * VOCABULARY * 4
    targets = 2 * tokens * (K * 12 + 8)  # in parts, and put together
    assert logits <= peak <= COPIES * logits + targets
