"""What a model folder or a hub name is, told from its small files: no weight is read and torch is not imported."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from distill_rl.config.facts import ModelFacts
from distill_rl.errors import ConfigError
from distill_rl.models.hub import HubUnreachable, resolve

HUB_TIMEOUT_S = 10.0
"""The hub must have answered within this time; after that it counts as unreachable."""
_HASHED_WHOLE = 64 * 2**20
_SAMPLES, _SAMPLE_BYTES = 64, 64 * 2**10
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a model's small files lie; without a folder, either a problem or a reason why nothing could be checked."""

    folder: Path | None = None
    problem: str = ""
    unreachable: str = ""


def looks_like_hub_name(name: str) -> bool:
    """`org/name`, unless `org` is a folder here: then a path was meant."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name.partition("/")[0]).is_dir()


def locate(key: str, name: str, revision: str | None = None) -> Location:
    """Finds a model or tokenizer: a folder, the local hub cache, or the hub itself; never waits longer than `HUB_TIMEOUT_S`.

    Args:
        key: the setting that names it, for messages.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return Location(folder=path)
    if path.exists():
        return Location(problem=_line(key, "must be a model folder, not a file", name))
    if not looks_like_hub_name(name):
        return Location(problem=_line(key, "no such folder", name, "give a folder, or a hub name like org/name"))
    return _ask_hub(key, name, revision)


def find_data_set(key: str, name: str) -> tuple[str, str]:
    """Asks the hub whether it has a data set, without fetching it: (problem, what could not be checked), one of them empty."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    answer = _in_time(lambda: HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S / 2))
    if isinstance(answer, RepositoryNotFoundError):
        return _line(key, "neither a file or folder here nor a data set on the hub", name), ""
    if answer is None or isinstance(answer, Exception):
        return "", f"{key}: {name} is neither a file nor a folder here, and the hub does not answer"
    return "", f"{key}: {name} is on the hub; its rows are checked when a run fetches them"


def _ask_hub(key: str, name: str, revision: str | None) -> Location:
    found = _in_time(lambda: resolve(name, revision))
    if isinstance(found, Path):
        return Location(folder=found)
    if found is None:
        return Location(unreachable=f"{key}: {name}: the hub did not answer within {HUB_TIMEOUT_S:g} s")
    if isinstance(found, HubUnreachable):
        return Location(unreachable=f"{key}: {found}")
    return Location(problem=f"{key}: {found}")


def _in_time(ask: Callable[[], Any]) -> Any:
    """What `ask` returns or raises, None after `HUB_TIMEOUT_S`.

    In a thread, because name resolution and the hub client's retries have no common time-out.
    """
    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append(ask())
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    return answer[0] if answer else None


def read_model_facts(folder: Path, config: Any) -> ModelFacts:
    """Facts of a folder whose `folder_problems` are none.

    Args:
        config: its `PretrainedConfig` (transformers' names, whatever the family calls them).
    """
    files = weight_files(folder)
    tensors = {name: entry for file in files for name, entry in _header(file).items() if name != "__metadata__"}
    tied = bool(config.tie_word_embeddings)
    counted = {name: entry for name, entry in tensors.items() if not (tied and name == "lm_head.weight")}
    hidden = int(config.hidden_size)
    heads = int(config.num_attention_heads)
    return ModelFacts(
        family=str(config.model_type),
        parameters=sum(prod(entry["shape"]) for entry in counted.values()),
        hidden_size=hidden,
        intermediate_size=int(
            getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
        ),
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        vocabulary_columns=int(config.vocab_size),
        tied=tied,
        bytes_on_disk=sum(file.stat().st_size for file in files),
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model, in order; empty where there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def fingerprint_model(folder: Path) -> str:
    """sha256, in hex, over the config and the weights: every byte of a file up to 64 MiB, of a larger one its size, its
    header and 64 samples of 64 KiB, which no other training run leaves as they are."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if size <= _HASHED_WHOLE:
                digest.update(content.read())
                continue
            for sample in range(_SAMPLES):
                content.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def folder_problems(key: str, folder: Path, *, weights: bool = True) -> list[str]:
    """Why a folder cannot be loaded as a causal LM; empty when nothing speaks against it.

    Args:
        weights: look at the weights too; of a hub name only the small files are here.
    """
    file = folder / "config.json"
    if not file.is_file():
        return [_line(key, "must hold a config.json", str(folder), "give the folder of a Hugging Face model")]
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [_line(key, f"config.json cannot be read: {error}", str(file))]
    return [*_code_problems(key, config), *(_weight_problems(key, folder) if weights else [])]


def _code_problems(key: str, config: Mapping[str, Any]) -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    family = config.get("model_type")
    if family in CONFIG_MAPPING_NAMES:
        return []
    if config.get("auto_map"):
        rule = f"model family {family!r} needs code from its folder (auto_map), which is never run"
        return [_line(key, rule, None, "use a model of a family that transformers has")]
    return [_line(key, "config.json must name a model_type that transformers has", repr(family))]


def _weight_problems(key: str, folder: Path) -> list[str]:
    try:
        files = weight_files(folder)
    except (OSError, ValueError, KeyError) as error:
        return [_line(key, f"model.safetensors.index.json cannot be read: {error!r}", str(folder))]
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            remedy = "convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) in a place you trust"
            return [_line(key, "weights must be safetensors; the folder has only pickled ones", str(folder), remedy)]
        return [_line(key, "must hold model.safetensors", str(folder))]
    lines = []
    for file in files:
        if not file.is_file():
            lines.append(_line(key, "a file that the index names is missing", str(file)))
            continue
        try:
            _header(file)
        except ValueError as error:
            lines.append(_line(key, str(error), str(file), "copy the model again"))
    return lines


def _header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file (8 bytes of length, header, data).

    Raises:
        ValueError: not safetensors, or shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise ValueError("not a safetensors file, or cut off")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise ValueError("not a safetensors file: its header is damaged") from None
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if size < 8 + length + end:
        raise ValueError(f"cut off: {size:,} of {8 + length + end:,} bytes")
    return header


def _line(key: str, rule: str, value: object = None, remedy: str = "") -> str:
    return str(ConfigError(key, rule, value, remedy))


def visible_gpus() -> int:
    """GPUs that torch can use in this process: honours CUDA_VISIBLE_DEVICES and MIG, and counts none for a CPU build.

    Asks NVML, or the CUDA driver where NVML cannot tell; neither makes a context on a GPU.
    """
    import torch

    return torch.cuda.device_count()
