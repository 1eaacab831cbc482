"""What the files of a model and of a tokenizer say: in a folder or from the Hugging Face hub, without loading weights or torch.

Code from a model's folder is never run, and only weights in safetensors are fetched.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from distill_rl.config.facts import ModelFacts
from distill_rl.config.paths import described_by
from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import StudentConfig, TeacherConfig
from distill_rl.errors import ConfigError, first_line, problem
from distill_rl.models import families
from distill_rl.system.without_torch import gpu_possible

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


# The safetensors of a folder: which files, what their headers say, and which tensors are the language model's.

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
    return {name: entry for name, (_, entry) in _places(folder).items()}


def _places(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The file and the entry of every tensor, as in `read_headers`."""
    places = {name: (file, entry) for file in weight_files(folder) for name, entry in _header(file).items()}
    return {name: places[stored] for name, stored in model_names(folder, places).items()}


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
    places = _places(folder)

    def samples(name: str) -> tuple[str, list[bytes]]:
        file, entry = places[name]
        begin, end = entry["data_offsets"]
        with file.open("rb") as stream:
            data = 8 + int.from_bytes(stream.read(8), "little")
            return entry["dtype"], [*_samples(stream, data + begin, end - begin)]

    lines = []
    for first, *others in wanted:
        dtype, part = samples(first)
        for other in others:
            if (found := samples(other))[0] == dtype and found[1] != part:
                lines.append(problem(key, f"{first} and {other} {TIED_APART}", "different values", UNTIE))
    return lines


