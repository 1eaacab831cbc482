"""Which layers of a model get an adapter, and which modules are trained whole, by the settings of `student.lora`.

All that this needs is an `Outline`: of a model on the meta device, or for `check`, which does without torch where it can,
of the tensors in the files of a Llama-like model.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.config.facts import LoraFacts
from distill_rl.config.schema import LoraConfig
from distill_rl.errors import ConfigError, problem
from distill_rl.models.families import is_linear
from distill_rl.models.files.headers import Shapes, plainly_whole
from distill_rl.models.files.hub import read_config
from distill_rl.system.processes import call_in_child

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TARGETS, WHOLE = "student.lora.targets", "student.lora.modules_to_save"
_DEADLINE_S = 300.0
"""For a process that imports torch and one family: seconds on an idle machine, far longer from a cold network disk."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The modules of a model without adapters, by name and in its order."""

    family: str
    parameters: Mapping[str, int]
    """Module → parameters in it."""
    linear: Mapping[str, tuple[int, int]]
    """Linear layer, without `tables` → its two sizes, input and output features in any order."""
    tables: tuple[str, ...]
    """Input embedding and output layer: a loss may compute with the weight of the latter, without its forward."""
    tied: bool
    """Whether these are one table."""
    total: int
    """Parameters of the model, tied ones once."""

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> Outline:
        """That of a model, usually on the meta device."""
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        modules = dict(model.named_modules())
        tables = tuple(name for name, module in modules.items() if module in ends)
        return cls(
            model.config.model_type,
            {name: sum(tensor.numel() for tensor in module.parameters()) for name, module in modules.items()},
            {
                name: (module.weight.shape[0], module.weight.shape[1])
                for name, module in modules.items()
                if is_linear(module) and name not in tables
            },
            tables,
            bool(model.all_tied_weights_keys),
            sum(
                tensor.numel()
                for name, tensor in model.named_parameters(remove_duplicate=False)
                if name not in model.all_tied_weights_keys
            ),
        )

    @classmethod
    def of_files(cls, hf_config: Any, shapes: Shapes) -> Outline:
        """That of a model whose tensors `plainly_whole` confirms."""
        embedding, head = "model.embed_tokens", "lm_head"
        parameters: dict[str, int] = {}
        for tensor, shape in shapes.items():
            parts = tensor.split(".")[:-1]
            for depth in range(len(parts) + 1):
                name = ".".join(parts[:depth])
                parameters[name] = parameters.get(name, 0) + prod(shape)
        tied = bool(hf_config.tie_word_embeddings)
        total = parameters[""] - (parameters.get(head, 0) if tied else 0)
        parameters.setdefault(head, parameters[embedding])
        layers = {
            tensor.removesuffix(".weight"): shape for tensor, shape in shapes.items() if tensor.endswith(".weight")
        }
        linear = {name: (shape[0], shape[1]) for name, shape in layers.items() if name.endswith("_proj")}
        return cls(hf_config.model_type, parameters, linear, (embedding, head), tied, total)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Names of modules, in the model's order."""

    adapted: tuple[str, ...]
    """Linear layers that get an adapter."""
    whole: tuple[str, ...]
    """Modules that are trained whole; of tied embeddings both."""
    patterns: tuple[str, ...]
    """Ends of names by which PEFT finds exactly the layers in `adapted`."""


def choose_layers(outline: Outline, lora: LoraConfig) -> Chosen:
    """Finds the modules that the settings name.

    Raises:
        ConfigError: a name that no module has, or none of the kind; the most similar names are the remedy. Or a rank that
            is larger than every adapted layer.
    """
    problems: list[str] = []
    adapted: set[str] = set() if lora.targets else set(outline.linear)
    for i, target in enumerate(lora.targets or ()):
        named = _ending(outline.parameters, target)
        adapted |= named & set(outline.linear)
        if named.isdisjoint(outline.linear):
            problems.append(_no_target(f"{TARGETS}.{i}", target, outline, named))
    if not outline.linear:
        rule = f"LoRA adapts linear layers, and {outline.family} has none"
        problems.append(problem("student.lora", rule, None, "set student.lora=null"))
    whole: set[str] = set()
    for i, target in enumerate(lora.modules_to_save):
        named = {name for name in _ending(outline.parameters, target) if outline.parameters[name]}
        inside = [name for name in outline.linear if name in adapted and _is_inside(name, named)]
        whole |= named
        if not named:
            rule = "no module of the student has this name"
            problems.append(_nothing(f"{WHOLE}.{i}", rule, target, outline.parameters))
        elif inside:
            rule = f"is trained whole, and {inside[0]} in it cannot have an adapter too"
            problems.append(problem(f"{WHOLE}.{i}", rule, target, f"leave one of the two out, with {TARGETS}"))
    widest = max((min(outline.linear[name]) for name in adapted), default=lora.rank)
    if lora.rank > widest:
        rule = f"must not exceed the {widest} features of the widest layer with an adapter"
        problems.append(
            problem("student.lora.rank", rule, lora.rank, f"use {widest} or less, or train without student.lora")
        )
    if problems:
        raise ConfigError.many(problems)
    if outline.tied and whole & {*outline.tables}:
        whole |= {*outline.tables}
    names = tuple(name for name in outline.linear if name in adapted)
    patterns = _patterns(outline.parameters, names, lora.targets)
    return Chosen(names, tuple(name for name in outline.parameters if name in whole), patterns)


