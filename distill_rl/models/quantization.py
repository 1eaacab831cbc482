"""Weights as numbers of 8 or 4 bits, the layer that computes with one, and which weights of a model these are.

    int8   w ≈ s · q        q from -127 to 127, one scale s per output feature
    fp8    w ≈ s · q        q a float8_e4m3fn, one scale per output feature
    int4   w ≈ s · (q - z)  q and z from 0 to 15, two q to a byte, a scale and a z for every GROUP input features

torchao chooses scales and rounds. Each pass, forward and backward, makes the weight again, in the dtype of the computation,
multiplies, and drops it: with the thousands of tokens of a micro-batch that takes a small part of the matrix product's time,
whereas torchao's own 4-bit kernels are for a few tokens at a time and need one kind of GPU each. So all formats work on
every device, and on a shard of a weight like on a whole one. A shard's numbers are those of the whole weight, whose scales it has:
a model is the same over any number of ranks.

Shapes: O output features, I input features, G groups of input features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import linear

from distill_rl.config.quantization import GROUP
from distill_rl.models.adapters import names_in_files
from distill_rl.models.families import decoder_layers, is_linear
from distill_rl.parallel.shards import local_part, local_slices

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of the linear layers that choose or weigh experts."""

Format = Literal["int8", "int4", "fp8"]
LEAST_GROUP = 16
"""A weight that would need smaller groups is not worth 4 bits and stays as it is."""


def group_of(format: Format, inputs: int) -> int:
    """How many of a weight's `inputs` features share a scale; 0 if the format does not suit that many."""
    if format != "int4":
        return inputs
    group = gcd(GROUP, inputs)
    return group if group >= LEAST_GROUP else 0


