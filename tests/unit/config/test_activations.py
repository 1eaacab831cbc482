"""The estimate of activations against what autograd keeps for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from distill_rl.config.facts import ModelFacts
from distill_rl.config.memory import student_memory
from distill_rl.config.schema import Config, DataConfig, StudentConfig
from distill_rl.models.families import experts_per_token, visited_intermediate_size

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 352},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 176, "head_dim": 16},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 176},
    "qwen2_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 88, "shared_expert_intermediate_size": 96,
    },
}  # fmt: skip
TOLERANCE = 0.3
"""Of every estimate of memory (docs/benchmarks/memory.md)."""


def kept_bytes(config: Any) -> int:
    """Bytes that a forward pass over 2 rows of 256 leaves for the backward pass, weights excluded."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").model
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(input_ids=torch.randint(SIZES["vocab_size"], (2, 256)), use_cache=False)[0]
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


@pytest.mark.parametrize(("family", "head_dim"), [*((family, None) for family in MODELS), ("llama", 64)])
def test_estimated_activations_are_those_that_autograd_keeps(family: str, head_dim: int | None) -> None:
    wider = {} if head_dim is None else {"head_dim": head_dim}
    config = AutoConfig.for_model(family, **SIZES, **MODELS[family] | wider)
    facts = ModelFacts(
        family=family, parameters=0, hidden_size=128, intermediate_size=visited_intermediate_size(config), num_layers=2,
        num_heads=8, num_key_value_heads=4, vocabulary_columns=64, tied=False, bytes_on_disk=0, head_dim=head_dim,
        experts_per_token=experts_per_token(config),
    )  # fmt: skip
    run = Config(student=StudentConfig(model="s", dtype="fp32"), data=DataConfig(path="d", max_length=256))
    run.train.micro_batch_size = 2
    assert abs(student_memory(run, facts).activations / kept_bytes(config) - 1) < TOLERANCE
