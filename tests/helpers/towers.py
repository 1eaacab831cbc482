"""Tiny random models that read images beside text, of the classes of transformers, written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.tokenizers import tiny_tokenizer

_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE: dict[str, Any] = {**_VISION, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_LLAMA4 = {"intermediate_size_mlp": 64, "num_local_experts": 2}
# family → (settings of the text, of the images, and of the whole)
_PARTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"model_type": "gemma3_text", "sliding_window": 8}, _IMAGE, {"mm_tokens_per_image": 4}),
    "llava": ({"model_type": "llama"}, {**_IMAGE, "model_type": "clip_vision_model"}, {}),
    "llama4": (_LLAMA4, {**_IMAGE, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}, {}),
    "mistral3": ({"model_type": "mistral"}, {**_IMAGE, "model_type": "pixtral"}, {}),
    "idefics3": ({"model_type": "llama"}, _IMAGE, {}),
    "internvl": ({"model_type": "qwen2"}, {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]}, {}),
    "qwen2_vl": ({"rope_parameters": _ROPE}, {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}, {}),
    "qwen2_5_vl": ({"rope_parameters": _ROPE}, {**_QWEN_VISION, "fullatt_block_indexes": [0]}, {}),
    "qwen3_vl": ({"rope_parameters": _ROPE}, {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, {}),
}
FAMILIES = tuple(_PARTS)


def write_tower_model(path: Path, family: str, *, tie: bool = False, seed: int = 0) -> Path:
    """Saves a random model of `family` with `tiny_tokenizer()` to the folder `path`, and returns it."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = tiny_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        **ids,
    }
    own, vision, whole = _PARTS[family]
    config = AutoConfig.for_model(
        family, text_config=text | own, vision_config=vision, **whole, **ids, tie_word_embeddings=tie
    )
    for name in ("image_token_id", "video_token_id"):
        if hasattr(config, name):
            setattr(config, name, len(tokenizer) - 1)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for name, parameter in model.named_parameters():
            if "vision" not in name and "visual" not in name and parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