def sizes(outline: Outline, lora: LoraConfig) -> LoraFacts:
    """The numbers of parameters that are trained and not.

    Raises:
        ConfigError: as `choose_layers`.
    """
    chosen = choose_layers(outline, lora)
    outer = [name for name in chosen.whole if not _is_inside(name, {*chosen.whole} - {name})]
    whole = sum(outline.parameters[name] for name in outer)
    if outline.tied and set(outline.tables) <= {*outer}:
        whole -= outline.parameters[outline.tables[0]]  # one table, which counts once
    adapters = lora.rank * sum(sum(outline.linear[name]) for name in chosen.adapted)
    narrow = sum(min(outline.linear[name]) < lora.rank for name in chosen.adapted)
    return LoraFacts(len(chosen.adapted), adapters + whole, outline.total - whole, narrow)


def survey(folder: Path, lora: LoraConfig, shapes: Shapes | None = None) -> LoraFacts:
    """`sizes` of the model in a folder, of which no weight is read.

    Args:
        shapes: of the tensors in its files, if they are there; they spare a Llama-like model's class from being imported.

    Raises:
        ConfigError: as `choose_layers`, or the model cannot be made.
        WorkerError: a process of its own was asked, because this one does without torch, and gave no answer.
    """
    from transformers.utils import is_torch_available

    config = read_config(folder)
    if shapes and plainly_whole(config, shapes):
        return sizes(Outline.of_files(config, shapes), lora)
    if is_torch_available():
        return _survey(folder, lora)
    return call_in_child("student.lora", _survey, folder, lora, deadline_s=_DEADLINE_S)


def _survey(folder: Path, lora: LoraConfig) -> LoraFacts:
    from distill_rl.models.skeleton import DTYPES, skeleton

    model = skeleton(read_config(folder), dtype=DTYPES["fp32"], attention="eager")
    return sizes(Outline.of_model(model), lora)


def _is_inside(name: str, modules: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{each}.") for each in modules)


def _ending(names: Collection[str], end: str) -> set[str]:
    """The names that are `end`, or end with it after a dot."""
    return {name for name in names if name == end or name.endswith(f".{end}")}


def _patterns(modules: Collection[str], adapted: Collection[str], targets: list[str] | None) -> tuple[str, ...]:
    """The settings' targets, or else the last parts of the names, if these find `adapted` alone; otherwise all names."""
    ends = targets or sorted({name.rpartition(".")[2] for name in adapted})
    found = set().union(*(_ending(modules, end) for end in ends))
    return tuple(ends) if found == set(adapted) else tuple(adapted)


def _no_target(key: str, target: str, outline: Outline, named: Collection[str]) -> str:
    if set(named) & {*outline.tables}:
        rule = "is an embedding or the output layer, which has no adapter"
        return problem(key, rule, target, f"name it in {WHOLE}, which trains it whole")
    rule = "names no linear layer of the student" if named else "no layer of the student has this name"
    return _nothing(key, rule, target, outline.linear)


def _nothing(key: str, rule: str, target: str, names: Collection[str]) -> str:
    """A problem with the most similar ends of names as its remedy."""
    near = difflib.get_close_matches(target, list(_ends(names)), n=3, cutoff=0.5)
    if near:
        return problem(key, rule, target, f"did you mean {', '.join(near)}?")
    last = dict.fromkeys(name.rpartition(".")[2] for name in names if name)
    return problem(key, rule, target, f"there are {', '.join(end for end in last if not end.isdecimal())}")


def _ends(names: Collection[str]) -> Iterator[str]:
    """The last part of every name, and its last two, each once and without the numbers of layers."""
    seen = set()
    for name in names:
        parts = name.split(".")
        for end in (parts[-1:], parts[-2:]):
            if not any(part.isdecimal() for part in end) and tuple(end) not in seen:
                seen.add(tuple(end))
                yield ".".join(end)
