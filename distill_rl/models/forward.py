"""How any model is called: numpy rows become tensors, and these become logits, in one call or by body and head.

Shapes: R rows, S positions, H hidden size, V vocabulary (a tensor-parallel rank holds a part of it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from distill_rl.errors import ConfigError
from distill_rl.models.families import length_limit
from distill_rl.models.varlen import Documents, needs_documents, reads_documents
from distill_rl.types import RankBatch, TokenRows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PINNED_BYTES = 64 * 2**20
"""A top-k target with 64 entries takes 3 MiB per 8,192 tokens; whole logits take gigabytes, too much to page-lock."""


def micro_batches(batch: RankBatch, size: int, *, padding_apart: bool = False) -> Iterator[tuple[int, TokenRows]]:
    """Yields the batch in order, `size` rows at a time: the global index of the first row, and the rows.

    Each micro-batch is as wide as its rows need, so the widths differ. Rows that a teacher is not asked for are left out
    (`RankBatch.asked`), and so are micro-batches of such rows alone.

    Args:
        padding_apart: the padding of a row is a document of its own, for a model to which the lengths of documents matter
            (`use_own_lengths`).
    """
    for start in range(0, batch.rows.shape[0], size):
        rows = batch.rows[start : start + size]
        if batch.asked is not None:
            asked = batch.asked[start : start + size]
            if not asked.any():
                continue
            rows = rows[asked]
        cut = rows.cut()
        yield batch.first_row + start, with_padding_apart(cut) if padding_apart else cut


def with_padding_apart(rows: TokenRows) -> TokenRows:
    """The rows with positions that begin again at 0 where the padding begins."""
    if rows.used is None:
        return rows
    columns, used = np.arange(rows.shape[1], dtype=np.int32), rows.used[:, None]
    return replace(rows, position_ids=np.where(columns < used, rows.position_ids, columns - used))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An int64 copy on `device`. The array may be a read-only view of shared memory.

    The host does not wait: a GPU copies from page-locked memory, after the work queued on its stream.
    """
    return tensor_to_device(torch.tensor(array, dtype=torch.int64), device)


def tensor_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns `tensor` on `device`: a copy, or `tensor` itself if it is there already.

    If it was copied from host memory to a GPU, the memory of `tensor` may be reused as soon as this returns. The host
    waits only for copies larger than PINNED_BYTES; smaller ones go through page-locked memory, which torch reuses once
    the device has read it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.nbytes > PINNED_BYTES:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


# Rotary frequencies that depend on the length of the text are taken from every document alone.
#
# With `longrope` (Phi-3.5, Phi-4-mini) documents longer than those of the pretraining have other frequencies; with `dynamic`
# they follow from the length itself. Transformers takes the length from the largest position of the call, so that a document's
# logits would depend on the other documents of its micro-batch and on the padding. Here each document has the
# frequencies that it has alone:
#
# 1. The length of every position's document follows from the positions, which begin at 0 in each. Padding must therefore be
#    a document of its own (`with_padding_apart`).
# 2. The family's own function computes cosines and sines once per set of frequencies: for `longrope` there are two, for
#    `dynamic` one for all documents up to the original length and one for every greater length. It is led to a set by a
#    further column with the length's last position, which is cut off again.
# 3. Each position takes them from the set of its document.


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
        frequencies = f"the family's rotary frequencies of type {limit.kind}"
        rule = f"{frequencies} must be known, because they follow from the length"
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


# The forward pass of any model: rows to logits, in one call or by body and head.


def logits(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, documents: Documents | None = None
) -> Tensor:
    """The whole forward pass. A sharded student must be called this way.

    No mask is passed: attention is causal, and a restart of `position_ids` begins a new document that sees nothing of
    the previous one. That holds only as long as there is neither a mask nor a cache.

    Args:
        input_ids: integers [R, S]; under sequence parallelism this rank's positions [R, S / sp].
        position_ids: integers of the same shape, from 0 in every document.
        documents: of the whole rows. None: read from the device if the model needs them, which waits for the device;
            not under sequence parallelism, where no rank has the whole rows there.

    Returns:
        [R, S, V] in the compute dtype; under tensor parallelism a DTensor sharded over its last dimension.
    """
    return model(**_forward_arguments(model, input_ids, position_ids, documents)).logits


