"""Which layers of a model get an adapter, and which modules are trained whole, by the settings of `student.lora`.

A model on the meta device is all that this needs. `survey` asks it for `check`, as `files.examine` does.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.config.facts import LoraFacts
from distill_rl.config.schema import LoraConfig
from distill_rl.errors import ConfigError, problem
from distill_rl.models.hub import read_config
from distill_rl.system.child_process import call_in_child

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

TARGETS, WHOLE = "student.lora.targets", "student.lora.modules_to_save"
_DEADLINE_S = 300.0
"""For a process that imports torch and one family: seconds on an idle machine, far longer from a cold network disk."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Names of modules, in the model's order."""

    adapted: tuple[str, ...]
    """Linear layers that get an adapter."""
    whole: tuple[str, ...]
    """Modules that are trained whole; of tied embeddings both."""
    patterns: tuple[str, ...]
    """Ends of names by which PEFT finds exactly the layers in `adapted`."""


def choose_layers(model: PreTrainedModel, lora: LoraConfig) -> Chosen:
    """Finds the modules that the settings name.

    Args:
        model: without adapters, usually on the meta device.

    Raises:
        ConfigError: a name that no module has, or none of the kind; the most similar names are the remedy.
    """
    modules = dict(model.named_modules())
    tables = {name for name, module in modules.items() if module in _tables(model)}
    linear = [name for name, module in modules.items() if _is_linear(module) and name not in tables]
    problems: list[str] = []
    adapted = set() if lora.targets else set(linear)
    for i, target in enumerate(lora.targets or ()):
        named = _ending(modules, target)
        found = [name for name in linear if name in named]
        adapted.update(found)
        if not found:
            problems.append(_no_target(f"{TARGETS}.{i}", target, linear, named, tables))
    if not linear:
        rule = f"LoRA adapts linear layers, and {model.config.model_type} has none"
        problems.append(problem("student.lora", rule, None, "set student.lora=null"))
    whole: set[str] = set()
    for i, target in enumerate(lora.modules_to_save):
        named = {name for name in _ending(modules, target) if any(True for _ in modules[name].parameters())}
        inside = [
            name for name in linear if name in adapted and any(f"{name}.".startswith(f"{each}.") for each in named)
        ]
        whole |= named
        if not named:
            problems.append(_nothing(f"{WHOLE}.{i}", "no module of the student has this name", target, modules))
        elif inside:
            rule = f"is trained whole, and {inside[0]} in it cannot have an adapter too"
            problems.append(
                problem(f"{WHOLE}.{i}", rule, target, "leave one of the two out, with student.lora.targets")
            )
    if problems:
        raise ConfigError.many(problems)
    if model.all_tied_weights_keys and whole & tables:
        whole |= tables
    names = tuple(name for name in linear if name in adapted)
    return Chosen(names, tuple(name for name in modules if name in whole), _patterns(modules, names, lora.targets))


def sizes(model: PreTrainedModel, lora: LoraConfig) -> LoraFacts:
    """The numbers of parameters that are trained and not, of a model without adapters.

    Raises:
        ConfigError: as `choose_layers`.
    """
    chosen = choose_layers(model, lora)
    tied = set(model.all_tied_weights_keys)
    counts = {name: tensor.numel() for name, tensor in model.named_parameters(remove_duplicate=False)}
    whole = sum(
        count
        for name, count in counts.items()
        if name not in tied and any(name.startswith(f"{module}.") for module in chosen.whole)
    )
    total = sum(count for name, count in counts.items() if name not in tied)
    pairs = sum(sum(model.get_parameter(f"{name}.weight").shape) for name in chosen.adapted)
    return LoraFacts(len(chosen.adapted), lora.rank * pairs + whole, total - whole)


def survey(folder: Path, lora: LoraConfig) -> LoraFacts:
    """`sizes` of the model in a folder, of which no weight is read.

    Raises:
        ConfigError: as `choose_layers`, or the model cannot be made.
        WorkerError: a process of its own was asked, because this one does without torch, and gave no answer.
    """
    from transformers.utils import is_torch_available

    if is_torch_available():
        return _survey(folder, lora)
    return call_in_child("student.lora", _survey, folder, lora, deadline_s=_DEADLINE_S)


def _survey(folder: Path, lora: LoraConfig) -> LoraFacts:
    from distill_rl.models.load import DTYPES, skeleton

    return sizes(skeleton(read_config(folder), dtype=DTYPES["fp32"], attention="eager"), lora)


def _tables(model: PreTrainedModel) -> tuple[nn.Module | None, ...]:
    """The input and the output embedding: a loss may compute with the weight of the latter, without its forward."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def _is_linear(module: nn.Module) -> bool:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


def _ending(names: Collection[str], end: str) -> set[str]:
    """The names that are `end`, or end with it after a dot."""
    return {name for name in names if name == end or name.endswith(f".{end}")}


def _patterns(modules: Collection[str], adapted: Collection[str], targets: list[str] | None) -> tuple[str, ...]:
    """The settings' targets, or else the last parts of the names, if these find `adapted` alone; otherwise all names."""
    ends = targets or sorted({name.rpartition(".")[2] for name in adapted})
    found = set().union(*(_ending(modules, end) for end in ends))
    return tuple(ends) if found == set(adapted) else tuple(adapted)


def _no_target(key: str, target: str, linear: Collection[str], named: Collection[str], tables: Collection[str]) -> str:
    """The problem of a target without a linear layer."""
    if set(named) & set(tables):
        rule = "is an embedding or the output layer, which has no adapter"
        return problem(key, rule, target, f"name it in {WHOLE}, which trains it whole")
    rule = "names no linear layer of the student" if named else "no layer of the student has this name"
    return _nothing(key, rule, target, linear)


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
