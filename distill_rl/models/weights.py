"""A model without memory, on the meta device, which loading, `check` and adapters begin with; and its safetensors straight into
shards: every rank reads the slices that it holds and nothing else.

For each parameter and persistent buffer of the model: find its tensor in the files (under its own name, or that of a
tensor tied to it), compare the shapes, compute which slice of the whole this rank holds (`local_slices`), read that
slice, and copy it into the shard, converting the dtype. A tensor that is made of several (`Fused`) is made of whole
ones, of which experts that this rank does not hold are left out. Buffers that no file holds are computed again.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distill_rl.errors import ConfigError, first_line, problem
from distill_rl.models import varlen
from distill_rl.models.adapters import names_in_files
from distill_rl.models.files import (
    FLOATS,
    TIED_APART,
    UNTIE,
    Shapes,
    first_few,
    model_names,
    weight_files,
    weight_problems,
)
from distill_rl.models.forward import use_own_lengths
from distill_rl.parallel.shards import local_part, local_slices

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightTransform


TABLE = "_weight_conversions"
"""Attribute of a model with its table, as Transformers names it."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def skeleton(config: PreTrainedConfig, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Returns the model without memory: every tensor is on the meta device, in `dtype` but for those `kept_in_fp32`.

    Its cache and the search for padding in its inputs are switched off.

    Args:
        attention: transformers' name of an implementation, or one of `OURS`.

    Raises:
        ConfigError: no causal LM of this config, or the attention implementation is not available.
    """
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    varlen.register()
    try:
        with torch.device("meta"):
            settings = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": False}
            model = AutoModelForCausalLM.from_config(config, **settings)
    except (ValueError, ImportError) as error:
        rule = f"transformers must have it as a causal LM with {attention} attention"
        remedy = "try another setting of `attention`"
        raise ConfigError(f"model type {config.model_type}", rule, first_line(error), remedy) from error
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and kept_in_fp32(model, name, dtype):
            tensor.data = tensor.data.float()
    # While its classes have their own names, which tables go by, and which FSDP2 changes.
    setattr(model, TABLE, get_model_conversion_mapping(model))
    without_cache(model)
    use_own_lengths(model)
    return model


def kept_in_fp32(model: PreTrainedModel, name: str, dtype: torch.dtype) -> bool:
    """Whether Transformers keeps a tensor in fp32 in a model of this dtype, such as a bias by which a router chooses experts."""
    strict, of_fp16 = model._keep_in_fp32_modules_strict or (), model._keep_in_fp32_modules or ()
    parts = {torch.bfloat16: [*strict], torch.float16: [*strict, *of_fp16]}.get(dtype, [])
    return any(re.search(part.replace("*", ".*"), name) for part in parts)


def without_cache(model: PreTrainedModel) -> None:
    """Switches off a model's cache and the search for padding in its inputs."""
    # With a cache, packed documents would see each other; see forward.logits.
    model.config.use_cache = False
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # It searches for padding, which makes the host wait for the GPU in every forward.
            module.warn_if_padding_and_no_attention_mask = lambda *inputs: None  # type: ignore[assignment]


@torch.no_grad()
def restore_buffers(model: PreTrainedModel) -> None:
    """Recomputes the buffers that no file holds (rotary frequencies, embedding scales) after `to_empty`.

    Transformers' initialisation runs for their modules, with all parameters excluded, over two different fillings. A buffer
    that differs afterwards has not been recomputed.

    Raises:
        ConfigError: the model's initialisation does not set a buffer.
    """
    stored = set(model.state_dict())
    lost = {name: buffer for name, buffer in model.named_buffers() if name not in stored}
    owners = {name.rpartition(".")[0] for name in lost}
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # tells transformers to skip it
    results = []
    for filling in (0, 1):
        for buffer in lost.values():
            buffer.fill_(filling)
        for owner in owners:
            model._init_weights(model.get_submodule(owner))
        results.append({name: buffer.clone() for name, buffer in lost.items()})
    for parameter in model.parameters():
        del parameter._is_hf_initialized  # type: ignore[attr-defined]
    for name in lost:
        if not torch.equal(*(result[name] for result in results)):
            raise ConfigError(f"model type {model.config.model_type}", "every buffer must be recomputable", name)


