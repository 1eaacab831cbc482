"""PEFT's adapters in a model that is sharded from the meta device.

    inject → parallelize → … → read_weights → initialise          when a student is loaded
    gather → merged                                               when it is exported

A layer W becomes a PEFT layer around it: `NAME.base_layer` is W, `NAME.lora_A.default` and `NAME.lora_B.default` are
A [rank, in] and B [out, rank], and the output gets scale · B A x (arXiv 2106.09685). W stays as it is, in the compute dtype;
A and B are fp32 and all that is trained, besides the modules that are trained whole. Files and exports know W by NAME alone.
PEFT is imported inside functions only.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distill_rl.config.schema import LoraConfig
from distill_rl.models.determinism import seed_of
from distill_rl.models.lora import Chosen, Outline, choose_layers
from distill_rl.parallel.shards import gather_to_first, local_part, local_slices

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FOLDER = "adapter"
"""Name of the adapter's folder in an export."""
_PREFIX = "base_model.model."
"""PEFT's wrappers around a model."""

ADAPTER = "default"
"""PEFT's name of an adapter without a name."""
_INJECTED = "_distill_rl_lora"
"""Attribute of a model with its `Injected`."""
_WEIGHTS = ("lora_A", "lora_B")


@dataclass(frozen=True, slots=True)
class Injected:
    """What a model was given."""

    settings: LoraConfig
    chosen: Chosen
    transposed: bool
    """Whether its layers are GPT-2's, whose weights are [in, out]."""

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


def inject(model: PreTrainedModel, settings: LoraConfig) -> None:
    """Gives a model on the meta device its adapters, in place, and marks what is trained: adapters, modules to save.

    These become fp32; everything else keeps its dtype.

    Raises:
        ConfigError: as `choose_layers`.
    """
    from peft import inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    chosen = choose_layers(Outline.of_model(model), settings)
    transposed = isinstance(model.get_submodule(chosen.adapted[0]), Conv1D)
    injected = Injected(settings, chosen, transposed)
    with torch.device("meta"):
        inject_adapter_in_model(injected.peft_config(chosen.adapted), model)
    setattr(model, _INJECTED, injected)
    model.requires_grad_(False)
    trained = [layer.get_submodule(part) for layer in adapted_layers(model).values() for part in _WEIGHTS]
    for module in [*trained, *(model.get_submodule(name) for name in chosen.whole)]:
        module.float().requires_grad_(True)


def injected_in(model: nn.Module) -> Injected | None:
    """What `inject` gave the model; None for a model without adapters."""
    return getattr(model, _INJECTED, None)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a PEFT layer around a linear one."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by name; none in a model without."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def names_in_files(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Name in the model → name that files know it by, without the adapters' own tensors."""
    if injected_in(model) is None:
        return {name: name for name in names}
    own = tuple(f".{part}.{ADAPTER}." for part in _WEIGHTS)
    return {name: name.replace(".base_layer.", ".") for name in names if not any(part in name for part in own)}


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Sets A to uniform numbers in ±1/√in, as `nn.Linear` and PEFT do, and B to zero.

    The numbers depend on the seed and the layer's name, so that every layout of ranks begins with the same adapters.
    """
    for name, layer in adapted_layers(model).items():
        draw = torch.Generator().manual_seed(seed_of(f"{seed}/lora/{name}"))
        first, second = (getattr(layer, part)[ADAPTER].weight for part in _WEIGHTS)
        bound = first.shape[1] ** -0.5
        whole = torch.empty(first.shape).uniform_(-bound, bound, generator=draw)
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

    def changes(self, name: str) -> bool:
        """Whether a tensor of the model was trained."""
        layer, _, kind = name.rpartition(".")
        return name in self.whole or (kind == "weight" and layer in self.pairs)


def gather(model: nn.Module) -> Adapter | None:
    """The trained tensors of a model with adapters on the first rank, None on the others. Collective."""
    injected = injected_in(model)
    assert injected is not None
    trained = {
        name: parameter for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad
    }
    wholes: dict[int, Tensor | None] = {}
    for parameter in trained.values():
        if id(parameter) not in wholes:  # tied ones once
            wholes[id(parameter)] = gather_to_first(parameter)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return None
    values = {name: wholes[id(parameter)] for name, parameter in trained.items()}
    pairs = {
        name: tuple(values.pop(f"{name}.{part}.{ADAPTER}.weight") for part in _WEIGHTS)
        for name in adapted_layers(model)
    }
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
    chosen = adapter.injected.chosen
    config = adapter.injected.peft_config(
        chosen.patterns,
        modules_to_save=list(chosen.whole) or None,
        base_model_name_or_path=str(place.resolve()) if place.is_dir() else base,
        revision=revision,
        inference_mode=True,
    )
    tensors = {
        f"{_PREFIX}{layer}.{part}.weight": tensor
        for layer, pair in adapter.pairs.items()
        for part, tensor in zip(("lora_A", "lora_B"), pair)
    }
    tensors |= {_PREFIX + name: tensor.clone() for name, tensor in adapter.whole.items()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "adapter_config.json", folder / "adapter_model.safetensors")  # see `export`
