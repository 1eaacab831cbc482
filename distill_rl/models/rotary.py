"""Rotary frequencies that depend on the length of the text, taken from every document alone.

With `longrope` (Phi-3.5, Phi-4-mini) documents longer than those of the pretraining have other frequencies; with `dynamic`
they follow from the length itself. Transformers takes the length from the largest position of the call, so that a document's
logits would depend on the other documents of its micro-batch and on the padding. Here each document has the
frequencies that it has alone:

1. The length of every position's document follows from the positions, which begin at 0 in each. Padding must therefore be
   a document of its own (`inputs.with_padding_apart`).
2. The family's own function computes cosines and sines once per set of frequencies: for `longrope` there are two, for
   `dynamic` one for all documents up to the original length and one for every greater length. It is led to a set by a
   further column with the length's last position, which is cut off again.
3. Each position takes them from the set of its document.

Shapes: R rows, S positions, E rotated features per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distill_rl.errors import ConfigError
from distill_rl.models.families import length_limit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def use_own_lengths(model: PreTrainedModel) -> None:
    """Gives every document the rotary frequencies of its own length, if they depend on it (`families.length_limit`).

    A position whose document is not in the call from its beginning, as in generation with a cache, counts as the last one
    of its document.

    Raises:
        ConfigError: the family computes such frequencies in a way that is not known here.
    """
    limit = length_limit(model.config)
    if limit is None:
        return
    rotary = [module for module in model.modules() if hasattr(module, "rope_type") and _frequencies(module)]
    if not rotary:
        rule = (
            f"the family's rotary frequencies of type {limit.kind} must be known, because they follow from the length"
        )
        raise ConfigError(f"model type {model.config.model_type}", rule, remedy="use a model of another family")
    for module in rotary:
        original = type(module).forward
        module.forward = partial(_by_document, module, original, limit.length)  # type: ignore[method-assign]


def row_positions(hf_config: PreTrainedConfig, lengths: Sequence[int], width: int, device: torch.device) -> Tensor:
    """The positions of rows that hold one document each, with padding on the right; int64 [R, width].

    Padding continues the document, or is one of its own if the lengths of documents matter to the model.

    Args:
        lengths: tokens of each row, at most `width`.
    """
    columns = torch.arange(width, device=device).expand(len(lengths), -1)
    if length_limit(hf_config) is None:
        return columns
    used = torch.tensor(lengths, device=device)[:, None]
    return torch.where(columns < used, columns, columns - used)


def document_lengths(position_ids: Tensor) -> Tensor:
    """The length of the document of every position, as far as the row shows it; integers [R, S].

    Args:
        position_ids: integers [R, S], rising by one within a document.
    """
    columns = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    last = torch.ones_like(position_ids, dtype=torch.bool)
    last[:, :-1] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    ends = torch.where(last, columns, position_ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return position_ids.gather(1, ends) + 1


@torch.no_grad()
def _by_document(
    module: nn.Module, original: Any, limit: int, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    kinds = module.rope_type
    kind = str(kinds[layer_type] if layer_type is not None and isinstance(kinds, dict) else kinds)
    further = {} if layer_type is None else {"layer_type": layer_type}
    if kind not in ("longrope", "dynamic"):
        return original(module, x, position_ids, **further)
    # All lengths with the same frequencies become one: those up to the limit, and for longrope those beyond it.
    lengths = document_lengths(position_ids).clamp(min=limit)
    if kind == "longrope":
        lengths = lengths.clamp(max=limit + 1)
    found: tuple[Tensor, Tensor] | None = None
    for length in lengths.unique().tolist():
        _forget_lengths(module)
        here = lengths == length
        # Positions of longer documents would choose the frequencies.
        column = position_ids.new_full((len(position_ids), 1), length - 1)
        asked = torch.cat([torch.where(here, position_ids, 0), column], dim=1)
        each = original(module, x, asked, **further)
        cos, sin = (tensor[:, :-1] for tensor in each)
        where = here[..., None]
        found = (cos, sin) if found is None else (torch.where(where, cos, found[0]), torch.where(where, sin, found[1]))
    assert found is not None, "a call has at least one position"
    return found


def _frequencies(module: nn.Module) -> dict[str, Tensor]:
    """The frequencies of the pretraining, by the name under which a module reads those in use; one set per type of layer."""
    suffix = "original_inv_freq"
    buffers = module.named_buffers(recurse=False)
    return {name.replace("original_", ""): buffer for name, buffer in buffers if name.endswith(suffix)}


def _forget_lengths(module: Any) -> None:
    """Undoes what Transformers keeps of earlier calls: the longest one's frequencies."""
    for name, frequencies in _frequencies(module).items():
        setattr(module, name, frequencies)
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, module.original_max_seq_len)
    for name in [name for name in vars(module) if name.endswith("long_inv_freq")]:
        delattr(module, name)  # with types of layers, its second use fails in Transformers 5.19
