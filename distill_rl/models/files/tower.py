"""The text tower of a model that also reads images or sound: its config, and its tensors among those of the whole.

Transformers has most text towers as causal language models of their own. Such a model is trained, teaches and is
exported as that: the other towers are neither built nor read. Nothing here imports torch.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_EQUIVALENT = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text towers that transformers has under another name: for text, whose three position ids are equal, mrope is rope."""
_SEES_AHEAD = frozenset({"paligemma"})
"""Families that attend to a prompt in both directions, which their causal text tower does not."""
_TOWER = r"^(?:model\.)?(?:language_model|text_model)\."
TOWER_NAMES = {_TOWER + r"(?=(?:model|lm_head)\.)": "", _TOWER + r"(?!(?:model|lm_head)\.)": "model."}
"""Patterns and replacements that turn the name of a tower's tensor into that in the causal language model."""
_PLAIN = re.compile(r"lm_head\.|model\.(?:embed_tokens|layers|norm)\.")
"""Tensors of the text tower that some files hold under the names of the causal language model."""


def is_joined(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes several models that are joined, such as one for text and one for images."""
    import transformers.models.auto.modeling_auto as auto

    parts = ("text", "vision", "audio", "thinker")
    return config.get("model_type") in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or any(
        isinstance(config.get(f"{part}_config"), Mapping) for part in parts
    )


def text_tower(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Returns the config of a joined model's text tower as a causal language model of its own.

    It has the embedding tying, special tokens and dtype of the whole. None if the model is not a joined one, or
    transformers has no causal language model that computes what the text tower does.
    """
    import transformers.models.auto.modeling_auto as auto

    part = getattr(config, "text_config", None)
    if part is None or config.model_type in _SEES_AHEAD:
        return None
    family = _EQUIVALENT.get(part.model_type, part.model_type)
    name = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    if name is None or part.is_encoder_decoder or family in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return None
    tower = copy.deepcopy(part) if family == part.model_type else _renamed(part, family)
    tower.architectures = [name] if isinstance(name, str) else list(name[:1])
    tower.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype"):
        value = getattr(config, key, None)
        if value is not None:
            setattr(tower, key, value)
    return tower


def no_tower(family: str) -> str:
    """Why a joined model cannot be used, as a rule for a message: `text_tower` gives None."""
    return (
        f"{family} reads images or sound beside text, and transformers has no causal language model of its text alone"
    )


def _renamed(part: PreTrainedConfig, family: str) -> PreTrainedConfig:
    """The config of an equivalent family, with plain rotary positions."""
    from transformers import AutoConfig

    settings = part.to_dict()
    settings.pop("model_type", None)
    rope = settings.pop("rope_parameters", None) or {}
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    return AutoConfig.for_model(family, **settings, rope_parameters=rope)


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the tensors of the text tower among those of a joined model, under the names of the causal language model.

    Files call them `language_model.model.layers…`, `model.language_model.layers…` or `model.text_model.layers…`, each
    with `lm_head` inside or outside; some have the plain names.

    Returns:
        Name in the files by name in the causal language model. The tensors of other towers are left out.
    """
    found = {}
    for name in names:
        inner = name
        for pattern, replacement in TOWER_NAMES.items():
            inner = re.sub(pattern, replacement, inner)
        if inner != name or _PLAIN.match(name):
            found[inner] = name
    return found
