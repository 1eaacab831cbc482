"""Parallelism, applied to a model from outside in one fixed order.

    activation checkpointing → tensor parallelism → tie again → compile → take out → FSDP2, or on one rank `ComputeCopies`

Each step relies on the previous ones:

1. Activation checkpointing is a flag of transformers' own layers, so it comes before anything replaces them.
2. Tensor parallelism splits each module as the family's plan says and replaces its parameters with DTensors.
3. Replaced parameters are no longer tied, so input and output embeddings are tied again.
4. Each decoder layer is compiled on its own, including its collectives of tensor parallelism, but not those of FSDP2.
5. Weights that will be quantised are taken out: FSDP2 does not shard what is no parameter.
6. FSDP2 shards over the data-parallel ranks what tensor parallelism left on this rank, one unit per decoder layer. A single
   rank has nothing to share: its parameters stay as they are, and `ComputeCopies` keeps FSDP2's rule of dtypes.

In the end all trained parameters are DTensors on one mesh (`World.parameter_mesh`), or on one rank plain tensors, so clipping,
the optimizer and checkpoints handle one kind of parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, parallel
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import StudentConfig, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.models import families
from distill_rl.models.adapters import ADAPTER, WEIGHTS, is_adapted
from distill_rl.models.families import Family, decoder_layers, family_of, tensor_parallel_problems
from distill_rl.models.forward import inner_model
from distill_rl.models.quantization import Taken, take_out
from distill_rl.models.weights import DTYPES
from distill_rl.parallel.mesh import TP, data_mesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_ADAPTERS = {
    families.COLUMN: (families.REPLICATED, families.COLUMN),
    families.ROW: (families.ROW, families.REPLICATED),
    families.GATHERED: (families.REPLICATED, families.REPLICATED),
    families.SLICED: (families.REPLICATED, families.REPLICATED),
    families.WHOLE: (families.WHOLE, families.WHOLE),
}
"""How a layer is split → how the A and the B of its adapter are. What is split is what meets the split side of the layer; A's
output, a few numbers per token, is the same on every rank."""


_PROGRAMS = 256
"""Of a compiled layer; layers share them. Each kind of layer, mask and mode needs one, and the first layer one more where its
input has no gradient. Beyond torch's default of 8, layers are no longer compiled."""


def _replicate(module: nn.Module, device_mesh: DeviceMesh) -> list[str]:
    """Makes the module's own parameters replicated DTensors; returns their names."""
    own = dict(module.named_parameters(recurse=False))
    for name, parameter in own.items():
        whole = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    return list(own)


class Replicated(parallel.ParallelStyle):
    """Every rank holds the whole module and sees the same whole input. Inputs and outputs are plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Makes the module's parameters replicated DTensors, and converts its input and output to match."""
        _replicate(module, device_mesh)
        module.register_forward_pre_hook(
            lambda _, inputs: (DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False), *inputs[1:])
        )
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


