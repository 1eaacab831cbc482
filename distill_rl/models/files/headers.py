"""The safetensors of a model folder: which files, what their headers say, and which tensors are the language model's.

No weight is read, and nothing here imports torch."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.errors import problem
from distill_rl.models.families import head_size

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

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor in a model's files, by name."""
_NAMED = 3
"""Number of tensors that a line names."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that can be read, as safetensors names them."""
TIED_APART, UNTIE = "must be equal, because config.json ties them", "set tie_word_embeddings: false in config.json"
"""The rule about tensors that are one in the model, and what to do."""
_SAMPLES, _SAMPLE_BYTES = 64, 64 * 2**10


def read_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the entry in the header (`dtype`, `shape` and place) of every tensor of a causal language model, by name.

    Of a model with several towers these are the tensors of the text tower. For a folder in which `weight_problems` finds nothing.
    """
    headers = (_header(file) for file in weight_files(folder))
    entries = {name: entry for header in headers for name, entry in header.items() if name != "__metadata__"}
    return {name: entries[stored] for name, stored in model_names(folder, entries).items()}


def tied_problems(key: str, folder: Path, groups: Iterable[Sequence[str]]) -> list[str]:
    """Returns one line per group of tensors that config.json ties and whose values differ in the files.

    Some samples of the weights are read, not all of them; tensors of another dtype than the first are left out.

    Args:
        key: the setting that names the model, for the lines.
        groups: names of tensors that are one in the model, as `read_headers` has them.
    """
    wanted = [group for group in groups if len(group) > 1]
    if not wanted:
        return []
    files = weight_files(folder)
    headers = {file: _header(file) for file in files}
    place = {name: (file, entry) for file, header in headers.items() for name, entry in header.items()}
    stored = model_names(folder, [name for name in place if name != "__metadata__"])

    def samples(name: str) -> tuple[str, list[bytes]]:
        file, entry = place[stored[name]]
        begin, end = entry["data_offsets"]
        last = max(end - begin - _SAMPLE_BYTES, 0)
        with file.open("rb") as stream:
            first = 8 + int.from_bytes(stream.read(8), "little") + begin
            found = []
            for i in range(_SAMPLES if last else 1):
                stream.seek(first + last * i // (_SAMPLES - 1))
                found.append(stream.read(min(_SAMPLE_BYTES, end - begin)))
        return entry["dtype"], found

    lines = []
    for first, *others in wanted:
        dtype, part = samples(first)
        for other in others:
            if (found := samples(other))[0] == dtype and found[1] != part:
                lines.append(problem(key, f"{first} and {other} {TIED_APART}", "different values", UNTIE))
    return lines


def model_names(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the name in the files of every tensor of a folder's causal language model.

    They are the names themselves unless the folder holds a model for images or sound too (`tower.text_names`).

    Args:
        names: of all tensors in the files.
    """
    return text_names(names) if holds_several(folder) else {name: name for name in names}


def holds_several(folder: Path) -> bool:
    """Whether a folder holds several models that are joined (`tower.is_joined`); not without a config.json."""
    file = folder / "config.json"
    return file.is_file() and is_joined(json.loads(file.read_text(encoding="utf-8")))


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that hold the model: those that the index names, sorted, or `model.safetensors`.

    Empty if there is neither. Files that the index names need not exist. A malformed index raises whatever reading it
    raises.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def weight_problems(key: str, folder: Path) -> list[str]:
    """Returns why a folder's weights cannot be read; empty if they can.

    One line says that the index cannot be read or that there are no safetensors; otherwise there is one line per file
    that is missing, outside the folder or damaged. Of each file only the header and the size are checked.

    Args:
        key: what the lines begin with.
    """
    try:
        files = weight_files(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [problem(key, f"model.safetensors.index.json cannot be read: {error!r}", str(folder))]
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            remedy = "convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) in a place you trust"
            return [problem(key, "weights must be safetensors; the folder has only pickled ones", str(folder), remedy)]
        return [problem(key, "must hold model.safetensors", str(folder))]
    lines = []
    for file in files:
        if file.parent != folder:
            lines.append(problem(key, "every file in the index must be in the folder", str(file)))
            continue
        if not file.is_file():
            lines.append(problem(key, "a file that the index names is missing", str(file)))
            continue
        try:
            _header(file)
        except ValueError as error:
            lines.append(problem(key, str(error), str(file), "copy the model again"))
    return lines


def _header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, which consists of 8 bytes of length, header, and data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise ValueError("not a safetensors file, or cut off")
        try:
            header = json.loads(stream.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError("not a safetensors file: its header is damaged") from None
    if size < 8 + length + end:
        raise ValueError(f"cut off: {size:,} of {8 + length + end:,} bytes")
    return header


# `plainly_whole` knows the tensors of the Llama kind of families and imports nothing. What it does not confirm, the model
# class itself decides on the meta device (`weights.compare`), which takes seconds to import.


def plainly_whole(hf_config: Any, shapes: Shapes) -> bool:
    """Whether a Llama, Mistral, Qwen2 or Qwen3 model has exactly the tensors that its config asks for.

    False means only that it must be asked of the model class: another family, unusual biases, or a tensor that is
    missing, of another shape or not expected.
    """
    if hf_config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        return False
    if hf_config.hidden_act not in ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu"):
        return False  # the class knows whether there is such a function
    if getattr(hf_config, "attention_bias", False) or getattr(hf_config, "mlp_bias", False):
        return False
    hidden, inner, columns = hf_config.hidden_size, hf_config.intermediate_size, hf_config.vocab_size
    size = head_size(hf_config) or 0
    queries, keys = size * hf_config.num_attention_heads, size * hf_config.num_key_value_heads
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if hf_config.model_type == "qwen2":
        layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if hf_config.model_type == "qwen3":
        layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    expected = {"model.embed_tokens.weight": (columns, hidden), "model.norm.weight": (hidden,)}
    for i in range(hf_config.num_hidden_layers):
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    head = {"lm_head.weight": (columns, hidden)}
    if hf_config.tie_word_embeddings and "lm_head.weight" not in shapes:
        head = {}
    return dict(shapes) == expected | head


def dtype_problems(key: str, headers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns one line if there are weights that are no floats of 16 bits or more, such as those of a quantized model.

    Args:
        key: the setting that names the model, for the line.
        headers: as `read_headers` returns them.
    """
    others = {name: entry["dtype"] for name, entry in headers.items() if entry["dtype"] not in FLOATS}
    if not others:
        return []
    listed = first_few([f"{name} is {dtype}" for name, dtype in others.items()])
    rule = f"the weights must be floats of 16 bits or more ({', '.join(FLOATS)})"
    remedy = "use the original, unquantized weights, or for a teacher quantization: as_stored or the backend vllm"
    return [problem(key, rule, listed, remedy)]


def first_few(names: list[str]) -> str:
    """The first few names, and an ellipsis if there are more."""
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


# The text tower of a model that also reads images or sound: its config, and its tensors among those of the whole. Transformers
# has most text towers as causal language models of their own. Such a model is trained, teaches and is exported as that: the
# other towers are neither built nor read.


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
