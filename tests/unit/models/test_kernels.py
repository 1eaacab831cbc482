"""`student.kernels: liger`: what it refuses, and what it replaces (with the real package, if it can be imported)."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from distill_rl.errors import ConfigError
from distill_rl.models.families import LIGER, liger_problems, use_liger
from distill_rl.models.weights import skeleton

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
}
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def test_unsupported_families_and_activations_are_named():
    assert CONFIGS.keys() == {*LIGER}
    assert [liger_problems(make(**SIZES)) for make in CONFIGS.values()] == [[]] * 4
    assert liger_problems(Gemma2Config(**SIZES)) == ["liger replaces parts of llama, mistral, qwen2, qwen3; got gemma2"]
    assert liger_problems(LlamaConfig(**SIZES, hidden_act="gelu")) == ["liger's MLP needs hidden_act silu; got gelu"]


def test_missing_package_and_family_give_one_line_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    model = skeleton(LlamaConfig(**SIZES), dtype=torch.float32, attention="sdpa")
    with pytest.raises(ConfigError, match=r"^student\.kernels: liger needs liger_kernel .* pip install -e .*\[liger\]"):
        use_liger(model)
    model.config.model_type = "gpt2"
    with pytest.raises(
        ConfigError, match=r"^student\.kernels: liger replaces parts of .*; got gpt2; set student\.kernels=torch$"
    ):
        use_liger(model)


@pytest.mark.parametrize("name", LIGER)
def test_only_norms_mlp_and_rotary_embedding_are_replaced(name: str, monkeypatch: pytest.MonkeyPatch):
    liger = pytest.importorskip("liger_kernel.transformers")
    model = skeleton(CONFIGS[name](**SIZES), dtype=torch.float32, attention="sdpa")
    module = sys.modules[type(model).__module__]
    for replaced in [each for each in vars(module) if each.endswith(("RMSNorm", "MLP", "rotary_pos_emb"))]:
        monkeypatch.setattr(module, replaced, getattr(module, replaced))  # restored after the test
    names, forward = list(model.state_dict()), model.forward
    use_liger(model)
    assert module.apply_rotary_pos_emb is liger.liger_rotary_pos_emb
    by_class = {"RMSNorm": liger.LigerRMSNorm.forward, "MLP": liger.LigerSwiGLUMLP.forward}
    found = []
    for child in model.modules():
        for suffix, wanted in by_class.items():
            if type(child).__name__.endswith(suffix):
                found.append(child.forward.__func__ is wanted)
    norms = 4 if name == "qwen3" else 2
    assert found == [True] * (1 + 2 * (norms + 1))
    assert (list(model.state_dict()), model.forward) == (names, forward), "the model's own forward and loss stay"
    assert all(parameter.is_meta for parameter in model.parameters())
