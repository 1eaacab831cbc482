"""Safetensors straight into shards: every rank reads the slices it holds and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from distill_rl.errors import ConfigError
from distill_rl.parallel.shards import local_slices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightFiles:
    """The safetensors of a model folder: `model.safetensors`, or the files named in its index.

    Raises:
        ConfigError: no safetensors (also where there is only a pickle), or a file missing or damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._handles = {name: self._open(name) for name in self._file_names()}
        self._file_of = {tensor: name for name, handle in self._handles.items() for tensor in handle.keys()}  # noqa: SIM118

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in the file.

        Raises:
            ConfigError: not a float of 16 bits or more.
        """
        code = self._slice(name).get_dtype()
        if code not in _DTYPES:
            raise ConfigError(f"{self.folder}: tensor {name}", f"dtype must be one of {', '.join(_DTYPES)}", code)
        return _DTYPES[code]

    def read(self, name: str, where: Sequence[slice]) -> Tensor:
        """The part of a tensor at `where`, one slice per dimension, in the file's dtype; no more is read."""
        part = self._slice(name)
        return part[tuple(where)] if where else self._handles[self._file_of[name]].get_tensor(name)

    def _slice(self, name: str):  # type: ignore[no-untyped-def]
        return self._handles[self._file_of[name]].get_slice(name)

    def _file_names(self) -> list[str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            names = self._indexed(index)
        elif (self.folder / "model.safetensors").is_file():
            names = ["model.safetensors"]
        else:
            pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(pattern)]
            raise ConfigError(
                f"model {self.folder}",
                "must hold model.safetensors, or its parts and their index",
                f"only {pickles[0]}, a pickle, which could run code when read" if pickles else "no weights",
                "convert it once where you trust it: from_pretrained(...).save_pretrained(...)" if pickles else "",
            )
        outside = [name for name in names if Path(name).name != name or not (self.folder / name).is_file()]
        if outside:
            raise ConfigError(
                f"model {self.folder}", "every file in the index must be in the folder", f"no {outside[0]}"
            )
        return names

    @staticmethod
    def _indexed(index: Path) -> list[str]:
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}", "must map tensors to files under weight_map", repr(error)) from error

    def _open(self, name: str):  # type: ignore[no-untyped-def]
        try:
            return safe_open(self.folder / name, framework="pt")
        except SafetensorError as error:
            raise ConfigError(
                f"{self.folder / name}", "must be a whole safetensors file", str(error), "fetch it again"
            ) from error


@dataclass(frozen=True)
class Reading:
    """What one rank read: number of tensors, and bytes in the file's dtype in all and at once."""

    tensors: int
    total_bytes: int
    largest_bytes: int


@torch.no_grad()
def read_weights(model: PreTrainedModel, files: WeightFiles) -> Reading:
    """Fill every parameter and persistent buffer of `model` from `files`, converting the dtype.

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape, or tied tensors differ in the files.
    """
    tensors = _stored_tensors(model)
    names = _names_in_files(model, list(tensors), files)
    sizes = []
    for name, tensor in tensors.items():
        where = local_slices(tensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for file_name in names[name]:
            if files.shape(file_name) != tuple(tensor.shape):
                raise ConfigError(
                    f"{files.folder}: tensor {file_name}",
                    f"shape must be {list(tensor.shape)} by config.json",
                    str(list(files.shape(file_name))),
                )
        dtype = files.dtype(names[name][0])
        if not local.numel():
            continue
        part = files.read(names[name][0], where)
        sizes.append(part.numel() * dtype.itemsize)
        local.copy_(part)
        for alias in names[name][1:]:
            if not torch.equal(files.read(alias, where), part):
                raise ConfigError(
                    f"{files.folder}: tensors {names[name][0]} and {alias}",
                    "must be equal, because config.json ties them",
                    "different values",
                    "set tie_word_embeddings: false in config.json",
                )
    return Reading(len(sizes), sum(sizes), max(sizes, default=0))


def names_in_files(model: PreTrainedModel, files: WeightFiles) -> dict[str, str]:
    """For every stored tensor of the model the name of its tensor in the files."""
    return {name: found[0] for name, found in _names_in_files(model, list(_stored_tensors(model)), files).items()}


def _stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that belong into a checkpoint."""
    stored = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return {**dict(model.named_parameters()), **buffers}


def _names_in_files(model: PreTrainedModel, names: list[str], files: WeightFiles) -> dict[str, list[str]]:
    """For every tensor its names in the files: its own, or that of a tensor tied to it, with or without the prefix
    of the inner model, as files of bare inner models leave it out."""
    prefix = f"{model.base_model_prefix}."
    aliases: dict[str, list[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        aliases.setdefault(source, []).append(target)

    def candidates(name: str) -> list[str]:
        wanted = [name, *aliases.get(name, ())]
        return [
            form for each in wanted for form in dict.fromkeys((each, each.removeprefix(prefix))) if form in files.names
        ]

    found = {name: candidates(name) for name in names}
    missing = [name for name, where in found.items() if not where]
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    # Rotary frequencies follow from the config; files of early Llama models carry them nevertheless.
    ignored.append(re.compile(r"rotary_emb\.inv_freq$"))
    known = {name for where in found.values() for name in where}
    unexpected = [name for name in sorted(files.names - known) if not any(p.search(name) for p in ignored)]
    family = f"model type {model.config.model_type}"
    problems = [
        f"{files.folder}: {family} {what}: {', '.join(group[:3])} ({len(group)} in all)"
        for group, what in ((missing, "needs tensors that are not there"), (unexpected, "has no such tensors"))
        if group
    ]
    if problems:
        raise ConfigError.many(problems)
    return found
