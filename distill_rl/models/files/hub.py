"""Models and tokenizers from folders or from the Hugging Face hub, and what their small files say, without loading torch.

Code from a model's folder is never run, and only weights in safetensors are fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.config.paths import described_by
from distill_rl.config.schema import StudentConfig, TeacherConfig
from distill_rl.errors import ConfigError, first_line, problem
from distill_rl.models.files.headers import is_joined, no_tower, read_headers, text_tower, weight_problems

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


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
        raise ConfigError(
            f"model {path}",
            "config.json must describe a model that transformers knows without code of its own",
            first_line(error),
        ) from error
    if getattr(config, "quantization_config", None) and not quantized:
        remedy = "use the original weights, or for a teacher quantization: as_stored or the backend vllm"
        raise ConfigError(f"model {path}", "weights must not be quantized", remedy=remedy)
    if not is_joined(config.to_dict()):
        return config
    tower = text_tower(config)
    if tower is None:
        raise ConfigError(f"model {path}", no_tower(config.model_type))
    by_text = getattr(config.text_config, "tie_word_embeddings", False)
    if tower.tie_word_embeddings and not by_text and _has_head(folder):
        tower.tie_word_embeddings = False  # the tying is only a default of the whole's class
    return tower


def _has_head(folder: Path) -> bool:
    """Whether the weights, as far as they are there, hold an output layer."""
    return not weight_problems("model", folder) and "lm_head.weight" in read_headers(folder)


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
        raise ConfigError(
            f"tokenizer {path}", "must be a fast tokenizer", type(tokenizer).__name__, "add a tokenizer.json"
        )
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


def configured_stops(path: str | Path, revision: str | None = None) -> tuple[int, ...]:
    """Returns the ids that end an answer of the model: one, several or none.

    They are `eos_token_id` of generation_config.json or, if there is no such file, of config.json. There are none if
    the file does not set it, or in a folder without both files.

    Raises:
        ConfigError: the file is not a JSON object, or as in `resolve`.
    """
    folder = resolve(path, revision)
    file = folder / "generation_config.json"
    if not file.is_file():
        file = folder / "config.json"
    if not file.is_file():
        return ()  # a folder with a tokenizer only
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        ends = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model {path}", f"{file.name} must be JSON", str(error), "copy it again") from error
    return tuple(token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int))


def stops_of(model: StudentConfig | TeacherConfig) -> tuple[int, ...]:
    """The ids that end an answer of a model's settings, as in `configured_stops`."""
    return configured_stops(*described_by(model))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 (hex) over everything that determines the ids of a text and the meaning of an id.

    That is normaliser, pre-tokenizer, model (vocabulary and merges) and added tokens. Not part of it are the chat
    template, the special tokens that a template adds, and which added tokens are marked as special. A teacher with the
    same hash can read the student's ids.
    """
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    added = [
        {key: value for key, value in token.items() if key != "special"} for token in whole.get("added_tokens") or ()
    ]
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
        raise ConfigError(
            f"model {name}", "needs permission of its owners", remedy="accept its terms, then `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"model {name}{at}", "must be a folder, or a name on the Hugging Face hub", "neither"
        ) from error
    except (errors.LocalEntryNotFoundError, OSError) as error:
        offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "no answer from the hub"
        raise HubUnreachable(
            f"model {name}",
            "is no folder and not in the local hub cache",
            offline,
            "give the path of a folder, or fetch it first where there is a network (`hf download`)",
        ) from error


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
