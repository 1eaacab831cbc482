"""Tries out a tensor-parallel plan that this package's tests do not cover, before a model is split by it.

A plan of transformers is written for its own way of splitting. Whether it is right here, is seen by training: a model of one
layer of each kind, with random weights, computes hidden states and gradients whole and split, and they must be equal. A wrong
gradient is what a comparison of logits alone would not see: it is what a module gives whose input every rank has, but whose
output each uses for its own heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distill_rl.errors import ConfigError, first_line
from distill_rl.models.buffers import restore_buffers
from distill_rl.models.families import decoder_layers, family_of, tensor_parallel_problems
from distill_rl.models.forward import inner_model
from distill_rl.models.parallelize import split, tie_again
from distill_rl.parallel.mesh import TP, World
from distill_rl.parallel.shards import local_part, local_slices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 12
_CLOSE = 1e-3
"""Relative L2 error of a hidden state or gradient that counts as rounding, in fp32."""


def check_plan(model: PreTrainedModel, world: World) -> None:
    """Tries out the plan of a model on the meta device, if it is one of transformers' and there is something to split.

    Collective over the world. Needs memory for two layers of each kind in fp32, with gradients.

    Raises:
        ConfigError: the model cannot be split by that plan, or computes something else when it is.
    """
    family, ranks = family_of(model.config), world.tp
    if ranks == 1 or family.layer_plan or tensor_parallel_problems(model.config, ranks):
        return
    whole = _shortened(model, world.tp)
    parts = deepcopy(whole)
    try:
        split(parts, world.mesh[TP], family)
        _fill(whole, parts, world.device)
        different = next(_differences(whole, parts, world), None)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        different = first_line(error)
    if different is not None:
        rule = "must compute the same when it is split by transformers' plan"
        raise ConfigError(f"model family {family.name}", rule, different, "set parallel.tp: 1")


def _shortened(model: PreTrainedModel, ranks: int) -> PreTrainedModel:
    """A copy without memory that has one layer of each kind, small embeddings, fp32 and plain attention."""
    short = deepcopy(model).float().eval().requires_grad_(True)
    short.set_attn_implementation("eager")
    layers = decoder_layers(short)
    kinds = {tuple((name, each.shape) for name, each in layer.named_parameters()): layer for layer in reversed(layers)}
    for module in short.modules():
        if isinstance(module, nn.ModuleList) and any(each is layers[0] for each in module):
            del module[:]
            module.extend(reversed(kinds.values()))
            short.config.num_hidden_layers = len(module)
            break
    embeddings: Any = short.get_input_embeddings()
    width = embeddings.weight.shape[1]
    ids = 16 * ranks
    short.set_input_embeddings(nn.Embedding(ids, width, device="meta"))
    short.set_output_embeddings(nn.Linear(width, ids, bias=False, device="meta"))
    tie_again(short)
    return short


@torch.no_grad()
def _fill(whole: PreTrainedModel, parts: PreTrainedModel, device: torch.device) -> None:
    """Gives both models the same random weights, those of `parts` as this rank's shards; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for model in (whole, parts):
        model.to_empty(device=device)
        tie_again(model)
        restore_buffers(model)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.zero_()
    shards = dict(parts.named_parameters())
    for name, parameter in whole.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        # Vectors are norms' weights, around 1, and biases.
        values = 1 + 0.1 * values if values.ndim == 1 else values / math.sqrt(values.shape[-1])
        parameter.copy_(values)
        local_part(shards[name]).copy_(values[local_slices(shards[name])])


def _differences(whole: PreTrainedModel, parts: PreTrainedModel, world: World) -> Iterator[str]:
    """Yields what differs between the two models on some made-up hidden states, the same on every rank. Collective."""
    hidden = [_trained(model) for model in (whole, parts)]
    if not world.all_agree(_close(hidden[1], hidden[0])):
        yield "other hidden states"
    shards = dict(parts.named_parameters())
    for name, parameter in whole.named_parameters():
        if parameter.grad is None:
            continue
        found = shards[name].grad
        gradient = found.full_tensor() if isinstance(found, DTensor) else found
        if not world.all_agree(gradient is not None and _close(gradient, parameter.grad)):
            yield f"another gradient of {name}"


def _trained(model: PreTrainedModel) -> Tensor:
    """Hidden states of made-up inputs; leaves the gradient of a made-up function of them in the parameters."""
    generator = torch.Generator().manual_seed(1)
    inner: Any = inner_model(model)
    embeddings: Any = model.get_input_embeddings()
    shape = 1, _TOKENS, embeddings.weight.shape[1]
    inputs, weights = (torch.randn(shape, generator=generator).to(model.device) for _ in range(2))
    positions = torch.arange(_TOKENS, device=model.device)[None]
    hidden = inner(inputs_embeds=inputs, position_ids=positions, use_cache=False).last_hidden_state
    (hidden * weights).sum().backward()
    return hidden.detach()


def _close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() <= _CLOSE * wanted.norm() + 1e-6)