# Safetensors straight into shards: every rank reads the slices that it holds and nothing else.

_FILE_DTYPES = dict(zip(FLOATS, (torch.float64, torch.float32, torch.float16, torch.bfloat16)))


class WeightFiles:
    """The safetensors of a model folder: `model.safetensors`, or the files named in its index.

    Of a model with several towers the files count as those of its text tower, under the names of that (`model_names`).

    Raises:
        ConfigError: no safetensors (pickled weights do not count), or a file is missing or damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        ConfigError.raise_all(weight_problems(f"model {folder}", folder))
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
        if (shape := list(self._slice(name).get_shape())) != list(tensor.shape):
            rule = f"shape must be {list(tensor.shape)} by config.json"
            raise ConfigError(f"{self.folder}: tensor {name}", rule, str(shape))

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor in the files.

        Raises:
            ConfigError: not a float of 16 bits or more.
        """
        code = self._slice(name).get_dtype()
        if code not in _FILE_DTYPES:
            raise ConfigError(f"{self.folder}: tensor {name}", f"dtype must be one of {', '.join(_FILE_DTYPES)}", code)
        return _FILE_DTYPES[code]

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
        handle, stored = self._place_of[name]
        return handle.get_slice(stored)


@torch.no_grad()
def read_weights(model: PreTrainedModel, files: WeightFiles, found: Match) -> list[int]:
    """Fills every parameter and persistent buffer of `model` from `files`, converting the dtype.

    Args:
        found: where they are, of a model that may have had more of them (`tensors_in_files`).

    Returns:
        Bytes that this rank read of each tensor, in the dtype of the files. Tensors of which it holds nothing are left
        out, and a tied tensor counts once.

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape or not a float, or tied tensors differ in the
            files.
    """
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
        sizes = [0]

        def read(file_name: str) -> Tensor:
            part = files.read(file_name)
            sizes.append(part.nbytes)
            return part

        if local.numel():
            local.copy_(found.fused[name].read(model, read, where))
        return sum(sizes)
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
    """Finds every parameter and persistent buffer of a model in its files; see `match`.

    Raises:
        ConfigError: the files lack a tensor, or hold one that the model does not have, or tensors that are made one have
            other shapes or dtypes than the model needs.
    """
    tensors = stored_tensors(model)
    found = match(model, tensors, files.shapes)
    missing = [name for name, candidates in found.stored.items() if not candidates]
    problems = [
        f"{files.folder}: model type {model.config.model_type} {what}: {', '.join(group[:3])} ({len(group)} in all)"
        for what, group in (("needs tensors that are not there", missing), ("has no such tensors", found.unexpected))
        if group
    ]
    for name, fused in found.fused.items():
        what = f"{files.folder}: tensor {name}, made of {fused.names[0]} and {len(fused.names) - 1} others"
        if fused.shape != tuple(tensors[name].shape):
            rule = f"shape must be {list(tensors[name].shape)} by config.json"
            problems.append(str(ConfigError(what, rule, str(list(fused.shape)))))
        if len(dtypes := {files.dtype(one) for one in fused.names}) > 1:
            problems.append(str(ConfigError(what, "these must have one dtype", ", ".join(map(str, dtypes)))))
    ConfigError.raise_all(problems)
    return found


