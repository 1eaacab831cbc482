"""How tensors of a model are made of those in its files, by Transformers' own tables, and how the files' are made again.

Transformers renames the tensors of some families when it loads them, and fuses others: of a mixture of experts the model
has one tensor per projection, the files one per expert. A table is a list of transforms (`WeightRenaming`,
`WeightConverter`); `skeleton` keeps that of a model on it, as `from_pretrained` does. Here it is applied to names and
shapes first, so that what a rank does not need is never read:

1. `match` renames every name in the files. A tensor is then found under a name of the model, or under that of a converter.
2. Converters are run on meta tensors, which says which tensors of the model they make, with their shapes.
3. `Fused.read` runs one on the weights; of experts that are stacked it reads those that are asked for.
4. `restore` runs the reversed table, for an export.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform

    from distill_rl.models.files.tensors import Shapes

TABLE = "_weight_conversions"
"""Attribute of a model with its table, as Transformers names it."""


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
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    candidates = _candidates(model, tensors)
    owner = {candidate: name for name, names in candidates.items() for candidate in names}
    found: dict[str, list[str]] = defaultdict(list)
    groups: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    unexpected: list[str] = []
    renamings, converters = _split(model)
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
        made = _made(model, converters[number], first, parts, shapes)
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


def _made(
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

    table = _table(model)
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
    return {
        name: [
            *dict.fromkeys(
                candidate for alias in [name, *tied_to[name]] for candidate in (alias, alias.removeprefix(prefix))
            )
        ]
        for name in tensors
    }


def _table(model: PreTrainedModel) -> list[WeightTransform]:
    """The model's transforms, as `skeleton` has left them."""
    return getattr(model, TABLE)  # type: ignore[return-value]


def _split(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """The table of a model: what only renames, and what computes."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    table = _table(model)
    renamings = [transform for transform in table if isinstance(transform, WeightRenaming)]
    return renamings, [transform for transform in table if isinstance(transform, WeightConverter)]


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
    return (
        isinstance(stack, MergeModulelist)
        and stack.dim == 0
        and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)
    )
