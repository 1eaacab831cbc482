"""The balance of a mixture's routers from its definition, document by document."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from distill_rl.types import IGNORE_INDEX, TokenRows


def plain_balance(model: torch.nn.Module, rows: TokenRows, *, sigmoid: bool = False) -> Tensor:
    """Labelled tokens times balance, summed over the documents; a mean over layers.

    Takes the experts with the largest router logits, so it is of models without groups of experts and biases of them.
    """
    k = next(module.top_k for module in model.modules() if hasattr(module, "top_k"))
    total = torch.zeros((), dtype=torch.float64)
    for row in range(rows.shape[0]):
        starts = [*np.flatnonzero(rows.position_ids[row] == 0).tolist(), rows.shape[1]]
        for start, stop in itertools.pairwise(starts):
            labelled = torch.tensor(rows.labels[row, start:stop] != IGNORE_INDEX)
            if not labelled.any():
                continue
            ids = torch.tensor(rows.input_ids[row : row + 1, start:stop], dtype=torch.long)
            layers = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
            for logits in layers:
                total = total + labelled.sum() * _balance(logits.double()[labelled], k, sigmoid) / len(layers)
    return total


def _balance(logits: Tensor, k: int, sigmoid: bool) -> Tensor:
    """E / (K·T²) · Σᵢ visitsᵢ · Σₜ pₜᵢ of one document's logits [T, E]."""
    tokens, experts = logits.shape
    scores = logits.sigmoid() if sigmoid else logits.exp()
    probabilities = scores / scores.sum(1, keepdim=True)
    chosen = logits.topk(k, dim=1).indices
    visits = torch.stack([(chosen == i).sum() for i in range(experts)])
    return experts / (k * tokens**2) * (visits * probabilities.sum(0)).sum()
