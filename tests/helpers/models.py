"""Tiny random causal language models of several families, written as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.tokenizers import tiny_tokenizer

# `tiny_config` also knows the mixtures of experts mixtral and qwen3_moe.
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2")


def tiny_config(
    family: str,
    *,
    vocab_size: int,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    tie: bool = False,
    positions: int = 512,
    special_ids: dict[str, int] | None = None,
) -> Any:
    """The transformers config of a tiny model; gpt2 has no separate number of key-value heads."""
    from transformers import (
        GPT2Config,
        LlamaConfig,
        MistralConfig,
        MixtralConfig,
        Phi3Config,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": tie,
        "initializer_range": 0.1,
        **(special_ids or {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}),
    }
    if family == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(n_embd=hidden, n_layer=layers, n_head=heads, n_positions=positions, **dropouts, **common)
    common |= {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }
    if family == "qwen3":
        return Qwen3Config(head_dim=hidden // heads, **common)
    if family == "mistral":
        return MistralConfig(sliding_window=None, **common)
    if family == "phi3":
        return Phi3Config(original_max_position_embeddings=positions, **common)
    if family == "mixtral":
        return MixtralConfig(num_local_experts=4, num_experts_per_tok=2, sliding_window=None, **common)
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden, "norm_topk_prob": True}
        return Qwen3MoeConfig(head_dim=hidden // heads, decoder_sparse_step=1, mlp_only_layers=[], **experts, **common)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[family](**common)


def write_tiny_model(
    path: str | Path,
    family: str = "llama",
    *,
    vocab_size: int | None = None,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    tie: bool = False,
    dtype: str = "float32",
    tokenizer: Any = None,
    positions: int = 512,
) -> Path:
    """Save a random model of `family` with its tokenizer to the folder `path`, and return it.

    `vocab_size` counts the columns of the embedding table, which may exceed the tokenizer's ids (padded tables);
    None: as many as the tokenizer has. `tokenizer` defaults to `tiny_tokenizer()`. Vectors (norms, biases) are random
    too, so that a bias added twice or a norm left out changes the result. The caller's random state is untouched.
    """
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    special_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = tiny_config(
        family,
        vocab_size=len(tokenizer) if vocab_size is None else vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        tie=tie,
        positions=positions,
        special_ids=special_ids,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    end_of_turn = tokenizer.added_tokens_encoder.get("<|end|>")
    if end_of_turn is not None:
        stops = {"eos_token_id": [special_ids["eos_token_id"], end_of_turn]}
        (Path(path) / "generation_config.json").write_text(json.dumps(stops))
    return Path(path)


def ask_otherwise(folder: Path, change: str) -> None:
    """Gives a model's folder another `chat template`, other `ends of text` or another `tokenizer`; its weights and
    config.json stay."""
    if change == "chat template":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %} Answer:"
        tokenizer.save_pretrained(folder)
    elif change == "ends of text":
        merged = list(range(262, 320))  # tokens of more than a byte
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": merged}))
    else:
        assert change == "tokenizer"
        tiny_tokenizer(seed=3).save_pretrained(folder)
