"""Which weights of a model are quantised, and how they get there one after the other.

    take_out → allocate and read all other tensors → put_back, weight by weight

Between the two steps the model holds nothing of the weights, so that at no time more than one of them exists in the dtype of
the computation. These are the linear layers and the experts of the decoder layers. Embeddings, output layer, norms, biases
and routers stay as they are: they are small, or decide much. So does what is trained: adapters, and modules to save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distill_rl.models.families import decoder_layers, is_linear
from distill_rl.models.lora.adapters import names_in_files
from distill_rl.models.quantization.weight import Format, QuantizedWeight, group_of, quantize_layer
from distill_rl.parallel.shards import local_part, local_slices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of the linear layers that choose or weigh experts."""


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

    @property
    def inputs(self) -> slice | None:
        """This rank's input features, if tensor parallelism splits the weight by them. Their scales follow from all of them."""
        axis = self.parameter.ndim - (2 if self.transposed else 1)
        part = local_slices(self.parameter)[axis]
        return None if part == slice(0, self.parameter.shape[axis]) else part

    def put_back(self, weight: Tensor, format: Format) -> None:
        """Gives the model this rank's part of the weight, quantised.

        Args:
            weight: that part, or the whole weight if it is split by its inputs.
        """
        if weight.ndim == 3:
            setattr(self.owner, self.attribute, QuantizedWeight(weight, format, transposed=self.transposed))
            return
        setattr(self.owner, self.attribute, self.parameter)
        quantize_layer(self.owner, weight, format, transposed=self.transposed, inputs=self.inputs)


def take_out(model: PreTrainedModel, format: Format) -> list[Taken]:
    """Removes the weights that are to be quantised from a model on the meta device, and returns them in its order.

    FSDP2 must not have seen them. Experts must then be computed one by one, so that is how the model's will be.
    """
    taken = [one for one in _quantizable(model) if _suits(one, format)]
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


def _quantizable(model: PreTrainedModel) -> Iterator[Taken]:
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
                    yield Taken(name, module, attribute, parameter, transposed)


def _suits(one: Taken, format: Format) -> bool:
    """Whether this rank's part of a weight can be quantised; of experts, only if every rank holds all of them."""
    part = local_part(one.parameter)
    if (
        isinstance(one.parameter, DTensor)
        and part.ndim == 3
        and not all(placement.is_replicate() for placement in one.parameter.placements)
    ):
        return False
    return part.numel() > 0 and group_of(format, one.parameter.shape[-2 if one.transposed else -1]) > 0
