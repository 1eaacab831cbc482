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
    """Apply FSDP2 with one unit per layer and the rest in the root, even on a single rank: one code path.

    Where parameters are sharded, every unit frees its gathered weights after forward and gathers them again for
    backward. On a single shard the "gathered" weights are a copy in `compute_dtype` on the same device, which is made
    once per step: `GradientReduction` keeps it from the first forward to the last backward.

    Args:
        mesh: ("dp",), or ("replica", "shard") for hybrid sharding.
    """
    # An output dtype would cast the hidden states between bf16 layers; the loss casts for itself.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, output_dtype=None)
    modules: list[nn.Module | list[nn.Module]] = [*decoder_layers(model)]
    if not model.all_tied_weights_keys:
        modules += [model.get_input_embeddings(), model.get_output_embeddings()]
    for module in [*modules, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=_num_shards(mesh) > 1)
    if mesh.size() == 1:
        return  # nothing is reduced; a factor would only cost one more pass over the gradient
    for unit in units(model):
        # Sums, not means. A factor alone would need PREMUL_SUM, which gloo has not.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def units(model: nn.Module) -> list[FSDPModule]:
    """All modules that FSDP2 manages on their own, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Make every unit show its sharded parameters and drop its gathered copy.

    Required after a forward without backward, and before anything reads or writes parameters: a unit that is still
    gathered shows plain tensors to `named_parameters`, and its next forward would run on weights from before the
    optimizer's step. Costs nothing for a unit that is sharded already.
    """
    for unit in units(model):
        unit.reshard()


class GradientReduction:
    """When the gradients of a step's micro-batches are reduced over the data-parallel ranks.

    `once`: after the step's last backward. Until then each rank adds up the whole gradient of its own micro-batches
    in fp32: 4 bytes per parameter, divided by tp only. Otherwise every backward ends in a reduce-scatter and the sum
    is kept in shards; with replicas the all-reduce between them still waits for the last backward, which costs no
    memory. On a single shard there is nothing to save: the sum is whole either way, and is always reduced once.

    FSDP2's `set_is_last_backward` stays True throughout: with False it keeps the order of earlier forwards and
    prefetches a unit that the next backward does not need.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, once: bool):
        self._units = units(model)
        self._resident = _num_shards(mesh) == 1
        self.once = once or self._resident

    def before_micro_batch(self, last: bool) -> None:
        """Call before each forward that will be followed by a backward.

        Args:
            last: no other micro-batch follows in this optimizer step.
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
