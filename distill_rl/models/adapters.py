"""Low-rank adapters of a student (`student.lora`): which layers get one, what that trains, and PEFT's layers in a sharded model.

    choose_layers → inject → parallelize → … → read_weights → initialise     when a student is loaded
    gather → merged                                                          when it is exported

A layer W becomes a PEFT layer around it: `NAME.base_layer` is W, `NAME.lora_A.default` and `NAME.lora_B.default` are
A [rank, in] and B [out, rank], and the output gets scale · B A x (arXiv 2106.09685). W stays as it is, in the compute dtype;
A and B are fp32 and all that is trained, besides the modules that are trained whole. Files and exports know W by NAME alone.

The choice of layers needs an `Outline` only: of a model on the meta device, or for `check`, which does without torch where it
can, of the tensors in the files of a Llama-like model. So torch and PEFT are imported inside functions.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.config.facts import AdapterFacts
from distill_rl.config.schema import LoraConfig, StudentConfig
from distill_rl.errors import ConfigError, problem
from distill_rl.models.families import is_linear
from distill_rl.models.files import Shapes

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

KEY = "student.lora"
"""The setting."""
_TARGETS, _WHOLE = f"{KEY}.targets", f"{KEY}.modules_to_save"
FOLDER = "adapter"
"""Name of the adapter's folder in an export."""
_PREFIX = "base_model.model."
"""PEFT's wrappers around a model."""
ADAPTER = "default"
"""PEFT's name of an adapter without a name."""
WEIGHTS = ("lora_A", "lora_B")
"""Modules with the A and the B of a layer, as PEFT names them."""
_INJECTED = "_distill_rl_lora"
"""Attribute of a model with its `Injected`."""


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
        modules, tied = dict(model.named_modules()), model.all_tied_weights_keys
        tables = tuple(name for name, module in modules.items() if module in ends)
        parameters = {name: sum(tensor.numel() for tensor in each.parameters()) for name, each in modules.items()}
        weights = {name: each.weight for name, each in modules.items() if is_linear(each) and name not in tables}
        linear = {name: (weight.shape[0], weight.shape[1]) for name, weight in weights.items()}
        every = model.named_parameters(remove_duplicate=False)
        total = sum(tensor.numel() for name, tensor in every if name not in tied)
        return cls(model.config.model_type, parameters, linear, tables, bool(tied), total)

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
        found = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith("_proj.weight")}
        linear = {name: (shape[0], shape[1]) for name, shape in found.items()}
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
            problems.append(_no_target(f"{_TARGETS}.{i}", target, outline, named))
    if not outline.linear:
        rule = f"LoRA adapts linear layers, and {outline.family} has none"
        problems.append(problem(KEY, rule, None, "set student.lora=null"))
    whole: set[str] = set()
    for i, target in enumerate(lora.modules_to_save):
        named = {name for name in _ending(outline.parameters, target) if outline.parameters[name]}
        inside = [name for name in outline.linear if name in adapted and _is_inside(name, named)]
        whole |= named
        if not named:
            rule = "no module of the student has this name"
            problems.append(_nothing(f"{_WHOLE}.{i}", rule, target, outline.parameters))
        elif inside:
            rule = f"is trained whole, and {inside[0]} in it cannot have an adapter too"
            problems.append(problem(f"{_WHOLE}.{i}", rule, target, f"leave one of the two out, with {_TARGETS}"))
    widest = max((min(outline.linear[name]) for name in adapted), default=lora.rank)
    if lora.rank > widest:
        rule = f"must not exceed the {widest} features of the widest layer with an adapter"
        problems.append(problem(f"{KEY}.rank", rule, lora.rank, f"use {widest} or less, or train without student.lora"))
    ConfigError.raise_all(problems)
    if outline.tied and whole & {*outline.tables}:
        whole |= {*outline.tables}
    names = tuple(name for name in outline.linear if name in adapted)
    # The settings' targets, or else the last parts of the names, if these find the adapted layers alone; otherwise all names.
    ends = tuple(lora.targets or sorted({_last_part(name) for name in names}))
    found = set().union(*(_ending(outline.parameters, end) for end in ends))
    patterns = ends if found == adapted else names
    return Chosen(names, tuple(name for name in outline.parameters if name in whole), patterns)


def sizes(outline: Outline, lora: LoraConfig) -> AdapterFacts:
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
    return AdapterFacts(len(chosen.adapted), adapters + whole, outline.total - whole, narrow)