class Whole(parallel.ParallelStyle):
    """Every rank holds the whole module, of any kind, and computes the same with it. Inputs and outputs are plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Makes the module's own parameters replicated DTensors, which its forward sees as plain tensors."""
        names = _replicate(module, device_mesh)

        def enter(module: nn.Module, _: tuple) -> None:
            # An attribute of the instance hides the parameter of this name, as long as there is one. A weight that has been
            # quantised is none any more.
            own = module.named_parameters(recurse=False)
            module.__dict__.update({name: parameter.to_local() for name, parameter in own})  # type: ignore[attr-defined]

        def leave(module: nn.Module, *_: object) -> None:
            for name in names:
                module.__dict__.pop(name, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class TransposedLinear(parallel.ParallelStyle):
    """GPT-2's linear layer, whose weight is [in, out]. Inputs and outputs are plain tensors.

    Args:
        kind: how the layer is split: COLUMN, ROW, GATHERED or SLICED of `families`.
    """

    def __init__(self, kind: str):
        super().__init__()
        by_output = kind in (families.COLUMN, families.GATHERED)
        self.weight: Placement = Shard(1) if by_output else Shard(0)
        self.bias: Placement = Shard(0) if by_output else Replicate()
        self.arrives: Placement = Shard(-1) if kind == families.ROW else Replicate()
        self.enters: Placement = Replicate() if by_output else Shard(-1)
        self.leaves: Placement = Shard(-1) if kind == families.COLUMN else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Splits weight and bias over the mesh, and converts the input and output of the module to match."""
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
    model: PreTrainedModel, mesh: DeviceMesh, settings: StudentConfig | TeacherConfig | None, *, offload: bool = False
) -> list[Taken]:
    """Shards `model` (usually on the meta device) in place over the mesh of a `World`.

    A student is sharded over the data-parallel ranks, by FSDP2 or on one rank by its rule of dtypes: the parameters keep
    their dtype (the master weights), the layers compute in the student's, and gradients are summed in fp32 over the ranks,
    not averaged: the loss divides by the global count. Of any other model these ranks are replicas.

    Args:
        mesh: its tensor-parallel dimension splits the model by the family's plan, if it has more than one rank.
        settings: of the model; None: nothing but tensor parallelism. With `compile` every decoder layer is compiled; with
            tensor parallelism anew for each width of the rows. With `quantization`, of the frozen weights of its decoder
            layers, the model must be on the meta device.
        offload: keep what checkpointing keeps, the input of every layer, in page-locked host memory. The model must be on a
            GPU when it runs.

    Returns:
        The weights that were taken out to be quantised (`quantization.take_out`). Data-parallel ranks all have the same.

    Raises:
        ConfigError: the model cannot be split over this many tensor-parallel ranks, or cannot recompute activations.
    """
    family, student = family_of(model.config), settings if isinstance(settings, StudentConfig) else None
    if student is not None and student.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(f"model family {family.name}", "has no activation checkpointing", remedy="switch it off")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if offload:
            for layer in decoder_layers(model):
                layer._gradient_checkpointing_func = checkpoint_on_host  # type: ignore[assignment]
    if mesh[TP].size() > 1:
        split(model, mesh[TP], family)
    if student is not None and student.compile:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _PROGRAMS)
        for layer in decoder_layers(model):
            # torch cannot trace DTensors whose sizes are symbols, so there each width of the rows has its own program.
            layer.compile(dynamic=False if mesh[TP].size() > 1 else None)
    quantization = None if settings is None else settings.quantization
    taken = [] if quantization is None or quantization == AS_STORED else take_out(model, quantization)
    if student is not None and mesh.size() == 1:
        ComputeCopies.attach(model, DTYPES[student.dtype])
    elif student is not None:
        shard(model, data_mesh(mesh), DTYPES[student.dtype])
    return taken


def checkpoint_on_host(function: Callable[..., Any], *args: Any) -> Any:
    """`torch.utils.checkpoint` of a layer, with its saved input in host memory between forward and backward.

    Checkpointing saves the tensors among `args` and nothing else, so those are all that the outer hooks see: weights and
    what the backward pass recomputes stay on the device. The copies do not make the host wait.
    """
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return checkpoint(function, *args, use_reentrant=False)


def tie_again(model: PreTrainedModel) -> None:
    """Makes input and output embeddings one parameter again, if the config ties them.

    Functions that replace parameters one by one (`parallelize_module`, `to_empty`) leave two of them.
    """
    for target, source in model.all_tied_weights_keys.items():
        owner, _, name = target.rpartition(".")
        setattr(model.get_submodule(owner), name, model.get_parameter(source))


def split(model: PreTrainedModel, tp_mesh: DeviceMesh, family: Family) -> None:
    """Splits a model over a tensor-parallel mesh in place, by the family's plans for its outer modules and its layers.

    A family without plans is split by those of transformers, which must have been tried out (`checks.check_plan`).

    Raises:
        ConfigError: sizes that do not divide by the number of ranks, or a parameter that the plans do not name.
    """
    ConfigError.raise_all(tensor_parallel_problems(model.config, tp_mesh.size()))
    _apply_plan(model, tp_mesh, family.outer_plan if family.layer_plan else _outer_plan(model))
    # The local part of a DTensor is a view, to which FSDP2 cannot safely attach its backward hook.
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, output: output.clone())
    for layer in decoder_layers(model):
        _apply_plan(layer, tp_mesh, family.layer_plan or _layer_plan(layer, families.transformers_plan(model.config)))
    tie_again(model)
    if plain := [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]:
        rule, named = "the tensor-parallel plan must name every parameter", ", ".join(plain[:3])
        raise ConfigError(f"model family {family.name}", rule, named, "set parallel.tp: 1")


def _layer_plan(layer: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The part of a plan that is about modules of this layer; all others that have parameters are whole on every rank."""
    adapted = {name for name, module in layer.named_modules() if is_adapted(module)}
    owners = {name for name, module in layer.named_modules() if [*module.parameters(recurse=False)]}
    inside = {name for name in owners if any(name.startswith(f"{other}.") for other in adapted)}
    return {name: plan.get(name, families.WHOLE) for name in adapted | owners - inside}


def _outer_plan(model: PreTrainedModel) -> dict[str, str]:
    """How the modules around the layers are split, where no family says: embeddings are, all others are whole."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {id(embedding): families.EMBEDDING, id(head): families.HEAD}
    return {
        name: tables.get(id(module), families.WHOLE)
        for name, module in model.named_modules()
        if id(module) not in inside and [*module.parameters(recurse=False)]
    }


def _apply_plan(module: nn.Module, tp_mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    kinds: dict[str, str] = {}
    for name, kind in plan.items():
        if is_adapted(module.get_submodule(name)):
            kinds[f"{name}.base_layer"] = kind
            kinds |= {f"{name}.{weight}.{ADAPTER}": how for weight, how in zip(WEIGHTS, _ADAPTERS[kind])}
        else:
            kinds[name] = kind
    styles = {name: _style(kind, module.get_submodule(name)) for name, kind in kinds.items()}
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    parallel.parallelize_module(module, tp_mesh, styles, src_data_rank=None)
    for name in frozen:  # SequenceParallel makes parameters that require gradients
        module.get_parameter(name).requires_grad_(False)


def _style(kind: str, module: nn.Module) -> parallel.ParallelStyle:
    """The parallel style that splits one module, by its kind in the family's plan (constants of `families`)."""
    # GPT-2's Conv1D, whose weight is transposed, needs a style of its own.
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return TransposedLinear(kind)
    styles: dict[str, Callable[[], parallel.ParallelStyle]] = {
        families.COLUMN: lambda: parallel.ColwiseParallel(),
        families.ROW: lambda: parallel.RowwiseParallel(),
        families.GATHERED: lambda: parallel.ColwiseParallel(output_layouts=Replicate()),
        families.SLICED: lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
        families.EMBEDDING: lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
        families.HEAD: lambda: parallel.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        families.REPLICATED: lambda: Replicated(),
        families.WHOLE: lambda: Whole(),
        # The input [R, S, heads, head size] is split over heads, so the weight's gradient is summed over the ranks.
        families.PER_HEAD: lambda: parallel.SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    return styles[kind]()


def shard(model: PreTrainedModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Applies FSDP2 to a model in place.

    Every decoder layer is a unit, and so are the input and output embeddings unless they are tied; the root has the
    rest. If parameters are sharded, every unit frees its gathered weights after the forward and gathers them again for
    the backward. On a single shard the "gathered" weights are a copy in `compute_dtype` on the same device, made once
    per step: `GradientReduction` keeps it from the first forward to the last backward. There FSDP leaves parameters
    alone that are not trained, so that they are held once. Gradients are summed in fp32 over the ranks, not averaged.

    Args:
        mesh: ("dp",), or ("replica", "shard") for hybrid sharding.
    """
    # An output dtype would cast the hidden states between bf16 layers; the loss casts its input itself.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, output_dtype=None)
    sharded = _num_shards(mesh) > 1
    alone = None if sharded else {parameter for parameter in model.parameters() if not parameter.requires_grad}
    for module in [*_parts(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=sharded, ignored_params=alone)
    if mesh.size() == 1:
        return  # nothing is reduced; a factor would only add a pass over the gradient
    for unit in units(model):
        # Sums, not means. A factor alone would need PREMUL_SUM, which gloo does not have.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _parts(model: PreTrainedModel) -> list[nn.Module]:
    """The parts of a model that FSDP2 shards one by one, and whose inputs are converted to the dtype they compute in."""
    tables = [] if model.all_tied_weights_keys else [model.get_input_embeddings(), model.get_output_embeddings()]
    return [*decoder_layers(model), *tables]


class ComputeCopies:
    """FSDP2's mixed precision on one rank: fp32 parameters, of which the layers compute with copies in another dtype.

    Between two steps the modules hold the parameters. From the first forward pass until `drop` they hold the copies. When
    a backward pass has completed the gradient of a copy, it is added to that of the parameter, in fp32, and freed. Every
    number is what FSDP2 makes on one rank, bit for bit.
    """

    _ATTRIBUTE = "_distill_rl_copies"

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        """Where the modules hold each parameter."""
        self._shown = False
        self.last = False
        """Whether the next backward pass is the step's last, after which a copy is not needed."""

    @classmethod
    def attach(cls, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Makes a model compute with copies in `dtype`; nothing to do if its trained parameters have that dtype."""
        if all(parameter.dtype == dtype for parameter in model.parameters() if parameter.requires_grad):
            return
        copies = cls(dtype)
        setattr(model, cls._ATTRIBUTE, copies)
        for entrance in (model, inner_model(model)):
            entrance.register_forward_pre_hook(lambda *_: copies.show(model), prepend=True)
        for part in _parts(model):
            part.register_forward_pre_hook(partial(_convert_inputs, dtype), with_kwargs=True)

    @classmethod
    def of(cls, model: nn.Module) -> ComputeCopies | None:
        """Those that `attach` gave to a model."""
        return vars(model).get(cls._ATTRIBUTE)

    def show(self, model: nn.Module) -> None:
        """Makes the copies, and gives them to the modules; nothing to do if they have them."""
        if self._shown:
            return
        if not self._places:
            self._find(model)
        for copy in self._copies.values():
            copy.untyped_storage().resize_(copy.nbytes)
        with torch.no_grad():
            torch._foreach_copy_([*self._copies.values()], [*self._copies])
        for held, name, parameter in self._places:
            held[name] = self._copies[parameter]
        self._shown = True

    def drop(self) -> None:
        """Gives the parameters back to the modules, and frees the copies."""
        if not self._shown:
            return
        for held, name, parameter in self._places:
            held[name] = parameter
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)
        self._shown = False

    def _find(self, model: nn.Module) -> None:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                self._places.append((module._parameters, name, parameter))
                if parameter not in self._copies:
                    copy = nn.Parameter(torch.empty_like(parameter, dtype=self._dtype))
                    copy.register_post_accumulate_grad_hook(partial(self._add, parameter))
                    self._copies[parameter] = copy

    def _add(self, parameter: nn.Parameter, copy: Tensor) -> None:
        """Moves the gradient of a copy to its parameter."""
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype)
        else:
            parameter.grad += gradient
        if self.last:
            copy.untyped_storage().resize_(0)


def _convert_inputs(
    dtype: torch.dtype, _: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, (args, kwargs))


def units(model: nn.Module) -> list[FSDPModule]:
    """All modules that are FSDP2 units, the root first; none on one rank."""
    if not isinstance(model, FSDPModule):  # the root is always one
        return []
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Makes every unit present its sharded parameters and drop its gathered copy; on one rank, drops `ComputeCopies`.

    Required after a forward without backward, and before anything reads or writes parameters: a unit that is still
    gathered presents plain tensors to `named_parameters`, and its next forward would use weights from before the
    optimizer's step. Costs nothing for a unit that is already sharded.
    """
    for unit in units(model):
        unit.reshard()
    if (copies := ComputeCopies.of(model)) is not None:
        copies.drop()


class GradientReduction:
    """When the gradients of a step's micro-batches are reduced over the data-parallel ranks.

    With `once`, after the step's last backward. Until then each rank sums the whole gradient of its micro-batches in
    fp32, which takes 4 bytes per parameter, divided by tp only. Without it, every backward ends in a reduce-scatter and
    the sum is kept in shards; with replicas, the all-reduce between them still waits for the last backward, which costs
    no memory. On a single shard the sum is whole either way, so it is always reduced once.

    FSDP2's `set_is_last_backward` stays True throughout. With False it would keep the order of earlier forwards and
    prefetch a unit that the next backward does not need.

    Args:
        model: the student, after `parallelize`.
        mesh: as for `shard`.
        once: reduce once per step, not in every backward.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, once: bool):
        self._units = units(model)
        self._copies = ComputeCopies.of(model)
        self._resident = _num_shards(mesh) == 1
        self.once = once or self._resident

    def before_micro_batch(self, last: bool) -> None:
        """Sets whether the next backward reduces gradients over the ranks, and whether it frees gathered weights.

        Call it before each forward that is followed by a backward.

        Args:
            last: whether this is the last micro-batch of the optimizer step. With one reduction per step, only this one
                reduces; without, only the all-reduce between replicas waits for it. On a single shard, weights are
                freed after this one; otherwise after each.
        """
        if self._copies is not None:
            self._copies.last = last
        for unit in self._units:
            if self.once:
                unit.set_requires_gradient_sync(last, recurse=False)
            else:
                unit.set_requires_all_reduce(last, recurse=False)
            if self._resident:
                unit.set_reshard_after_backward(last, recurse=False)


def _num_shards(mesh: DeviceMesh) -> int:
    return mesh.size(mesh.ndim - 1)
