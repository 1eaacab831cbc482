"""Facts about a model folder or a hub name, from its small files and from its class. No weight is read."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.config.facts import ModelFacts
from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import ConfigError, first_line, problem
from distill_rl.models.families import (
    experts_per_token,
    family_of,
    head_size,
    is_decayed,
    num_experts,
    visited_intermediate_size,
)
from distill_rl.models.files.headers import read_headers, tied_problems, weight_files, weight_problems
from distill_rl.models.files.hub import HubUnreachable, read_config, resolve
from distill_rl.system.processes import call_in_child
from distill_rl.system.without_torch import gpu_possible

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_DEADLINE_S = 300.0
"""For a process that imports torch and one family: seconds on an idle machine, far longer from a cold network disk."""

HUB_TIMEOUT_S = 10.0
"""A hub that has not answered within this time counts as unreachable."""
_HASHED_WHOLE = 64 * 2**20
_SAMPLES, _SAMPLE_BYTES = 64, 64 * 2**10
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Location:
    """The folder of a model's small files; or a problem; or the reason why nothing could be checked."""

    folder: Path | None = None
    problem: str = ""
    unreachable: str = ""


def looks_like_hub_name(name: str) -> bool:
    """Whether `name` has the form `org/name`, and the current folder has no folder `org`. Does not ask the hub."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name.partition("/")[0]).is_dir()


def locate(key: str, name: str, revision: str | None = None) -> Location:
    """Finds a model or tokenizer in a folder, in the hub cache or on the hub, within `HUB_TIMEOUT_S`.

    Fetches the small files of a hub model that is not cached. The content of the folder is not checked.

    Args:
        key: the setting that holds `name`, for messages.

    Returns:
        A location with one of its three fields. Failures are reported in it, not raised.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return Location(folder=path)
    if path.exists():
        return Location(problem=problem(key, "must be a model folder, not a file", name))
    if not looks_like_hub_name(name):
        return Location(problem=problem(key, "no such folder", name, "give a folder, or a hub name like org/name"))
    answer = in_time(lambda: resolve(name, revision))
    if isinstance(answer, Path):
        return Location(folder=answer)
    if answer is None:
        return Location(unreachable=f"{key}: {name}: the hub did not answer within {HUB_TIMEOUT_S:g} s")
    if isinstance(answer, HubUnreachable):
        return Location(unreachable=f"{key}: {answer}")
    return Location(problem=f"{key}: {answer}")


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

    An output layer that is tied to the embedding is not counted as
    parameters.

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
        intermediate_size=visited_intermediate_size(config),
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        vocabulary_columns=int(config.vocab_size),
        tied=tied,
        head_dim=head_size(config),
        bytes_on_disk=sum(end - start for start, end in (entry["data_offsets"] for entry in tensors.values())),
        num_experts=num_experts(config),
        known_head=family_of(config).proven,
        experts_per_token=experts_per_token(config),
        tensors=len(counted),
        decayed=sum(is_decayed(name, len(entry["shape"])) for name, entry in counted.items()),
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
            for sample in range(_SAMPLES):
                content.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def teacher_identity(teacher: TeacherConfig, folder: Path) -> str:
    """What makes a teacher's targets: the hash of its weights (`fingerprint_model`) and, if they are quantised, how.

    A checkpoint that is loaded as it is stored has a hash of its own.
    """
    made_here = teacher.quantization not in (None, AS_STORED)
    return f"{fingerprint_model(folder)}{f' in {teacher.quantization}' if made_here else ''}"