def _samples(stream: BinaryIO, begin: int, size: int) -> Iterator[bytes]:
    """Some parts of `size` bytes, spread evenly from the first to the last; all of them if they are few."""
    last = max(size - _SAMPLE_BYTES, 0)
    for i in range(_SAMPLES if last else 1):
        stream.seek(begin + last * i // (_SAMPLES - 1))
        yield stream.read(min(_SAMPLE_BYTES, size))


def model_names(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the name in the files of every tensor of a folder's causal language model.

    They are the names themselves unless the folder holds a model for images or sound too. The files of such a model call the
    tensors of its text tower `language_model.model.layers…`, `model.language_model.layers…` or `model.text_model.layers…`, each
    with `lm_head` inside or outside; some have the plain names. The tensors of other towers are left out.

    Args:
        names: of all tensors in the files.
    """
    if not holds_several(folder):
        return {name: name for name in names}
    found = {}
    for name in names:
        inner = name
        for pattern, replacement in TOWER_NAMES.items():
            inner = re.sub(pattern, replacement, inner)
        if inner != name or _PLAIN.match(name):
            found[inner] = name
    return found


def holds_several(folder: Path) -> bool:
    """Whether a folder holds several models that are joined (`is_joined`); not without a config.json."""
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
        elif not file.is_file():
            lines.append(problem(key, "a file that the index names is missing", str(file)))
        else:
            try:
                _header(file)
            except ValueError as error:
                lines.append(problem(key, str(error), str(file), "copy the model again"))
    return lines


def _header(file: Path) -> dict[str, Any]:
    """The entries of a safetensors file's JSON header; the file consists of 8 bytes of length, header, and data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise ValueError("not a safetensors file, or cut off")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
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
    size = families.head_size(hf_config) or 0
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
        layer |= {f"self_attn.{name}_proj.bias": (width,) for name, width in zip("qkv", (queries, keys, keys))}
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

    parts = (config.get(f"{part}_config") for part in ("text", "vision", "audio", "thinker"))
    reads_images = config.get("model_type") in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return reads_images or any(isinstance(part, Mapping) for part in parts)


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
        if (value := getattr(config, key, None)) is not None:
            setattr(tower, key, value)
    return tower


def no_tower(family: str) -> str:
    """Why a joined model cannot be used, as a rule for a message: `text_tower` gives None."""
    reads = "reads images or sound beside text"
    return f"{family} {reads}, and transformers has no causal language model of its text alone"


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


# Models and tokenizers from folders or from the Hugging Face hub, and what their small files say.

ADVICE = "docs/models.md#the-first-token-of-a-text"
"""Says how a tokenizer is made to write it."""
_BEGINS = re.compile(r"\bbos\b|begin|start.?of.?(text|sentence)|^<s>$", re.IGNORECASE)
"""Names of tokens that do nothing but begin a text. Others, such as <|im_start|> or <|endoftext|>, are named as the first token
by models that were not trained with one."""

Licence = Mapping[str, str]
"""Some of FIELDS; empty if no licence is known."""
FIELDS = ("license", "license_name", "license_link")
IDENTIFIERS = frozenset({
    "afl-3.0", "agpl-3.0", "apache-2.0", "artistic-2.0", "bigcode-openrail-m", "bigscience-bloom-rail-1.0",
    "bigscience-openrail-m", "bsd", "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "bsl-1.0", "c-uda", "cc",
    "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0",
    "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0",
    "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "cdla-sharing-1.0",
    "creativeml-openrail-m", "deepfloyd-if-license", "ecl-2.0", "epl-1.0", "etalab-2.0", "eupl-1.1", "gemma",
    "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "isc", "lgpl", "lgpl-2.1", "lgpl-3.0", "lgpl-lr", "llama2", "llama3",
    "llama3.1", "llama3.2", "llama3.3", "lppl-1.3c", "mit", "mpl-2.0", "ms-pl", "ncsa", "odbl", "odc-by", "ofl-1.1",
    "openrail", "openrail++", "osl-3.0", "other", "pddl", "postgresql", "unknown", "unlicense", "wtfpl", "zlib",
})  # fmt: skip
"""Values of `license` that the hub accepts. It refuses a card with any other."""
_LARGEST_CARD = 2**20
"""Bytes. No card is that long; another file of this name is not read."""

_REMEDY = "use a decoder-only language model, such as Llama, Qwen or Mistral"
_STATEFUL = ("mamba", "recurrent", "conv", "linear_attention")
"""Parts of the names in `layer_types` of layers that carry a state from token to token, whatever the positions are."""

_DESCRIPTION = ["*.json", "*.jinja", "*.txt", "*.model", "tokenizer*", "README.md"]
_WEIGHTS = [*_DESCRIPTION, "*.safetensors"]


class HubUnreachable(ConfigError):
    """The model is not on this machine and the hub does not answer, so it is not known whether it exists."""


def resolve(path: str | Path, revision: str | None = None, *, weights: bool = False) -> Path:
    """Returns the folder of a model: `path` itself, or the local snapshot of the hub model of that name.

    Files of a hub model that are not in the cache are fetched. What a folder holds is not checked.

    Args:
        revision: branch, tag or commit on the hub; a folder has none.
        weights: fetch the safetensors too, not only the files that describe the model.

    Raises:
        ConfigError: neither a folder nor a model on the hub, or a model that needs a login.
        HubUnreachable: the name is not in the local cache, and the hub does not answer.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    name = str(path)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model {name}", "must be a folder, or a name on the Hugging Face hub", "no such folder")
    return _snapshot(name, revision, _WEIGHTS if weights else _DESCRIPTION)


def read_config(path: str | Path, revision: str | None = None, *, quantized: bool = False) -> PreTrainedConfig:
    """Returns the model's config.json as transformers reads it; of a model with several towers, that of its text tower.

    Args:
        quantized: whether the weights may be quantized.

    Raises:
        ConfigError: as in `resolve`; no readable config.json, a model type unknown to transformers, one that needs its
            own code, weights that must not be quantized but are, or a text tower that transformers does not have alone.
    """
    from transformers import AutoConfig

    folder = resolve(path, revision)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {path}", "the folder must hold config.json", str(folder))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _check_dtypes(config)
    except Exception as error:  # every field has a validator with its own exceptions
        rule = "config.json must describe a model that transformers knows without code of its own"
        raise ConfigError(f"model {path}", rule, first_line(error)) from error
    if getattr(config, "quantization_config", None) and not quantized:
        remedy = "use the original weights, or for a teacher quantization: as_stored or the backend vllm"
        raise ConfigError(f"model {path}", "weights must not be quantized", remedy=remedy)
    if not is_joined(config.to_dict()):
        return config
    tower = text_tower(config)
    if tower is None:
        raise ConfigError(f"model {path}", no_tower(config.model_type))
    by_text = getattr(config.text_config, "tie_word_embeddings", False)
    if tower.tie_word_embeddings and not by_text and not weight_problems("model", folder):
        # With an output layer in the files, the tying is only a default of the whole's class.
        tower.tie_word_embeddings = "lm_head.weight" not in read_headers(folder)
    return tower


def _check_dtypes(config: PreTrainedConfig) -> None:
    """Checks the dtypes of a config and its parts, which Transformers leaves as text where it has no PyTorch."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        name = getattr(part, "dtype", None)
        if isinstance(name, str) and name not in ("float32", "float16", "bfloat16", "float64"):
            getattr(import_module("torch"), name)


def read_tokenizer(path: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Returns the model's fast tokenizer: tokenizer.json as it is or, without that file, what `AutoTokenizer` makes.

    Raises:
        ConfigError: as in `resolve`; there is none, it is damaged, or it has no fast implementation.
    """
    import transformers

    folder = resolve(path, revision)
    # A family's own class rebuilds normaliser and pre-tokenizer instead of reading them from tokenizer.json, so the same
    # file would give other ids next to another model. The plain class takes the file as it is.
    verbatim = (folder / "tokenizer.json").is_file()
    # AutoTokenizer is looked up only if needed, because it imports torch and half of transformers.
    reader: Any = transformers.PreTrainedTokenizerFast if verbatim else transformers.AutoTokenizer
    try:
        tokenizer = reader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the Rust tokenizers raise bare Exception for a damaged file
        found = first_line(error) if any(folder.glob("*token*")) else f"no tokenizer.json in {folder}"
        raise ConfigError(f"tokenizer {path}", "the folder must hold a tokenizer", found) from error
    if not tokenizer.is_fast:
        found = type(tokenizer).__name__
        raise ConfigError(f"tokenizer {path}", "must be a fast tokenizer", found, "add a tokenizer.json")
    return tokenizer


def tokenizer_of(model: StudentConfig | TeacherConfig) -> PreTrainedTokenizerBase:
    """The fast tokenizer of a model's settings: `tokenizer` or, if that is not set, the one beside the model.

    The model's revision does not apply to a `tokenizer` of its own. For a teacher that only reads a store, it is the one
    in the store. Raises as `read_tokenizer`.
    """
    path, revision = described_by(model)
    if model.tokenizer is not None and path == model.model:
        return read_tokenizer(model.tokenizer)
    return read_tokenizer(path, revision)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 (hex) over everything that determines the ids of a text and the meaning of an id.

    That is normaliser, pre-tokenizer, model (vocabulary and merges) and added tokens. Not part of it are the chat
    template, the special tokens that a template adds, and which added tokens are marked as special. A teacher with the
    same hash can read the student's ids.
    """
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = whole.get("added_tokens") or ()
    added = [{key: value for key, value in token.items() if key != "special"} for token in tokens]
    deciding = {key: whole.get(key) for key in ("normalizer", "pre_tokenizer", "model")} | {"added_tokens": added}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest id plus one, including added tokens: the number of columns that stand for a token."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def cached(name: str, revision: str | None = None) -> Path | None:
    """The folder of a hub model with its weights, if they are in the cache of this machine; asks no hub."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_WEIGHTS, local_files_only=True))
    except Exception:  # no such name, or no hub's name at all
        return None


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    """Downloads the files of a hub model that match the patterns, or finds them in the cache; returns their folder."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        remedy = "accept its terms, then `hf auth login`"
        raise ConfigError(f"model {name}", "needs permission of its owners", remedy=remedy) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        at = f" at revision {revision}" if revision else ""
        rule = "must be a folder, or a name on the Hugging Face hub"
        raise ConfigError(f"model {name}{at}", rule, "neither") from error
    except (errors.LocalEntryNotFoundError, OSError) as error:
        offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "no answer from the hub"
        remedy = "give the path of a folder, or fetch it first where there is a network (`hf download`)"
        raise HubUnreachable(f"model {name}", "is no folder and not in the local hub cache", offline, remedy) from error


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
    return [problem(key, f"must be a causal language model; {family} {rule}", None, _REMEDY)] if rule else []


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


# A licence is known by the fields that the headers of model cards have for it: an identifier of the hub's list or, as
# `license: other`, `license_name` and `license_link` (https://huggingface.co/docs/hub/repositories-licenses). The hub is not
# asked: a model that is not on this machine has no known licence.


def licence(name: str) -> Licence:
    """The fields of a licence that somebody names: an identifier of the hub's list, or any other name."""
    identifier = name.strip().lower()
    if identifier in IDENTIFIERS:
        return {"license": identifier}
    return {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", identifier).strip("-") or "other"}


def licence_of(model: StudentConfig | TeacherConfig) -> Licence:
    """The licence that a model's own files state; empty if they state none, or are not on this machine."""
    folder = Path(model.model).expanduser()
    found = folder if folder.is_dir() else cached(model.model, model.revision)
    return {} if found is None else licence_in(found)


def licence_in(folder: Path) -> Licence:
    """The licence in the header of a folder's model card or, without one, in its config.json; empty if neither has it.

    Fields that are not short texts on one line do not count.
    """
    header = _plain_fields(card_header(folder))
    if "license" in header:
        return header
    try:
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("license")
    except (OSError, ValueError, AttributeError):
        return {}
    return licence(stated) if isinstance(stated, str) and _plain_fields({"license": stated}) else {}


def card_header(folder: Path) -> dict[str, Any]:
    """The YAML header of a folder's README.md; empty if there is none that can be read."""
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    try:
        if card.stat().st_size > _LARGEST_CARD:
            return {}
        return metadata_load(card) or {}
    except Exception:  # it is somebody else's file, and YAML has errors of its own
        return {}


def _plain_fields(header: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: header[name] for name in FIELDS if isinstance(header.get(name), str)}
    return {name: text for name, text in texts.items() if text.strip() and len(text) < 300 and text.isprintable()}


def unwritten_beginning(tokenizer: Any) -> int | None:
    """The id of the token that begins a text by its name, if the tokenizer has one and does not write it; otherwise None.

    Conversions of a model, such as to GGUF and back, can lose that a tokenizer writes it.
    """
    token, number = tokenizer.bos_token, tokenizer.bos_token_id
    if token is None or number in (tokenizer.eos_token_id, tokenizer.pad_token_id) or not _BEGINS.search(token):
        return None
    return None if tokenizer("a", verbose=False)["input_ids"][:1] == [number] else number


def write_beginning(tokenizer: Any) -> None:
    """Lets a tokenizer write its first token before every text, as the published one does."""
    from tokenizers.processors import TemplateProcessing

    begin, number = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin}:0 $A:0", pair=f"{begin}:0 $A:0 {begin}:1 $B:1", special_tokens=[(begin, number)]
    )


# Facts about a model folder or a hub name, from its small files.

HUB_TIMEOUT_S = 10.0
"""A hub that has not answered within this time counts as unreachable."""
_HASHED_WHOLE = 64 * 2**20
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_like_hub_name(name: str) -> bool:
    """Whether `name` has the form `org/name`, and the current folder has no folder `org`. Does not ask the hub."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name.partition("/")[0]).is_dir()


def locate(key: str, name: str, revision: str | None = None) -> Path:
    """Finds the folder of a model or tokenizer: itself, in the hub cache or on the hub, within `HUB_TIMEOUT_S`.

    Fetches the small files of a hub model that is not cached. The content of the folder is not checked.

    Args:
        key: the setting that holds `name`, for messages.

    Raises:
        ConfigError: neither a folder nor a model on the hub, or a model that needs a login.
        HubUnreachable: the hub does not answer.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(key, "must be a model folder, not a file", name)
    if not looks_like_hub_name(name):
        raise ConfigError(key, "no such folder", name, "give a folder, or a hub name like org/name")
    answer = in_time(lambda: resolve(name, revision))
    if isinstance(answer, Path):
        return answer
    if answer is None:
        raise HubUnreachable(f"{key}: {name}: the hub did not answer within {HUB_TIMEOUT_S:g} s")
    raise (HubUnreachable if isinstance(answer, HubUnreachable) else ConfigError)(f"{key}: {answer}")


def find_data_set(key: str, name: str) -> tuple[str, str]:
    """Asks the hub for a data set without fetching it, within `HUB_TIMEOUT_S`.

    Args:
        key: the setting that holds `name`, for messages.

    Returns:
        (problem, what could not be checked), one of them empty. It is a problem if the hub has no such data set. Of one
        that exists the rows are not checked, and any other failure counts as no answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    answer = in_time(lambda: HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S / 2))
    if isinstance(answer, RepositoryNotFoundError):
        return problem(key, "neither a file or folder here nor a data set on the hub", name), ""
    if answer is None or isinstance(answer, Exception):
        return "", f"{key}: {name} is neither a file nor a folder here, and the hub does not answer"
    return "", f"{key}: {name} is on the hub; its rows are checked when a run fetches them"


def in_time(request: Callable[[], Any], seconds: float | None = None) -> Any:
    """Returns what `request` returns, or the exception that it raises, or None if it takes too long.

    It runs in a thread, because name resolution and the hub client's retries have no common time-out. The thread of a
    late request is left running.

    Args:
        seconds: None: `HUB_TIMEOUT_S`.
    """
    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append(request())
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S if seconds is None else seconds)
    return answer[0] if answer else None


def read_model_facts(folder: Path, config: Any, headers: Mapping[str, Any] | None = None) -> ModelFacts:
    """Returns the facts of a model folder in which `folder_problems` finds nothing.

    An output layer that is tied to the embedding is not counted as parameters.

    Args:
        config: its `PretrainedConfig`, which has the same names for all families.
        headers: from `read_headers`; None: they are read.
    """
    tensors = read_headers(folder) if headers is None else headers
    tied = bool(config.tie_word_embeddings)
    counted = {name: entry for name, entry in tensors.items() if not (tied and name == "lm_head.weight")}
    heads = int(config.num_attention_heads)
    return ModelFacts(
        family=str(config.model_type),
        parameters=sum(prod(entry["shape"]) for entry in counted.values()),
        hidden_size=int(config.hidden_size),
        intermediate_size=families.visited_intermediate_size(config),
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        vocabulary_columns=int(config.vocab_size),
        tied=tied,
        head_dim=families.head_size(config),
        bytes_on_disk=sum(end - start for start, end in (entry["data_offsets"] for entry in tensors.values())),
        num_experts=families.num_experts(config),
        known_head=families.family_of(config).proven,
        experts_per_token=families.experts_per_token(config),
        tensors=len(counted),
        decayed=sum(families.is_decayed(name, len(entry["shape"])) for name, entry in counted.items()),
        expert_parameters=sum(prod(entry["shape"]) for name, entry in counted.items() if ".experts." in name),
    )


def fingerprint_model(folder: Path) -> str:
    """sha256, in hex, over the config and the weights.

    The names and sizes of the weight files count. A file up to 64 MiB is hashed whole, of a larger one 64 samples of
    64 KiB that are spread evenly from its beginning to its end. Any training changes some of these bytes.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if size <= _HASHED_WHOLE:
                digest.update(content.read())
                continue
            for sample in _samples(content, 0, size):
                digest.update(sample)
    return digest.hexdigest()


def teacher_identity(teacher: TeacherConfig, folder: Path) -> str:
    """What makes a teacher's targets: the hash of its weights (`fingerprint_model`) and, if they are quantised, how.

    A checkpoint that is loaded as it is stored has a hash of its own.
    """
    made_here = teacher.quantization not in (None, AS_STORED)
    return f"{fingerprint_model(folder)}{f' in {teacher.quantization}' if made_here else ''}"


def folder_problems(key: str, folder: Path, *, weights: bool = True) -> list[str]:
    """Returns why a folder cannot be loaded as a causal LM, one line each; empty if nothing was found.

    An adapter gets one line, whether the model's weights are beside it or not. Checks config.json, that transformers has the
    model's family, and the weight files.

    Args:
        key: the setting that names the model, for the lines.
        weights: check the weights too. Of a hub model only the small files may be present.
    """
    file = folder / "config.json"
    if is_adapter(folder):
        return [_adapter_problem(key, folder)]
    if (folder / "adapter_config.json").is_file():
        rule = "must hold a model or an adapter, not both: transformers would apply the adapter, and training would not"
        remedy = "move adapter_config.json and adapter_model.* elsewhere to take the model alone, or merge them first"
        return [problem(key, rule, str(folder), remedy)]
    if not file.is_file():
        remedy = "give the folder of a Hugging Face model"
        if (folder / "export" / "config.json").is_file():
            remedy = f"it is the directory of a run: give its model, {folder / 'export'}"
        elif quantized := sorted(folder.glob("*.gguf")):
            remedy = f"it holds {quantized[0].name}: write that in safetensors first (docs/models.md#models-in-gguf)"
        return [problem(key, "must hold a config.json", str(folder), remedy)]
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [problem(key, f"config.json cannot be read: {error}", str(file), "copy the model again")]
    if not isinstance(config, dict):
        return [problem(key, "config.json must be a JSON object", str(file), "copy the model again")]
    return [*_code_problems(key, config), *(weight_problems(key, folder) if weights else [])]


def is_adapter(folder: Path) -> bool:
    """Whether a folder has a PEFT adapter, and not the model itself."""
    if not (folder / "adapter_config.json").is_file():
        return False
    return not (folder / "config.json").is_file() or not any(folder.glob("model*.safetensors"))


def _adapter_problem(key: str, folder: Path) -> str:
    """The line about an adapter in place of a model: what it is, its base model, and how to merge the two."""
    try:
        adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        adapter = {}
    if not isinstance(adapter, dict):
        adapter = {}
    kind, base = adapter.get("peft_type") or "PEFT", adapter.get("base_model_name_or_path") or "an unknown base model"
    rule = f"must hold a model; it is a {kind} adapter of {base} without the model's weights"
    above = folder.resolve().parent
    if folder.name == "adapter" and (above / "config.json").is_file():  # an export of a run with adapters
        return problem(key, rule, str(folder), f"give {above}, where it is merged")
    merge = f"AutoPeftModelForCausalLM.from_pretrained('{folder}').merge_and_unload().save_pretrained('MERGED')"
    remedy = f"merge it first, with PEFT: {merge}, then add the tokenizer's files to MERGED"
    return problem(key, rule, str(folder), remedy)


def _code_problems(key: str, config: Mapping[str, Any]) -> list[str]:
    """Returns one line if transformers does not have the model's family; an empty list if it does."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    family = config.get("model_type")
    if isinstance(family, str) and family in CONFIG_MAPPING_NAMES:
        return []
    if config.get("auto_map"):
        rule = f"model family {family!r} needs code from its folder (auto_map), which is never run"
        return [problem(key, rule, None, "use a model of a family that transformers has")]
    return [problem(key, "config.json must name a model_type that transformers has", repr(family))]


def visible_gpus() -> int:
    """Number of GPUs that torch can use in this process: respects CUDA_VISIBLE_DEVICES and MIG, 0 in a CPU build.

    Uses NVML, or the CUDA driver if NVML has no answer. Neither creates a context on a GPU. Torch is not imported where
    there cannot be a GPU.
    """
    if not gpu_possible():
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_bytes() -> tuple[int, ...]:
    """Bytes of memory of every GPU that CUDA_VISIBLE_DEVICES leaves, by nvidia-smi; empty if it does not answer.

    Of a MIG instance that is not named in CUDA_VISIBLE_DEVICES it is the memory of the whole GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    command += [f"--id={visible}"] if visible else []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return tuple(int(line) << 20 for line in answer.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


# Checkpoints that are quantised already. Each method has a package and a layout of its own, all known to Transformers'
# quantisers, so neither our loader nor tensor parallelism applies to them: one rank holds the whole model.

_PACKAGES: dict[str, tuple[str, ...]] = {
    "awq": ("gptqmodel", "accelerate"),
    "auto-round": ("auto_round",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors",),
    "fbgemm_fp8": ("accelerate",),
    "fp8": ("accelerate",),
    "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",),
    "mxfp4": ("accelerate",),
    "mxfp8": ("accelerate",),
    "quanto": ("optimum.quanto", "accelerate"),
    "torchao": ("torchao",),
}
"""Method of a checkpoint → modules that Transformers needs for it."""


def method_of(config: PreTrainedConfig) -> str | None:
    """How a checkpoint's weights are quantised, as config.json calls it; None if they are not."""
    found: Any = getattr(config, "quantization_config", None)
    if not found:
        return None
    return str((found if isinstance(found, dict) else found.to_dict()).get("quant_method", "unknown"))


def missing_packages(method: str, *, on_gpu: bool) -> list[str]:
    """What must be installed for checkpoints of a method and is not, as pip names it.

    Args:
        on_gpu: Transformers then needs accelerate, whatever the method, to load onto the GPU.
    """
    needed = dict.fromkeys([*_PACKAGES.get(method, ()), *(("accelerate",) if on_gpu else ())])
    return [re.sub("[._]", "-", name) for name in needed if not _found(name)]


def _found(module: str) -> bool:
    """Whether a module, or one in a package, is installed; nothing is imported but the package around it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def as_stored_problem(config: PreTrainedConfig, folder: Path, *, tp: int) -> str:
    """Why a checkpoint cannot be loaded as it is stored; empty if nothing is known against it.

    Args:
        tp: tensor-parallel size.
    """
    if method_of(config) is None:
        return "its weights must be quantised; those of this folder are not (no quantization_config in config.json)"
    if holds_several(folder):
        return "the folder must hold a language model alone, not one for images or sound too"
    if tp > 1:
        return f"quantised weights are not split over ranks; parallel.tp is {tp}"
    return ""
