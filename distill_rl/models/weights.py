"""Safetensors straight into shards: every rank reads the slices that it holds and nothing else.

For each parameter and persistent buffer of the model: find its tensor in the files (under its own name, or that of a
tensor tied to it), compare the shapes, compute which slice of the whole this rank holds (`local_slices`), read that
slice, and copy it into the shard, converting the dtype. A tensor that is made of several (`conversion`) is made of whole
ones, of which experts that this rank does not hold are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distill_rl.errors import ConfigError, problem
from distill_rl.models.conversion import Fused, Match, match
from distill_rl.models.files.headers import FLOATS, TIED_APART, UNTIE, model_names, weight_files, weight_problems
from distill_rl.models.files.tensors import Shapes, first_few
from distill_rl.models.lora.adapters import names_in_files
from distill_rl.parallel.shards import local_part, local_slices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = dict(zip(FLOATS, (torch.float64, torch.float32, torch.float16, torch.bfloat16)))


class WeightFiles:
    """The safetensors of a model folder: `model.safetensors`, or the files named in its index.

    Of a model with several towers the files count as those of its text tower, under the names of that (`model_names`).

    Raises:
        ConfigError: no safetensors (pickled weights do not count), or a file is missing or damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        problems = weight_problems(f"model {folder}", folder)
        if problems:
            raise ConfigError.many(problems)
        try:
            handles = [safe_open(file, framework="pt") for file in weight_files(folder)]
        except SafetensorError as error:
            raise ConfigError(f"model {folder}", "must hold whole safetensors files", str(error)) from error
        handle_of = {tensor: handle for handle in handles for tensor in handle.keys()}  # noqa: SIM118
        stored = model_names(folder, handle_of)
        self._place_of = {name: (handle_of[tensor], tensor) for name, tensor in stored.items()}
        self.names = set(self._place_of)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor."""
        return {name: tuple(self._slice(name).get_shape()) for name in self._place_of}

    def require_shape(self, name: str, tensor: Tensor) -> None:
        """Checks that a tensor in the files has the shape of the model's tensor; of a DTensor, that of the whole.

        Raises:
            ConfigError: it has another shape.
        """
        shape = list(self._slice(name).get_shape())
        if shape != list(tensor.shape):
            rule = f"shape must be {list(tensor.shape)} by config.json"
            raise ConfigError(f"{self.folder}: tensor {name}", rule, str(shape))

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor in the files.

        Raises:
            ConfigError: not a float of 16 bits or more.
        """
        code = self._slice(name).get_dtype()
        if code not in DTYPES:
            raise ConfigError(f"{self.folder}: tensor {name}", f"dtype must be one of {', '.join(DTYPES)}", code)
        return DTYPES[code]

    def read(self, name: str, where: Sequence[slice] = ()) -> Tensor:
        """The part of a tensor at `where`, one slice per dimension, in the file's dtype. Nothing else is read.

        Args:
            where: without any, it is the whole.
        """
        if where:
            return self._slice(name)[tuple(where)]
        handle, stored = self._place_of[name]
        return handle.get_tensor(stored)

    def read_tied(self, names: Sequence[str], where: Sequence[slice]) -> Tensor:
        """As `read`, of a tensor that is stored under one name or several.

        Raises:
            ConfigError: they differ in this part.
        """
        first, *aliases = names
        part = self.read(first, where)
        for alias in aliases:
            if not torch.equal(self.read(alias, where), part):
                raise ConfigError(f"{self.folder}: tensors {first} and {alias}", TIED_APART, "different values", UNTIE)
        return part

    def _slice(self, name: str) -> Any:
        """What safetensors knows of a tensor before its data are read."""
        handle, stored = self._place_of[name]
        return handle.get_slice(stored)


@torch.no_grad()
def read_weights(model: PreTrainedModel, files: WeightFiles, found: Match | None = None) -> list[int]:
    """Fills every parameter and persistent buffer of `model` from `files`, converting the dtype.

    Args:
        found: where they are, of a model that had more of them (`tensors_in_files`); None: it is found out.

    Returns:
        Bytes that this rank read of each tensor, in the dtype of the files. Tensors of which it holds nothing are left
        out, and a tied tensor counts once.

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape or not a float, or tied tensors differ in the
            files.
    """
    found = tensors_in_files(model, files) if found is None else found
    sizes: list[int] = []
    for name, tensor in stored_tensors(model).items():
        local = local_part(tensor)
        size = read_tensor(model, files, found, name, tensor, local)
        if local.numel():
            sizes.append(size)
    return sizes


