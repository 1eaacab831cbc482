"""Tries out a loaded model of a family that the tests do not cover, on a dozen tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distill_rl.errors import ConfigError, first_line
from distill_rl.models import forward
from distill_rl.models.attention import varlen
from distill_rl.models.parallelize import reshard
from distill_rl.parallel.sequence import own_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from distill_rl.parallel.mesh import World

_FIRST, _SECOND = 5, 7
"""Lengths of the two documents that are packed into one row."""


@torch.no_grad()
def probe(model: PreTrainedModel, *, packing: bool, chunked_head: bool, world: World) -> None:
    """Tries out a model of a family that the tests do not cover, on a dozen tokens. Leaves the model as it was.

    Collective over the model's ranks.

    Raises:
        ConfigError: documents in one row see each other (checked with `packing`), the logits cannot be computed from
            hidden states (checked with `chunked_head`), or they change if positions are divided over ranks (checked
            with sp).
    """
    training, family = model.training, f"model type {model.config.model_type}"
    model.eval()
    try:
        with _attention(model, "eager") if world.sp > 1 else nullcontext():  # whole rows, in the model's own way
            if packing and packing_leaks(model):
                rule = "documents packed into one row must not see each other"
                raise ConfigError(family, rule, "they do", "set data.packing: false")
            if chunked_head and not head_is_known(model):
                rule = "logits must follow from hidden states and the output embedding"
                raise ConfigError(family, rule, "they differ from the model's own", "use a teacher of another family")
        if world.sp > 1 and (why := undivided(model, world, packing=packing)) is not None:
            rule = "logits must not change if the positions of rows are divided over ranks"
            raise ConfigError(family, rule, why, "set parallel.sp: 1")
    finally:
        model.train(training)
        reshard(model)  # or the optimizer would be given the gathered copies


def packing_leaks(model: PreTrainedModel) -> bool:
    """Whether the logits of a row's second document depend on the first one, or on its position in the row.

    Runs the model three times. Collective over its ranks.
    """
    ids, positions = _two_documents(model)
    other = ids.clone()
    other[:, :_FIRST] = other[:, :_FIRST].flip(1)
    packed, after_another, alone = (
        forward.logits(model, *inputs).float()[:, -_SECOND:]
        for inputs in ((ids, positions), (other, positions), (ids[:, _FIRST:], positions[:, _FIRST:]))
    )
    # Equal shapes round alike, whereas another row length may round differently; hence the two bounds.
    return not (_close(packed, after_another, 1e-4) and _close(packed, alone, 3e-2))


def undivided(model: PreTrainedModel, world: World, *, packing: bool) -> str | None:
    """Why a model's rows cannot be divided over the ranks of `world`; None if the logits are those of whole rows.

    Collective. Whole rows go through `eager` attention, which every family has in its own way.

    Args:
        packing: try a row of two documents; otherwise of one.
    """
    ids, positions = _two_documents(model, multiple=world.sp)
    if not packing:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with _attention(model, "eager"):
        whole = forward.logits(model, ids, positions).float()
    part, host = own_positions(world, ids.shape[1]), positions.cpu().numpy()
    documents = varlen.Documents.of(host, ids.device, world.sp_group)
    why = None
    try:
        divided = forward.logits(model, ids[:, part], positions[:, part], documents).float()
        close = _close(divided, whole[:, part], 3e-2)
    except (ValueError, RuntimeError) as error:
        close, why = False, first_line(error)
    return None if world.all_agree(close) else why or "they do"


@contextmanager
def _attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Lets a model use another attention implementation inside the block."""
    config: Any = model.config
    kept = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = kept


def head_is_known(model: PreTrainedModel) -> bool:
    """Whether `forward.head` of `forward.body` gives the model's own logits, up to rounding. Collective.

    The model must be without FSDP.
    """
    ids, positions = _two_documents(model)
    whole = forward.logits(model, ids, positions).float()
    return _close(forward.head(model, forward.body(model, ids, positions)).float(), whole, 1e-3)


def _two_documents(model: PreTrainedModel, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Made-up ids and positions [1, n] of two packed documents: positions start again at 0 in the second.

    Args:
        multiple: makes the second document longer, so that n is a multiple of this.
    """
    device, second = model.device, _SECOND + -(_FIRST + _SECOND) % multiple
    ids = torch.arange(3, 3 + _FIRST + second, device=device) % model.config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(_FIRST, device=device), torch.arange(second, device=device)])
    return ids[None], positions[None]


def _close(left: Tensor, right: Tensor, share: float) -> bool:
    """Whether the largest absolute difference is at most this share of the largest absolute value of `right`."""
    return bool((left - right).abs().max() <= share * right.abs().max())
