from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from distill_rl.models import families
from distill_rl.models.families import family_of, sequence_parallel_problems, tensor_parallel_problems
from distill_rl.models.weights import skeleton


def llama(**settings: Any) -> LlamaConfig:
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}
    return LlamaConfig(**{**sizes, "vocab_size": 507, "num_hidden_layers": 3, **settings})


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_divisible_sizes_pass_with_any_vocabulary(tp: int) -> None:
    assert tensor_parallel_problems(llama(), tp) == []


@pytest.mark.parametrize(
    ("family", "sizes", "visited"),
    [
        ("llama", {}, (0, 96)),
        ("mixtral", {"num_experts_per_tok": 2}, (2, 192)),
        ("gpt_oss", {"num_experts_per_tok": 4}, (4, 384)),
        ("qwen3_moe", {"num_experts_per_tok": 8, "moe_intermediate_size": 10}, (8, 80)),
        (
            "qwen2_moe",
            {"num_experts_per_tok": 4, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 50},
            (4, 90),
        ),
        ("deepseek_v3", {"num_experts_per_tok": 6, "moe_intermediate_size": 10, "n_shared_experts": 2}, (6, 80)),
        ("llama4_text", {"num_experts_per_tok": 1}, (1, 192)),
    ],
)
def test_a_token_visits_its_experts_and_the_shared_ones(family: str, sizes: dict, visited: tuple[int, int]) -> None:
    config = AutoConfig.for_model(family, intermediate_size=96, **sizes)
    assert (families.experts_per_token(config), families.visited_intermediate_size(config)) == visited


def test_indivisible_sizes_are_shown_with_arithmetic() -> None:
    assert tensor_parallel_problems(llama(num_key_value_heads=2, intermediate_size=98), 4) == [
        "6 attention heads cannot be split evenly over parallel.tp = 4: 6 = 1 * 4 + 2",
        "2 key-value heads cannot be split evenly over parallel.tp = 4: 2 = 0 * 4 + 2",
        "98 intermediate features cannot be split evenly over parallel.tp = 4: 98 = 24 * 4 + 2",
    ]


def test_fused_projections_are_split_by_features() -> None:
    assert tensor_parallel_problems(GPT2Config(), 8) == []  # 12 heads of 64
    assert tensor_parallel_problems(Phi3Config(num_attention_heads=32, num_key_value_heads=2), 8) == []
    assert tensor_parallel_problems(GPT2Config(n_embd=20, n_head=5, n_inner=42), 4) == [
        "42 intermediate features cannot be split evenly over parallel.tp = 4: 42 = 10 * 4 + 2"
    ]
    small = Phi3Config(hidden_size=12, num_attention_heads=3, num_key_value_heads=1, intermediate_size=16)
    assert tensor_parallel_problems(small, 8) == [
        "20 query, key and value features cannot be split evenly over parallel.tp = 8: 20 = 2 * 8 + 4",
        "12 attention features cannot be split evenly over parallel.tp = 8: 12 = 1 * 8 + 4",
    ]


def test_family_without_plan_needs_one_rank() -> None:
    config = OPTConfig()
    assert tensor_parallel_problems(config, 1) == []
    (problem,) = tensor_parallel_problems(config, 2)
    assert "model family opt has no tensor-parallel plan, here or in transformers" in problem
    assert problem.endswith("set parallel.tp: 1")


def test_a_plan_of_transformers_says_whether_heads_are_split() -> None:
    by_heads = AutoConfig.for_model("glm4", num_attention_heads=6, num_key_value_heads=2)
    assert any("key-value heads" in line for line in tensor_parallel_problems(by_heads, 4)), "it gathers the MLP alone"
    gathered = AutoConfig.for_model("olmo2", num_attention_heads=6, num_key_value_heads=2, hidden_size=48)
    assert not any("heads" in line for line in tensor_parallel_problems(gathered, 4))


def test_positions_are_divided_where_heads_can_be() -> None:
    def found(config: PreTrainedConfig, sp: int, tp: int = 1) -> list[str]:
        return sequence_parallel_problems(config, sp, tp, "parallel.sp")

    assert [sp for sp in range(1, 8) if not found(llama(num_key_value_heads=1), sp)] == [1, 2, 3, 6]
    assert found(llama(), 2, tp=2) == [
        "parallel.sp: must divide the model's 3 attention heads of each of 2 tensor-parallel ranks; got 2; use one of 1, 3"
    ]
    assert found(GPT2Config(n_head=6), 3, tp=2) == [], "every rank has all heads of fused projections"
    assert found(AutoConfig.for_model("olmo2", num_attention_heads=6), 3, tp=2) == [], "Transformers' plan gathers them"
    (line,) = found(llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), 2)
    assert "rotary frequencies of type dynamic" in line


def test_unknown_family_has_no_plan_and_is_not_proven() -> None:
    config = llama()
    config.model_type = "never-heard-of"
    family = family_of(config)
    assert (family.layer_plan, family.proven) == ({}, False)


@pytest.mark.parametrize("config", [llama(), Qwen2Config(num_hidden_layers=3), Qwen3Config(num_hidden_layers=3)])
def test_decoder_layers_are_the_repeated_blocks_in_order(config: LlamaConfig) -> None:

    model = skeleton(config, dtype=torch.float32, attention="sdpa")
    assert families.decoder_layers(model) == list(model.model.layers)


def test_checking_a_plan_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys, distill_rl.models.families; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0