@torch.no_grad()
def read_tensor(
    model: PreTrainedModel, files: WeightFiles, found: Match, name: str, tensor: Tensor, local: Tensor
) -> int:
    """Fills `local` with this rank's part of one tensor of `model`, converting the dtype; returns the bytes read.

    Args:
        found: of `tensors_in_files`.
        tensor: of the model, which may be on the meta device: its shape and how it is split.

    Raises:
        ConfigError: another shape in the files, not a float, or tied tensors that differ there.
    """
    where = local_slices(tensor)
    if name in found.fused:
        return _read_fused(model, found.fused[name], files, where, local) if local.numel() else 0
    first = found.stored[name][0]
    for file_name in found.stored[name]:
        files.require_shape(file_name, tensor)
    dtype = files.dtype(first)
    if not local.numel():
        return 0
    part = files.read_tied(found.stored[name], where)
    local.copy_(part)
    return part.numel() * dtype.itemsize


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the model's parameters, tied ones once, and its persistent buffers, by the names that files know them by.

    Without the tensors of adapters.
    """
    stored = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    tensors = {**dict(model.named_parameters()), **buffers}
    return {file_name: tensors[name] for name, file_name in names_in_files(model, tensors).items()}


def tensors_in_files(model: PreTrainedModel, files: WeightFiles) -> Match:
    """Finds every parameter and persistent buffer of a model in its files; see `conversion.match`.

    Raises:
        ConfigError: the files lack a tensor, or hold one that the model does not have, or tensors that are made one have
            other shapes or dtypes than the model needs.
    """
    tensors = stored_tensors(model)
    found = match(model, tensors, files.shapes)
    groups = {
        "needs tensors that are not there": [name for name, candidates in found.stored.items() if not candidates],
        "has no such tensors": found.unexpected,
    }
    problems = [
        f"{files.folder}: model type {model.config.model_type} {what}: {', '.join(group[:3])} ({len(group)} in all)"
        for what, group in groups.items()
        if group
    ]
    for name, fused in found.fused.items():
        what = f"{files.folder}: tensor {name}, made of {fused.names[0]} and {len(fused.names) - 1} others"
        if fused.shape != tuple(tensors[name].shape):
            rule = f"shape must be {list(tensors[name].shape)} by config.json"
            problems.append(str(ConfigError(what, rule, str(list(fused.shape)))))
        if len(dtypes := {files.dtype(one) for one in fused.names}) > 1:
            problems.append(str(ConfigError(what, "these must have one dtype", ", ".join(map(str, dtypes)))))
    if problems:
        raise ConfigError.many(problems)
    return found


def _read_fused(model: PreTrainedModel, fused: Fused, files: WeightFiles, where: Sequence[slice], local: Tensor) -> int:
    """Fills `local` with the part of a fused tensor at `where`; returns the bytes that were read."""
    size = 0

    def read(name: str) -> Tensor:
        nonlocal size
        tensor = files.read(name)
        size += tensor.nbytes
        return tensor

    local.copy_(fused.read(model, read, where))
    return size


def compare(key: str, model: PreTrainedModel, shapes: Shapes) -> list[str]:
    """Returns what differs between a model and its files, at most one line each for what lacks, is left over or misfits.

    Args:
        key: the setting that names the model, for the lines.
        model: on the meta device.
    """
    family = model.config.model_type
    tensors = stored_tensors(model)
    found = match(model, tensors, shapes)
    unexpected = found.unexpected
    missing = [name for name, candidates in found.stored.items() if not candidates]
    of_files = {(candidate, name): shapes[candidate] for name, names in found.stored.items() for candidate in names}
    of_files |= {(f"{name} (of {len(fused.names)})", name): fused.shape for name, fused in found.fused.items()}
    misfits = [
        f"{candidate} is {list(shape)}, not {list(tensors[name].shape)}"
        for (candidate, name), shape in of_files.items()
        if shape != tuple(tensors[name].shape)
    ]
    whole = "copy the model again, or give the config.json that belongs to it"
    lines = []
    if missing:
        lines.append(problem(key, f"{_tensors(missing)} of {family} must be in the files", first_few(missing), whole))
    if unexpected:
        lines.append(
            problem(
                key, f"{_tensors(unexpected)} in the files, and {family} has none such", first_few(unexpected), whole
            )
        )
    if misfits:
        lines.append(
            problem(key, f"{_tensors(misfits)} must have the shape that config.json gives", first_few(misfits), whole)
        )
    return lines


def _tensors(names: list[str]) -> str:
    return f"{len(names)} tensor" if len(names) == 1 else f"{len(names)} tensors"
