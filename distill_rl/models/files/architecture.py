"""What kind of model a config.json describes, and whether it is one that can be trained or teach here.

Transformers' own mappings decide, so a family that it adds needs no change. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.errors import problem
from distill_rl.models.files.tower import is_joined, no_tower, text_tower

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
    from transformers import AutoConfig

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = config["model_type"]
    rule = ""
    if is_joined(config):
        try:
            whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception:  # every field has a validator with its own exceptions; read_config reports it
            return []
        if text_tower(whole) is None:
            return [problem(key, f"must be a causal language model; {no_tower(family)}", None, _REMEDY)]
    elif family not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or config.get("is_encoder_decoder"):
        rule = _kind_of(family, config)
    elif family in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder"):
        rule = "is an encoder, whose attention sees the tokens that are to be predicted"
    if not rule:
        return []
    return [problem(key, f"must be a causal language model; {family} {rule}", None, _REMEDY)]


def tower_note(key: str, folder: Path, tower: PreTrainedConfig) -> list[str]:
    """Returns one line if a folder holds a model with several towers, of which only the text is used.

    Args:
        key: the setting that names the model, for the line.
        tower: the config that `read_config` returns.
    """
    family = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    if family == tower.model_type:
        return []
    (name,) = tower.architectures or [tower.model_type]
    return [f"{key}: of {family} the text tower is taken, as {name}; tensors for images or sound are not read"]


def _kind_of(family: str, config: Mapping[str, Any]) -> str:
    """What a family is that transformers does not list as a causal language model, in words."""
    import transformers.models.auto.modeling_auto as auto

    if config.get("is_encoder_decoder") or family in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "is an encoder-decoder"
    if family in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "is an encoder"
    return "is none in transformers"


def stateful_layers(hf_config: Any) -> list[str]:
    """The kinds of layers, by transformers' `layer_types`, that carry a state across the ends of packed documents."""
    kinds = getattr(hf_config, "layer_types", None) or ()
    return sorted({str(kind) for kind in kinds if any(part in str(kind) for part in _STATEFUL)})