def compare(key: str, model: PreTrainedModel, shapes: Shapes) -> list[str]:
    """Returns what differs between a model and its files, at most one line each for what lacks, is left over or misfits.

    Args:
        key: the setting that names the model, for the lines.
        model: on the meta device.
    """
    family = model.config.model_type
    tensors = stored_tensors(model)
    found = match(model, tensors, shapes)
    missing = [name for name, candidates in found.stored.items() if not candidates]
    of_files = {(candidate, name): shapes[candidate] for name, names in found.stored.items() for candidate in names}
    of_files |= {(f"{name} (of {len(fused.names)})", name): fused.shape for name, fused in found.fused.items()}
    misfits = [
        f"{candidate} is {list(shape)}, not {list(tensors[name].shape)}"
        for (candidate, name), shape in of_files.items()
        if shape != tuple(tensors[name].shape)
    ]
    groups = {
        f"of {family} must be in the files": missing,
        f"in the files, and {family} has none such": found.unexpected,
        "must have the shape that config.json gives": misfits,
    }
    remedy = "copy the model again, or give the config.json that belongs to it"
    return [
        problem(key, f"{len(names)} tensor{'s' * (len(names) > 1)} {rule}", first_few(names), remedy)
        for rule, names in groups.items()
        if names
    ]


# How tensors of a model are made of those in its files, by Transformers' own tables, and how the files' are made again.
#
# Transformers renames the tensors of some families when it loads them, and fuses others: of a mixture of experts the model
# has one tensor per projection, the files one per expert. A table is a list of transforms (`WeightRenaming`,
# `WeightConverter`); `skeleton` keeps that of a model on it, as `from_pretrained` does. Here it is applied to names and
# shapes first, so that what a rank does not need is never read:
#
# 1. `match` renames every name in the files. A tensor is then found under a name of the model, or under that of a converter.
# 2. Converters are run on meta tensors, which says which tensors of the model they make, with their shapes.
# 3. `Fused.read` runs one on the weights; of experts that are stacked it reads those that are asked for.
# 4. `restore` runs the reversed table, for an export.


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """A tensor of the model that a converter makes of tensors in the files."""

    name: str
    """Of the tensor in the model."""
    shape: tuple[int, ...]
    parts: Mapping[str, tuple[str, ...]]
    """Names in the files, by the converter's pattern, in the order in which it takes them."""
    converter: WeightConverter
    first: str
    """The name under which the converter makes its tensors: that of the first of them."""

    @property
    def names(self) -> list[str]:
        """All names in the files."""
        return [name for names in self.parts.values() for name in names]

    def read(self, model: PreTrainedModel, read: Callable[[str], Tensor], where: Sequence[slice]) -> Tensor:
        """The part of the tensor at `where`, one slice per dimension.

        Args:
            read: a whole tensor of the files, by its name.
        """
        parts, rest = self.parts, list(where)
        if where and _stacks_experts(self.converter):
            parts = {pattern: names[where[0]] for pattern, names in parts.items()}
            rest[0] = slice(None)
        read_parts = {pattern: [read(name) for name in names] for pattern, names in parts.items()}
        return _convert(self.converter, self.first, read_parts, model)[self.name][tuple(rest)]


@dataclass(frozen=True, slots=True)
class Match:
    """What the files of a model hold of its tensors."""

    stored: Mapping[str, list[str]]
    """Tensor of the model → its names in the files, its own first; none if it is not there. Without those in `fused`."""
    fused: Mapping[str, Fused]
    """Tensor of the model → how it is made."""
    unexpected: list[str]
    """Names in the files that belong to no tensor, without those that the model class ignores."""
    renamed: frozenset[str] = frozenset()
    """Names in the files that a table has renamed."""