def _is_inside(name: str, modules: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{each}.") for each in modules)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _ending(names: Collection[str], end: str) -> set[str]:
    """The names that are `end`, or end with it after a dot."""
    return {name for name in names if name == end or name.endswith(f".{end}")}


def _no_target(key: str, target: str, outline: Outline, named: Collection[str]) -> str:
    if set(named) & {*outline.tables}:
        rule = "is an embedding or the output layer, which has no adapter"
        return problem(key, rule, target, f"name it in {_WHOLE}, which trains it whole")
    rule = "names no linear layer of the student" if named else "no layer of the student has this name"
    return _nothing(key, rule, target, outline.linear)


def _nothing(key: str, rule: str, target: str, names: Collection[str]) -> str:
    """A problem with the most similar ends of names as its remedy."""
    # The last part of every name, and its last two, each once and without the numbers of layers.
    parts = [name.split(".") for name in names]
    ends = dict.fromkeys(tuple(each[-count:]) for each in parts for count in (1, 2))
    texts = [".".join(end) for end in ends if not any(part.isdecimal() for part in end)]
    if near := difflib.get_close_matches(target, texts, n=3, cutoff=0.5):
        return problem(key, rule, target, f"did you mean {', '.join(near)}?")
    last = dict.fromkeys(_last_part(name) for name in names if name)
    return problem(key, rule, target, f"there are {', '.join(end for end in last if not end.isdecimal())}")


@dataclass(frozen=True, slots=True)
class Injected:
    """What a model was given."""

    settings: LoraConfig
    chosen: Chosen
    transposed: bool
    """Whether its layers are GPT-2's, whose weights are [in, out]."""
    misread: frozenset[str]
    """Last parts of names by which PEFT looks for experts in this family, though they are names of linear layers."""

    def peft_config(self, targets: tuple[str, ...], **others: Any) -> Any:
        """The `LoraConfig` of PEFT.

        Args:
            targets: names of layers, or ends of names.
        """
        from peft import LoraConfig as PeftConfig

        scale = self.settings.scale * self.settings.rank
        return PeftConfig(
            r=self.settings.rank,
            lora_alpha=int(scale) if scale == int(scale) else scale,  # type: ignore[arg-type]  # any number will do
            lora_dropout=self.settings.dropout,
            target_modules=list(targets),
            fan_in_fan_out=self.transposed,
            task_type="CAUSAL_LM",
            **others,
        )

    def peft_config_of_files(self, **others: Any) -> Any:
        """The `LoraConfig` of an adapter's folder, by which PEFT finds the same layers in the model of Transformers.

        Layers whose names it misreads are named by their weights, for which it has no dropout.
        """
        weights = [end for end in self.chosen.patterns if _last_part(end) in self.misread]
        config = self.peft_config(tuple(end for end in self.chosen.patterns if end not in weights), **others)
        if weights:
            config.target_parameters, config.lora_dropout = [f"{end}.weight" for end in weights], 0.0
        return config


def inject(model: PreTrainedModel, student: StudentConfig) -> None:
    """Gives a model on the meta device its adapters, in place, and marks what is trained: adapters, modules to save.

    These become fp32; everything else keeps its dtype.

    Raises:
        ConfigError: as `choose_layers`, or PEFT adapts other layers.
    """
    import peft
    import torch
    from transformers.pytorch_utils import Conv1D

    settings = student.lora
    assert settings is not None
    chosen = choose_layers(Outline.of_model(model), settings)
    transposed = isinstance(model.get_submodule(chosen.adapted[0]), Conv1D)
    injected = Injected(settings, chosen, transposed, _misread(chosen.adapted, model))
    # PEFT knows a family by its config: a container without one has its names taken as they are.
    place = torch.nn.Sequential(model) if injected.misread else model
    with torch.device("meta"):
        peft.inject_adapter_in_model(injected.peft_config(chosen.adapted), place)
    if different := adapted_layers(model).keys() ^ {*chosen.adapted}:
        rule = f"PEFT {peft.__version__} adapts other layers of {model.config.model_type} than those that were chosen"
        raise ConfigError(KEY, rule, min(different), "install the version of PEFT that pyproject.toml names")
    setattr(model, _INJECTED, injected)
    model.requires_grad_(False)
    trained = [layer.get_submodule(part) for layer in adapted_layers(model).values() for part in WEIGHTS]
    for module in [*trained, *(model.get_submodule(name) for name in chosen.whole)]:
        module.float().requires_grad_(True)


def _misread(layers: Iterable[str], model: PreTrainedModel) -> frozenset[str]:
    """The last parts of names of linear layers that PEFT takes for those of experts in files of older versions.

    In families whose experts Transformers has fused since, it adapts the experts in place of any layer with such a name.
    """
    from peft import LoraConfig as PeftConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    found = set()
    for end in {_last_part(name) for name in layers}:
        config = PeftConfig(target_modules=[end])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # one of two names that stand for one fused tensor
            found.add(end)
        if config.target_parameters:
            found.add(end)
    return frozenset(found)


def injected_in(model: nn.Module) -> Injected | None:
    """What `inject` gave the model; None for a model without adapters."""
    return getattr(model, _INJECTED, None)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a PEFT layer around a linear one."""
    return hasattr(module, "base_layer") and hasattr(module, WEIGHTS[0])


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by name; none in a model without."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def names_in_files(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Name in the model → name that files know it by, without the adapters' own tensors."""
    if injected_in(model) is None:
        return {name: name for name in names}
    own = tuple(f".{part}.{ADAPTER}." for part in WEIGHTS)
    return {name: name.replace(".base_layer.", ".") for name in names if not any(part in name for part in own)}


def initialise(model: nn.Module, seed: int) -> None:
    """Sets A to uniform numbers in ±1/√in, as `nn.Linear` and PEFT do, and B to zero.

    The numbers depend on the seed and the layer's name, so that every layout of ranks begins with the same adapters.
    """
    import torch

    from distill_rl.models.determinism import seed_of
    from distill_rl.parallel.shards import local_part, local_slices

    for name, layer in adapted_layers(model).items():
        draw = torch.Generator().manual_seed(seed_of(f"{seed}/lora/{name}"))
        first, second = (getattr(layer, part)[ADAPTER].weight for part in WEIGHTS)
        bound = first.shape[1] ** -0.5
        whole = torch.empty(first.shape).uniform_(-bound, bound, generator=draw)
        with torch.no_grad():
            local_part(first).copy_(whole[local_slices(first)])
            local_part(second).zero_()


@dataclass(frozen=True, slots=True)
class Adapter:
    """What was trained, whole, on one rank's CPU. Names are the files'."""

    injected: Injected
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """Layer → A and B."""
    whole: Mapping[str, Tensor]
    """Parameter of a module that is trained whole → its value."""

    def merged(self, name: str, base: Tensor) -> Tensor:
        """A tensor of the model with its update; `base`, as it is, if it has none.

        Args:
            base: the tensor before training.

        Returns:
            In fp32 if it was trained. The arithmetic is that of PEFT's own merge.
        """
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer in self.pairs:
            first, second = self.pairs[layer]
            update = second @ first
            return base.float() + (update.T if self.injected.transposed else update) * self.injected.settings.scale
        return self.whole.get(name, base)


def gather(model: nn.Module) -> Adapter | None:
    """The trained tensors of a model with adapters on the first rank, None on the others. Collective."""
    from torch import distributed

    from distill_rl.parallel.shards import gather_to_first

    injected = injected_in(model)
    assert injected is not None
    every = model.named_parameters(remove_duplicate=False)
    trained = {name: parameter for name, parameter in every if parameter.requires_grad}
    wholes: dict[int, Tensor | None] = {}
    for parameter in trained.values():
        if id(parameter) not in wholes:  # tied ones once
            wholes[id(parameter)] = gather_to_first(parameter)
    if distributed.is_initialized() and distributed.get_rank():
        return None
    values = {name: wholes[id(parameter)] for name, parameter in trained.items()}
    layers = adapted_layers(model)
    pairs = {name: tuple(values.pop(f"{name}.{part}.{ADAPTER}.weight") for part in WEIGHTS) for name in layers}
    return Adapter(injected, pairs, values)  # type: ignore[arg-type]


def write_adapter(adapter: Adapter, folder: Path, *, base: str, revision: str | None) -> None:
    """Writes adapter_config.json and adapter_model.safetensors into a new folder.

    Tensors are fp32. Of tied embeddings that were trained both are written: PEFT gives each a copy of its own.

    Args:
        base: folder or hub name of the model that the adapter belongs to; a folder is written as an absolute path.
        revision: of a hub model.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.torch import save_file

    place = Path(base).expanduser()
    of_base = {"base_model_name_or_path": str(place.resolve()) if place.is_dir() else base, "revision": revision}
    whole = list(adapter.injected.chosen.whole) or None
    config = adapter.injected.peft_config_of_files(modules_to_save=whole, inference_mode=True, **of_base)
    tensors = {
        f"{_PREFIX}{layer}.{part}.weight": tensor
        for layer, pair in adapter.pairs.items()
        for part, tensor in zip(WEIGHTS, pair)
    }
    tensors |= {_PREFIX + name: tensor.clone() for name, tensor in adapter.whole.items()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "adapter_config.json", folder / "adapter_model.safetensors")  # see `export`
