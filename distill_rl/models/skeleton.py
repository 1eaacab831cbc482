"""The model without memory, on the meta device: what loading, `check` and adapters begin with;
and the buffers that no file holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distill_rl.errors import ConfigError, first_line
from distill_rl.models import varlen
from distill_rl.models.forward import use_own_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TABLE = "_weight_conversions"
"""Attribute of a model with its table, as Transformers names it."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def skeleton(config: PreTrainedConfig, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Returns the model without memory: every tensor is on the meta device, parameters in `dtype`.

    Its cache and the search for padding in its inputs are switched off.

    Args:
        attention: transformers' name of an implementation, or one of `OURS`.

    Raises:
        ConfigError: no causal LM of this config, or the attention implementation is not available.
    """
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    varlen.register()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"model type {config.model_type}",
            f"transformers must have it as a causal LM with {attention} attention",
            first_line(error),
            "try another setting of `attention`",
        ) from error
    # While its classes have their own names, which tables go by, and which FSDP2 changes.
    setattr(model, TABLE, get_model_conversion_mapping(model))
    without_cache(model)
    use_own_lengths(model)
    return model


def without_cache(model: PreTrainedModel) -> None:
    """Switches off a model's cache and the search for padding in its inputs."""
    # With a cache, packed documents would see each other; see forward.logits.
    model.config.use_cache = False
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # It searches for padding, which makes the host wait for the GPU in every forward.
            module.warn_if_padding_and_no_attention_mask = lambda *inputs: None  # type: ignore[assignment]


@torch.no_grad()
def restore_buffers(model: PreTrainedModel) -> None:
    """Recomputes the buffers that no file holds (rotary frequencies, embedding scales) after `to_empty`.

    Transformers' initialisation runs for their modules, with all parameters excluded, over two different fillings. A buffer
    that differs afterwards has not been recomputed.

    Raises:
        ConfigError: the model's initialisation does not set a buffer.
    """
    stored = set(model.state_dict())
    lost = {name: buffer for name, buffer in model.named_buffers() if name not in stored}
    owners = {name.rpartition(".")[0] for name in lost}
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # tells transformers to skip it
    results = []
    for filling in (0, 1):
        for buffer in lost.values():
            buffer.fill_(filling)
        for owner in owners:
            model._init_weights(model.get_submodule(owner))
        results.append({name: buffer.clone() for name, buffer in lost.items()})
    for parameter in model.parameters():
        del parameter._is_hf_initialized  # type: ignore[attr-defined]
    for name in lost:
        if not torch.equal(*(result[name] for result in results)):
            raise ConfigError(f"model type {model.config.model_type}", "every buffer must be recomputable", name)
