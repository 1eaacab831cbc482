"""The forward pass of any model: rows to logits, in one call or by body and head.

Shapes: R rows, S positions, H hidden size, V vocabulary (a tensor-parallel rank holds a part of it).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedConfig, PreTrainedModel

from distill_rl.models.varlen import Documents, needs_documents, reads_documents


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
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "attention_mask": None,
        "use_cache": False,
    }
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
