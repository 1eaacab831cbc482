"""The model without memory, on the meta device: what loading, `check` and `student.lora` begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distill_rl.errors import ConfigError, first_line
from distill_rl.models.attention import varlen
from distill_rl.models.conversion import TABLE
from distill_rl.models.rotary import use_own_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

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