def match(model: PreTrainedModel, tensors: Mapping[str, Tensor], shapes: Shapes) -> Match:
    """Finds the tensors of a model among those in its files.

    Candidates are a tensor's own name and those of tensors tied to it, with and without the prefix of the inner model,
    which files of bare inner models omit.

    Args:
        model: with the table of `skeleton`.
        tensors: parameters, tied ones once, and persistent buffers, by name.
        shapes: of the tensors in the files.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    candidates = _candidates(model, tensors)
    owner = {candidate: name for name, names in candidates.items() for candidate in names}
    found: dict[str, list[str]] = defaultdict(list)
    groups: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    unexpected: list[str] = []
    table: list[WeightTransform] = getattr(model, TABLE)
    renamings = [transform for transform in table if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in table if isinstance(transform, WeightConverter)]
    number_of = {pattern: i for i, converter in enumerate(converters) for pattern in converter.source_patterns}
    renamed: set[str] = set()
    for name in sorted(shapes, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters)
        if new not in owner and name in owner:
            new, pattern = name, None
        if new not in owner:
            unexpected.append(name)
        elif pattern is None:
            found[new].append(name)
            if new != name:
                renamed.add(name)
        else:
            groups[new, number_of[pattern]][pattern].append(name)
    fused: dict[str, Fused] = {}
    for (first, number), parts in groups.items():
        made = _made_of(model, converters[number], first, parts, shapes)
        fused |= {owner[target]: one for target, one in made.items() if target in owner}
        if not made or not made.keys() <= owner.keys():
            unexpected += [name for names in parts.values() for name in names]
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    # Rotary frequencies follow from the config, but files of early Llama models hold them.
    ignored.append(re.compile(r"rotary_emb\.inv_freq$"))
    stored = {
        name: [stored_name for candidate in names for stored_name in found[candidate]]
        for name, names in candidates.items()
        if name not in fused
    }
    left_over = sorted({name for name in unexpected if not any(pattern.search(name) for pattern in ignored)})
    return Match(stored, fused, left_over, frozenset(renamed))


def _made_of(
    model: PreTrainedModel, converter: WeightConverter, first: str, parts: Mapping[str, Sequence[str]], shapes: Shapes
) -> dict[str, Fused]:
    """The tensors that a converter makes of `parts`, by their names in the model; none if the parts do not fit together."""
    names = {pattern: tuple(group) for pattern, group in parts.items()}
    meta = {pattern: [torch.empty(shapes[name], device="meta") for name in group] for pattern, group in names.items()}
    try:
        made = _convert(converter, first, meta, model)
    except Exception:  # whatever an operation raises for shapes that it cannot take
        return {}
    return {name: Fused(name, tuple(tensor.shape), names, converter, first) for name, tensor in made.items()}


def restore(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the files that tensors of the model were made of, by name.

    Args:
        tensors: whole, by name; of a converter that makes several, all of these.
    """
    from transformers.core_model_loading import revert_weight_conversion

    table = getattr(model, TABLE)
    try:
        setattr(model, TABLE, [transform for transform in table if transform.was_used()])
        return revert_weight_conversion(model, tensors)
    finally:
        setattr(model, TABLE, table)


def _candidates(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """For every tensor the names that it may have in the files, its own first."""
    prefix = f"{model.base_model_prefix}."
    tied_to: dict[str, list[str]] = defaultdict(list)
    for target, source in model.all_tied_weights_keys.items():
        tied_to[source].append(target)
    candidates = {}
    for name in tensors:
        aliases = [name, *tied_to[name]]
        candidates[name] = [*dict.fromkeys(each for alias in aliases for each in (alias, alias.removeprefix(prefix)))]
    return candidates


def _convert(
    converter: WeightConverter, first: str, parts: Mapping[str, Sequence[Tensor]], model: PreTrainedModel
) -> dict[str, Tensor]:
    """Runs a converter; returns the tensors that it makes, by their names in the model."""
    own = copy.deepcopy(converter)
    for pattern, tensors in parts.items():
        for tensor in tensors:
            own.add_tensor(first, first, pattern, tensor)  # type: ignore[arg-type]  # as when it saves
    made = own.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _stacks_experts(converter: WeightConverter) -> bool:
    """Whether a converter stacks tensors in a new first dimension, and then leaves that alone."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    stack, *others = converter.operations
    left_alone = all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)
    return isinstance(stack, MergeModulelist) and stack.dim == 0 and left_alone