def folder_problems(key: str, folder: Path, *, weights: bool = True) -> list[str]:
    """Returns why a folder cannot be loaded as a causal LM, one line each; empty if nothing was found.

    An adapter gets one line, whether the model's weights are beside it or not. Checks config.json, that transformers has the model's family, and the weight files.

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
    """Whether a folder has a PEFT adapter, such as a LoRA, and not the model itself."""
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
    if folder.name == "adapter" and (above / "config.json").is_file():  # an export of a run with student.lora
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
    try:
        answer = subprocess.run(
            [*command, *([f"--id={visible}"] if visible else [])],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return tuple(int(line) << 20 for line in answer.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


# What only a model's class knows: attention, positions, packing and tensors. The class is made on the meta device, as a worker
# will make it. That takes torch and the family's module. `check` does without torch where it can (`system/without_torch.py`);
# Transformers then has no classes, and a process of its own is asked.


def examine(
    key: str, folder: Path, *, attention: str, packing: bool, weights: bool, automatic: bool = False
) -> list[str]:
    """Returns what a model's class has against the settings and its files, one line each; empty if nothing.

    Args:
        key: `student` or `teachers.0`, for the lines.
        attention: transformers' name of the implementation.
        packing: whether rows may hold several documents.
        weights: whether the files are there, so that their tensors can be compared.
        automatic: whether the attention was chosen, and not named in the settings. A worker, which knows the class, chooses
            eager where transformers has no sdpa.

    Raises:
        ConfigError: as in `read_config`, or the model cannot be made from its config at all.
        WorkerError: the process that was asked died, or did not answer in time.
    """
    from transformers.utils import is_torch_available

    arguments = key, folder, attention, packing, weights, automatic
    if is_torch_available():
        return list(_examine(*arguments))
    return call_in_child(f"{key}.model", _examined_elsewhere, *arguments, deadline_s=_DEADLINE_S)


def _examined_elsewhere(
    key: str, folder: Path, attention: str, packing: bool, weights: bool, automatic: bool
) -> list[str]:
    """The lines of `examine`, asked in a process of its own, without the warnings that the caller has printed."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    read_config(folder)  # Transformers gives a warning about a config once per process
    logging.set_verbosity(verbosity)
    return list(_examine(key, folder, attention, packing, weights, automatic))


def _examine(key: str, folder: Path, attention: str, packing: bool, weights: bool, automatic: bool) -> Iterator[str]:
    """Yields the lines of `examine`; raises ConfigError where the model cannot be made at all."""
    from distill_rl.models.weights import compare, match, stored_tensors

    config = read_config(folder)
    family = config.model_type
    try:
        model = _made(config, attention)
    except ConfigError:
        if attention == "eager":
            raise
        model = _made(config, "eager")
        if not automatic or attention != "sdpa":
            rule = f"transformers has no {attention} attention for {family}"
            yield problem(f"{key}.attention", rule, None, f"set {key}.attention=eager")
    yield from _packing_problems(model, packing=packing)
    if weights:
        shapes = {name: tuple(entry["shape"]) for name, entry in read_headers(folder).items()}
        lines = compare(f"{key}.model", model, shapes)
        yield from lines
        if not lines:
            found = match(model, stored_tensors(model), shapes)
            yield from tied_problems(f"{key}.model", folder, found.stored.values())


def _made(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    from distill_rl.models.skeleton import DTYPES, skeleton

    try:
        return skeleton(config, dtype=DTYPES["fp32"], attention=attention)
    except ConfigError:
        raise
    except Exception as error:  # a config can hold values that only the class looks at
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"transformers cannot make {config.model_type} from config.json", "", what) from error


def _packing_problems(model: PreTrainedModel, *, packing: bool) -> Iterator[str]:
    """Yields at most one line: the family cannot keep packed documents apart, but `data.packing` is true."""
    # Restarting positions separate documents. A class that takes none, or carries a state from token to token, cannot
    # follow them.
    if not packing:
        return
    family, remedy = model.config.model_type, "set data.packing=false"
    if model._is_stateful:
        yield problem("data.packing", f"{family} carries a state from one packed document to the next", "true", remedy)
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        yield problem("data.packing", f"{family} takes no positions, which separate packed documents", "true", remedy)
