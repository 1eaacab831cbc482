"""Parallelism, applied to a model from outside in one fixed order.

    activation checkpointing → tensor parallelism → tie again → compile → FSDP2

Each step relies on the ones before: checkpointing wraps plain layers; splitting replaces parameters and thereby
unties them; FSDP2 shards what tensor parallelism left to this rank. All parameters of a model end as DTensors on
one mesh (`World.parameter_mesh`), so that clipping, the optimizer and checkpoints know one kind of parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from distill_rl.errors import ConfigError
from distill_rl.models.families import (
    COLUMN,
    EMBEDDING,
    GATHERED,
    HEAD,
    PER_HEAD,
    REPLICATED,
    ROW,
    SLICED,
    Family,
    decoder_layers,
    tensor_parallel_problems,
)
from distill_rl.models.fsdp import shard
from distill_rl.parallel.mesh import TP, data_mesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Replicated(ParallelStyle):
    """Every rank holds the module and sees the same whole input; tensors go in and come out plain."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(
            lambda _, inputs: (DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False), *inputs[1:])
        )
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


class TransposedLinear(ParallelStyle):
    """GPT-2's linear layer, whose weight is [in, out]; tensors go in and come out plain."""

    def __init__(self, kind: str):
        super().__init__()
        by_output = kind in (COLUMN, GATHERED)
        self.weight: Placement = Shard(1) if by_output else Shard(0)
        self.bias: Placement = Shard(0) if by_output else Replicate()
        self.arrives: Placement = Shard(-1) if kind == ROW else Replicate()
        self.enters: Placement = Replicate() if by_output else Shard(-1)
        self.leaves: Placement = Shard(-1) if kind == COLUMN else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, place in (("weight", self.weight), ("bias", self.bias)):
            parameter = module.get_parameter(name)
            split = distribute_tensor(parameter, device_mesh, [place], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))

        def enter(_: nn.Module, inputs: tuple) -> DTensor:
            tensor = DTensor.from_local(inputs[0], device_mesh, [self.arrives], run_check=False)
            return tensor.redistribute(placements=[self.enters])

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda _, inputs, output: output.redistribute(placements=[self.leaves]).to_local())
        return module


def parallelize(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    family: Family,
    fsdp: bool,
    activation_checkpointing: bool = False,
    compute_dtype: torch.dtype,
    compile: bool = False,
) -> PreTrainedModel:
    """Shard `model` (usually on the meta device) in place over the mesh of a `World` and return it.

    With FSDP the parameters keep their dtype (the master weights), the layers compute in `compute_dtype`, and
    gradients are summed in fp32 over the data-parallel ranks, never averaged: the loss divides by the global count.

    Raises:
        ConfigError: the model cannot be split over this many tensor-parallel ranks, or cannot recompute activations.
    """
    if activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(f"model family {family.name}", "has no activation checkpointing", remedy="switch it off")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mesh[TP].size() > 1:
        _split(model, mesh[TP], family)
    if compile:
        for layer in decoder_layers(model):
            layer.compile()
    if fsdp:
        shard(model, data_mesh(mesh), compute_dtype)
    return model


def tie_again(model: PreTrainedModel) -> None:
    """Make input and output embeddings one parameter where the config says so.

    Whatever replaces parameters one by one (`parallelize_module`, `to_empty`) leaves two behind.
    """
    for target, source in model.all_tied_weights_keys.items():
        owner, _, name = target.rpartition(".")
        setattr(model.get_submodule(owner), name, model.get_parameter(source))


def _split(model: PreTrainedModel, tp_mesh: DeviceMesh, family: Family) -> None:
    problems = tensor_parallel_problems(model.config, tp_mesh.size())
    if problems:
        raise ConfigError.many(problems)
    _apply_plan(model, tp_mesh, family.outer_plan)
    # The local part of a DTensor is a view, on which FSDP2 cannot hang its backward hook safely.
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, output: output.clone())
    for layer in decoder_layers(model):
        _apply_plan(layer, tp_mesh, family.layer_plan)
    tie_again(model)
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise ConfigError(
            f"model family {family.name}",
            "the tensor-parallel plan must name every parameter",
            ", ".join(plain[:3]),
            "set parallel.tp: 1",
        )


def _apply_plan(module: nn.Module, tp_mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    styles = {name: _style(kind, module.get_submodule(name)) for name, kind in plan.items()}
    parallelize_module(module, tp_mesh, styles, src_data_rank=None)


def _style(kind: str, module: nn.Module) -> ParallelStyle:
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return TransposedLinear(kind)
    styles: dict[str, Callable[[], ParallelStyle]] = {
        COLUMN: lambda: ColwiseParallel(),
        ROW: lambda: RowwiseParallel(),
        GATHERED: lambda: ColwiseParallel(output_layouts=Replicate()),
        SLICED: lambda: RowwiseParallel(input_layouts=Replicate()),
        EMBEDDING: lambda: RowwiseParallel(input_layouts=Replicate()),
        HEAD: lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        REPLICATED: lambda: Replicated(),
        # Its input [R, S, heads, head size] is split over heads, so its weight's gradient is summed over the ranks.
        PER_HEAD: lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    return styles[kind]()
