"""Tiny random models that tests.helpers.models does not offer, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.models import FAMILIES, write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# name → (config class of transformers, what differs from the common sizes)
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-scaled": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "mistral-window": ("MistralConfig", {"sliding_window": 4}),
    "qwen3-wide-heads": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {**_GEMMA, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "olmo2": ("Olmo2Config", {}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "recurrent-gemma": ("RecurrentGemmaConfig", {"lru_width": 32, "logits_soft_cap": 2.0}),
    "falcon-h1": ("FalconH1Config", {"head_dim": 8, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
}

_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_HEADS = {"head_dim": 8}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
# model_type → what differs from the common sizes; of a mixture, _EXPERTS with it
DENSE: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {}, "bitnet": {}, "cohere": {}, "cohere2": {}, "ernie4_5": {}, "exaone4": {},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True}, "gemma": _HEADS,
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 1.0},
    "gemma3_text": _GEMMA, "glm": _HEADS, "glm4": _HEADS, "gpt2": _GPT, "gpt_neox": {},
    "gptj": {**_GPT, "rotary_dim": 4}, "granite": {}, "helium": _HEADS, "llama": {}, "ministral": _HEADS, "mistral": {},
    "nemotron": _HEADS, "olmo": {}, "olmo2": {}, "olmo3": {}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi": {}, "phi3": {}, "qwen2": {}, "qwen3": _HEADS, "seed_oss": _HEADS, "smollm3": {}, "stablelm": {},
    "starcoder2": {},
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT, "deepseek_v3": _LATENT, "dots1": _HEADS, "glm4_moe": _HEADS,
    "gpt_oss": {**_HEADS, "sliding_window": 64}, "granitemoe": {}, "llama4_text": _HEADS, "mixtral": {}, "olmoe": {},
    "qwen2_moe": {"decoder_sparse_step": 1}, "qwen3_moe": _HEADS,
}  # fmt: skip
_INDEXER = {"index_n_heads": 16, "index_head_dim": 8}
"""With few heads many scores are exactly 0, and which of them are chosen is arbitrary."""
UNLISTED: dict[str, dict[str, Any]] = {
    "deepseek_v32": _EXPERTS | _LATENT | _INDEXER,
    "deepseek_v4": _EXPERTS | _INDEXER | {
        "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "num_hash_layers": 0,
        "layer_types": ["heavily_compressed_attention"] * 2,
    },
    "doge": {},
    "gemma4_text": {**_HEADS, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300},
    "minimax_m3_vl_text": _EXPERTS | _HEADS | {
        "index_n_heads": 2, "index_head_dim": 8, "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "ministral3": _HEADS,
    "modernbert-decoder": {},
}  # fmt: skip
"""Families that are not in the list of docs/models.md, and what differs from the common sizes."""
LEAKING = frozenset({"falcon", "gpt_oss", "opt"})
"""Families whose documents see each other in one row, and which need data.packing: false."""
UNSPLIT = frozenset(
    {"apertus", "deepseek_v2", "llama4_text"}
    | {"bitnet", "falcon", "gpt_oss", "gptj", "granitemoe", "nemotron", "opt", "stablelm"}
)
"""Families that cannot be tensor-parallel: because transformers' plan gives another result here, or because it has none."""
EAGER = frozenset({"gemma2", "gpt_oss", "gptj"})
"""Families that are run with eager attention: Transformers has no sdpa for them or, for Gemma 2, none with its soft cap."""


def family_config(model_type: str, **settings: Any) -> Any:
    """The config of a model of DENSE, MIXTURES or UNLISTED; settings take the place of its own."""
    from transformers import AutoConfig

    own = _EXPERTS | MIXTURES[model_type] if model_type in MIXTURES else (DENSE | UNLISTED)[model_type]
    return AutoConfig.for_model(model_type, **{**_SIZES, "tie_word_embeddings": False, **own, **settings})


def write_family(path: Path, model_type: str, **settings: Any) -> Path:
    """A model of `family_config` with a tokenizer, saved to `path`. Vectors are random too, and weights are large, so
    that a tensor in the wrong place changes the logits."""
    from transformers import AutoModelForCausalLM

    config = family_config(model_type, **settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def write_model(path: Path, name: str, **settings: Any) -> Path:
    """One of `tests.helpers.models.FAMILIES` or of the configs above, saved to `path`."""
    if name in FAMILIES:
        return write_tiny_model(path, name, **settings)
    import transformers
    from transformers import AutoModelForCausalLM

    if name == "recurrent-gemma" and transformers.__version__ < "5.19":
        pytest.skip("this release of transformers cannot run recurrent-gemma without an attention layer")
    class_name, own = _CONFIGS[name]
    config = getattr(transformers, class_name)(**{**_SIZES, **own, **settings})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path