Result = TypeVar("Result")
Compute = Callable[[Tensor, nn.Module], Result]
"""Called with the hidden states [R, S, H] and the output layer, whose parameters are gathered."""


def with_hidden(
    model: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    compute: Compute[Result],
    documents: Documents | None = None,
) -> Result:
    """The forward pass up to the output layer, then `compute` in place of that layer. For any model, sharded too.

    Requires `enter_at_hidden`. Other arguments as in `logits`.

    Args:
        compute: its result may be backpropagated; tensors in it must be in a pytree, where FSDP2 finds them.
    """
    entered: Any = model
    return entered._distill_rl_body(_forward_arguments(model, input_ids, position_ids, documents), compute)


def enter_at_hidden(model: PreTrainedModel) -> None:
    """Makes `with_hidden` possible: gives model and output layer a second forward method. Call it once, after FSDP2.

    FSDP2 gathers and frees weights around the forward of the module that owns them, so whatever computes with the
    output layer's weight must run inside a forward of the model and, unless embeddings are tied, of that layer.
    """
    head = model.get_output_embeddings()
    for module, method in ((model, _body), (head, _head)):
        name = f"_distill_rl{method.__name__}"
        setattr(module, name, MethodType(method, module))
        register_fsdp_forward_method(module, name)


def _body(model: PreTrainedModel, arguments: dict[str, Any], compute: Compute[Result]) -> Result:
    hidden = inner_model(model)(**arguments).last_hidden_state
    return model.get_output_embeddings()._distill_rl_head(hidden, compute)


def _head(layer: nn.Module, hidden: Tensor, compute: Compute[Result]) -> Result:
    return compute(hidden, layer)


def body(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, documents: Documents | None = None) -> Tensor:
    """Everything before the head: hidden states [R, S, H], complete on every tensor-parallel rank.

    For models without FSDP (teachers), because a sharded model must be entered through its root. Arguments as in
    `logits`.
    """
    return inner_model(model)(**_forward_arguments(model, input_ids, position_ids, documents)).last_hidden_state


def inner_model(model: PreTrainedModel) -> Any:
    """The model without its head. Llama 4's causal language model names a prefix that only its multimodal one has."""
    inner = model.base_model
    return model.model if inner is model else inner


def head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits of hidden states [..., H], with the family's scale and soft cap, sharded like those of `logits`."""
    return output_head(model)(hidden)


def output_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The function `head` of one model, which keeps its output layer and nothing else of it."""
    layer = model.get_output_embeddings()
    scale, softcap = scale_and_cap(model.config)

    def logits(hidden: Tensor) -> Tensor:
        out = layer(hidden)
        if scale != 1:
            out = out * scale
        if softcap is not None:
            out = (out / softcap).tanh() * softcap
        return out

    return logits


def scale_and_cap(hf_config: PreTrainedConfig) -> tuple[float, float | None]:
    """Returns the family's factor on the output layer's result (1 if none) and the soft cap of the product, or None."""
    config: Any = hf_config
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite
        scale /= config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere
        scale *= config.logit_scale
    return scale, getattr(config, "final_logit_softcapping", None) or None  # Gemma


def _forward_arguments(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, documents: Documents | None
) -> dict[str, Any]:
    # If its attention reads documents and `documents` is None, they are derived from `position_ids`, which waits for
    # the device.
    inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids}
    inputs |= {"attention_mask": None, "use_cache": False}
    if not reads_documents(model.config):
        return inputs  # transformers finds the documents from the positions and makes a mask
    if documents is None:
        documents = Documents.of(position_ids.cpu().numpy(), position_ids.device)
    width = input_ids.shape[1]
    if documents.group is not None:
        inputs["sequence_group"] = documents.group
        width *= documents.group.size()
    if needs_documents(model.config, width, one_per_row=documents.one_per_row):
        inputs |= documents.arguments()
    return inputs
