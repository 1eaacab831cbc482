"""Buffers of a model that no file holds, such as rotary frequencies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distill_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