class QuantizedWeight(nn.Module):
    """The weight of a linear layer, or those of a layer's experts, in one of the formats above.

    Args:
        weight: [O, I], or [experts, O, I], of the dtype in which it is made again; its rows must suit the format
            (`group_of`).
        transposed: whether `weight` is [I, O] instead, as it is then made again.
        inputs: which input features to keep, of a weight that is split over ranks by them; None: all.
    """

    data: Tensor
    """int8 or float8 [..., O, I], or uint8 [..., O, I / 2] with the even features in the low bits."""
    scale: Tensor
    """[..., O, G]: fp32, with int4 in the dtype of the weight."""
    zero: Tensor | None
    """uint8 [..., O, G], with int4."""

    def __init__(self, weight: Tensor, format: Format, *, transposed: bool = False, inputs: slice | None = None):
        super().__init__()
        self.format, self.transposed, self.dtype = format, transposed, weight.dtype
        self.shape = weight.shape
        if inputs is not None:
            self.shape = weight[inputs].shape if transposed else weight[..., inputs].shape
        rows = weight.detach()
        rows = rows.mT if transposed else rows
        # One expert at a time, because torchao computes in fp32.
        parts = [quantize(part.contiguous(), format) for part in (rows if rows.ndim == 3 else [rows])]
        if inputs is not None:
            parts = [_cut(part, inputs) for part in parts]
        for name in ("data", "scale", "zero"):
            found = [part[name] for part in parts if name in part]
            tensor = None if not found else torch.stack(found) if rows.ndim == 3 else found[0]
            self.register_buffer(name, tensor, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.data.device

    def dequantize(self) -> Tensor:
        """The whole weight, in its first shape and dtype."""
        return self[...]

    def rows(self) -> Tensor:
        """The whole weight as [..., O, I], whatever its first shape."""
        return dequantize(self.data, self.scale, self.zero, self.dtype)

    def __getitem__(self, expert: Any) -> Tensor:
        """One expert's weight, which is all that Transformers' loop over the experts asks for."""
        zero = None if self.zero is None else self.zero[expert]
        weight = dequantize(self.data[expert], self.scale[expert], zero, self.dtype)
        return weight.mT if self.transposed else weight

    def extra_repr(self) -> str:
        return f"{self.format}, {list(self.shape)}"


def quantize(weight: Tensor, format: Format) -> dict[str, Tensor]:
    """`data`, `scale` and, with int4, `zero` of a weight [O, I], as in `QuantizedWeight`."""
    from torchao.quantization import Float8Tensor, MappingType, PerRow, choose_qparams_affine, quantize_affine
    from torchao.quantization.quantize_.common import KernelPreference

    dtype, weight = weight.dtype, weight.float()  # torchao's arithmetic is in the weight's dtype
    if format == "fp8":
        # Its kernels for single kinds of GPUs may round otherwise, and without a lower bound a row of zeros becomes NaN.
        kernels = KernelPreference.TORCH
        made = Float8Tensor.from_hp(weight, granularity=PerRow(), hp_value_lb=1e-12, kernel_preference=kernels)
        return {"data": made.qdata, "scale": made.scale}
    block = (1, group_of(format, weight.shape[-1]))
    int8 = format == "int8"
    kind, mapping = (torch.int8, MappingType.SYMMETRIC) if int8 else (torch.uint8, MappingType.ASYMMETRIC)
    limits = {"quant_min": -127, "quant_max": 127} if int8 else {"quant_min": 0, "quant_max": 15}
    eps = torch.finfo(torch.float32).eps
    dtypes = {"scale_dtype": torch.float32 if int8 else dtype, "zero_point_dtype": kind}
    scale, zero = choose_qparams_affine(weight, mapping, block, kind, **limits, eps=eps, **dtypes, keepdim=True)
    codes = quantize_affine(weight, block, scale.float(), zero, kind, **limits)
    if int8:
        return {"data": codes, "scale": scale}
    return {"data": codes[:, ::2] | codes[:, 1::2] << 4, "scale": scale, "zero": zero}


def _cut(whole: dict[str, Tensor], inputs: slice) -> dict[str, Tensor]:
    """The numbers of some input features of a weight. A group that they cut becomes several with its scale."""
    if "zero" not in whole:
        return {"data": whole["data"][:, inputs].contiguous(), "scale": whole["scale"]}
    group = 2 * whole["data"].shape[1] // whole["scale"].shape[1]
    smaller = gcd(group, inputs.start, inputs.stop)
    groups = slice(inputs.start // smaller, inputs.stop // smaller)
    cut = {name: whole[name].repeat_interleave(group // smaller, 1)[:, groups] for name in ("scale", "zero")}
    return {"data": whole["data"][:, inputs.start // 2 : inputs.stop // 2].contiguous(), **cut}


def dequantize(data: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight [..., O, I] that numbers stand for: one tensor of `dtype`, changed in place, and with int4 its bytes.

    torchao's `dequantize_affine` would go through int32, at twice the memory or more.
    """
    if zero is None:
        return data.to(dtype).mul_(scale)
    codes = torch.stack((data & 15, data >> 4), dim=-1)
    groups = codes.view(*scale.shape, -1).to(dtype)
    return groups.sub_(zero[..., None]).mul_(scale[..., None]).flatten(-2)


class _Product(torch.autograd.Function):
    """hidden · Wᵀ + bias. Autograd would keep W in the dtype of the computation; the backward pass makes it again instead."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return linear(hidden, weight.rows(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.weight.rows(), None, None


class QuantizedLinear(nn.Module):
    """A linear layer whose `weight` is a `QuantizedWeight`; never made, but what `quantize_layer` turns a layer into.

    Weight and bias are frozen: only the input gets a gradient. Under tensor parallelism the layer holds this rank's shard of
    the weight, and DTensors arrive and leave like those of the layer that it was.
    """

    weight: QuantizedWeight
    bias: Tensor | None
    leaves: Placement
    """How the product is distributed over the tensor-parallel ranks."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., I] → [..., O]."""
        if not isinstance(hidden, DTensor):
            return _Product.apply(hidden, self.weight, self.bias)
        # With its own output features, a rank has its own share of the input's gradient.
        gradient = Partial() if isinstance(self.leaves, Shard) else hidden.placements[0]
        product = _Product.apply(hidden.to_local(grad_placements=[gradient]), self.weight, None)
        out = DTensor.from_local(product, hidden.device_mesh, [self.leaves], run_check=False)
        if self.bias is None:
            return out
        whole = Replicate() if self.leaves.is_partial() else self.leaves
        return out.redistribute(placements=[whole]) + self.bias


def quantize_layer(
    layer: nn.Module, weight: Tensor, format: Format, *, transposed: bool, inputs: slice | None = None
) -> None:
    """Turns a linear layer into a `QuantizedLinear` in place, so that its bias and its hooks stay.

    Args:
        layer: `nn.Linear`, or GPT-2's `Conv1D`, whose weight is transposed; its own weight, which may be on the meta
            device, says how it is split over ranks.
        weight: this rank's shard of the weight, which the layer's own lacks; with `inputs` the whole weight, of which they are
            this rank's.
    """
    placement = layer.weight.placements[0] if isinstance(layer.weight, DTensor) else Replicate()
    del layer.weight
    layer.__class__ = QuantizedLinear
    assert isinstance(layer, QuantizedLinear)
    layer.weight = QuantizedWeight(weight, format, transposed=transposed, inputs=inputs)
    layer.leaves = Replicate()
    if isinstance(placement, Shard):
        by_output = placement.dim == (1 if transposed else 0)
        layer.leaves = Shard(-1) if by_output else Partial()


# Which weights of a model are quantised, and how they get there one after the other:
#
#     take_out → allocate and read all other tensors → put_back, weight by weight
#
# Between the two steps the model holds nothing of the weights, so that at no time more than one of them exists in the dtype of
# the computation. These are the linear layers and the experts of the decoder layers. Embeddings, output layer, norms, biases
# and routers stay as they are: they are small, or decide much. So does what is trained: adapters, and modules to save.


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """A weight that was taken out of a model on the meta device."""

    name: str
    """By which files know it (`names_in_files`)."""
    owner: nn.Module
    attribute: str
    parameter: nn.Parameter
    """On the meta device; a DTensor if tensor parallelism has split it."""
    transposed: bool
    """Whether it is [inputs, outputs]."""
    format: Format
    """In which it will be put back."""

    @property
    def inputs(self) -> slice | None:
        """This rank's input features, if tensor parallelism splits the weight by them. Their scales follow from all of them."""
        axis = self.parameter.ndim - (2 if self.transposed else 1)
        part = local_slices(self.parameter)[axis]
        return None if part == slice(0, self.parameter.shape[axis]) else part

    def put_back(self, weight: Tensor) -> None:
        """Gives the model this rank's part of the weight, quantised.

        Args:
            weight: that part, or the whole weight if it is split by its inputs.
        """
        if weight.ndim == 3:
            setattr(self.owner, self.attribute, QuantizedWeight(weight, self.format, transposed=self.transposed))
            return
        setattr(self.owner, self.attribute, self.parameter)
        quantize_layer(self.owner, weight, self.format, transposed=self.transposed, inputs=self.inputs)


def take_out(model: PreTrainedModel, format: Format) -> list[Taken]:
    """Removes the weights that are to be quantised from a model on the meta device, and returns them in its order.

    FSDP2 must not have seen them. Experts must then be computed one by one, so that is how the model's will be.
    """
    taken = [one for one in _quantizable(model, format) if _suits(one)]
    for one in taken:
        del one.owner._parameters[one.attribute]
        if one.parameter.ndim == 3:
            one.owner.config._experts_implementation = "eager"  # type: ignore[union-attr]
    return taken


def weight_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes that this rank holds of quantised weights, and of all other parameters and buffers."""
    quantized = [module for module in model.modules() if isinstance(module, QuantizedWeight)]
    inside = sum(buffer.nbytes for module in quantized for buffer in module.buffers())
    return inside, sum(map(_held, [*model.parameters(), *model.buffers()])) - inside


def _held(tensor: Tensor) -> int:
    """Bytes of a tensor on this rank: of one that is made of others, such as torchao's, theirs."""
    if isinstance(tensor, DTensor):
        return _held(tensor.to_local())
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(_held(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def _quantizable(model: PreTrainedModel, format: Format) -> Iterator[Taken]:
    """Yields the weights of the decoder layers that are matrices to multiply with, frozen, and not a router's."""
    from transformers.pytorch_utils import Conv1D

    tied = {id(model.get_parameter(name)) for pair in model.all_tied_weights_keys.items() for name in pair}
    frozen = {
        id(parameter): name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and id(parameter) not in tied
    }
    known = names_in_files(model, frozen.values())
    for layer in decoder_layers(model):
        for module in layer.modules():
            # Transformers' experts with a choice of implementations, one of which takes them one by one.
            experts = hasattr(module, "is_transposed")
            if not experts and not is_linear(module):
                continue
            for attribute, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in frozen or parameter.ndim != (3 if experts else 2):
                    continue
                name = known[frozen[id(parameter)]]
                if name.split(".")[-2] not in ROUTERS:
                    transposed = bool(module.is_transposed) if experts else type(module) is Conv1D
                    yield Taken(name, module, attribute, parameter, transposed, format)


def _suits(one: Taken) -> bool:
    """Whether this rank's part of a weight can be quantised; of experts, only if every rank holds all of them."""
    part = local_part(one.parameter)
    is_split = any(not placement.is_replicate() for placement in getattr(one.parameter, "placements", ()))
    if part.ndim == 3 and is_split:
        return False
    return part.numel() > 0 and group_of(one.format, one.parameter.shape[-2 if one.transposed else -1]) > 0
