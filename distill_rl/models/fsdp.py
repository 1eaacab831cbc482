"""FSDP2 for the student: what is sharded, when weights are gathered, and when gradients are reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from distill_rl.models.families import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shard(model: PreTrainedModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Applies FSDP2 with one unit per layer and the rest in the root, even on a single rank, so that there is one code path.

    If parameters are sharded, every unit frees its gathered weights after the forward and gathers them again for the
    backward. On a single shard the "gathered" weights are a copy in `compute_dtype` on the same device, made once per step:
    `GradientReduction` keeps it from the first forward to the last backward.

    Args:
        mesh: ("dp",), or ("replica", "shard") for hybrid sharding.
    """
    # An output dtype would cast the hidden states between bf16 layers; the loss casts its input itself.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, output_dtype=None)
    modules: list[nn.Module | list[nn.Module]] = [*decoder_layers(model)]
    if not model.all_tied_weights_keys:
        modules += [model.get_input_embeddings(), model.get_output_embeddings()]
    for module in [*modules, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=_num_shards(mesh) > 1)
    if mesh.size() == 1:
        return  # nothing is reduced; a factor would only add a pass over the gradient
    for unit in units(model):
        # Sums, not means. A factor alone would need PREMUL_SUM, which gloo does not have.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def units(model: nn.Module) -> list[FSDPModule]:
    """All modules that are FSDP2 units, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Makes every unit present its sharded parameters and drop its gathered copy.

    Required after a forward without backward, and before anything reads or writes parameters: a unit that is still gathered
    presents plain tensors to `named_parameters`, and its next forward would use weights from before the optimizer's step.
    Costs nothing for a unit that is already sharded.
    """
    for unit in units(model):
        unit.reshard()


class GradientReduction:
    """When the gradients of a step's micro-batches are reduced over the data-parallel ranks.

    With `once`, after the step's last backward. Until then each rank sums the whole gradient of its micro-batches in fp32,
    which takes 4 bytes per parameter, divided by tp only. Without it, every backward ends in a reduce-scatter and the sum is
    kept in shards; with replicas, the all-reduce between them still waits for the last backward, which costs no memory. On
    a single shard the sum is whole either way, so it is always reduced once.

    FSDP2's `set_is_last_backward` stays True throughout. With False it would keep the order of earlier forwards and prefetch
    a unit that the next backward does not need.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, once: bool):
        self._units = units(model)
        self._resident = _num_shards(mesh) == 1
        self.once = once or self._resident

    def before_micro_batch(self, last: bool) -> None:
        """Call it before each forward that is followed by a backward.

        Args:
            last: whether this is the last micro-batch of the optimizer step.
        """
        for unit in self._units:
            if self.once:
                unit.set_requires_gradient_sync(last, recurse=False)
            else:
                unit.set_requires_all_reduce(last, recurse=False)
            if self._resident:
                unit.set_reshard_after_backward(last, recurse=False)


def _num_shards(mesh: DeviceMesh) -> int:
    return mesh.size(mesh.ndim - 1)
