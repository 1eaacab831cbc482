"""Tries out a model of a family that the tests do not cover, on a dozen tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distill_rl.errors import ConfigError
from distill_rl.models import families

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FIRST, _SECOND = 5, 7
"""Lengths of the two documents."""


@torch.no_grad()
def probe(model: PreTrainedModel, *, packing: bool, chunked_head: bool) -> None:
    """Collective over the model's ranks. Leaves the model as it was.

    Raises:
        ConfigError: documents in one row see each other (checked with `packing`), or the logits cannot be computed from
            hidden states (checked with `chunked_head`).
    """
    training, family = model.training, f"model type {model.config.model_type}"
    model.eval()
    try:
        if packing and packing_leaks(model):
            rule = "documents packed into one row must not see each other"
            raise ConfigError(family, rule, "they do", "set data.packing: false")
        if chunked_head and not head_is_known(model):
            rule = "logits must follow from hidden states and the output embedding"
            raise ConfigError(family, rule, "they differ from the model's own", "use a teacher of another family")
    finally:
        model.train(training)


def packing_leaks(model: PreTrainedModel) -> bool:
    """Whether the second document of a row depends on the first one, or on its position in the row."""
    ids, positions = _two_documents(model)
    other = ids.clone()
    other[:, :_FIRST] = other[:, :_FIRST].flip(1)
    packed, after_another, alone = (
        families.logits(model, *inputs).float()[:, -_SECOND:]
        for inputs in ((ids, positions), (other, positions), (ids[:, _FIRST:], positions[:, _FIRST:]))
    )
    # Equal shapes round alike, whereas another row length may round differently; hence the two bounds.
    return not (_close(packed, after_another, 1e-4) and _close(packed, alone, 3e-2))


def head_is_known(model: PreTrainedModel) -> bool:
    """Whether `families.head` of `families.body` gives the model's logits."""
    ids, positions = _two_documents(model)
    whole = families.logits(model, ids, positions).float()
    return _close(families.head(model, families.body(model, ids, positions)).float(), whole, 1e-3)


def _two_documents(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    device = model.device
    ids = torch.arange(3, 3 + _FIRST + _SECOND, device=device) % model.config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(_FIRST, device=device), torch.arange(_SECOND, device=device)])
    return ids[None], positions[None]


def _close(left: Tensor, right: Tensor, share: float) -> bool:
    """Whether the largest difference is at most this share of the largest value."""
    return bool((left - right).abs().max() <= share * right.abs().max())
