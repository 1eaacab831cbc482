"""What kind of model a config.json describes, and whether it is one that can be trained or teach here.

Transformers' own mappings decide, so a family that it adds needs no change. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill_rl.errors import problem

_REMEDY = "use a decoder-only language model, such as Llama, Qwen or Mistral"
_STATEFUL = ("mamba", "recurrent", "conv", "linear_attention")
"""Parts of the names in `layer_types` of layers that carry a state from token to token, whatever the positions are."""


def architecture_problems(key: str, folder: Path) -> list[str]:
    """Returns why a model is no causal language model of text: one line, or an empty list if it is one.

    Args:
        key: the setting that names the model, for the line.
        folder: has a config.json in which `folder_problems` finds nothing.
    """
    import transformers.models.auto.modeling_auto as auto

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = config["model_type"]
    rule = ""
    if family not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or config.get("is_encoder_decoder"):
        rule = _kind_of(family, config)
    elif family in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or has_towers(config):
        rule = "reads images or sound beside text, and only models of text can be trained or teach here"
    elif family in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder"):
        rule = "is an encoder, whose attention sees the tokens that are to be predicted"
    if not rule:
        return []
    return [problem(key, f"must be a causal language model; {family} {rule}", None, _REMEDY)]


def has_towers(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes several models that are joined, such as one for text and one for images."""
    return any(isinstance(config.get(f"{part}_config"), Mapping) for part in ("text", "vision", "audio", "thinker"))


def _kind_of(family: str, config: Mapping[str, Any]) -> str:
    """What a family is that transformers does not list as a causal language model, in words."""
    import transformers.models.auto.modeling_auto as auto

    if has_towers(config) or family in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return "reads images or sound beside text, and only models of text can be trained or teach here"
    if config.get("is_encoder_decoder") or family in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "is an encoder-decoder"
    if family in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "is an encoder"
    return "is none in transformers"


def stateful_layers(hf_config: Any) -> list[str]:
    """The kinds of layers, by transformers' `layer_types`, that carry a state across the ends of packed documents."""
    kinds = getattr(hf_config, "layer_types", None) or ()
    return sorted({str(kind) for kind in kinds if any(part in str(kind) for part in _STATEFUL)})
