"""What is tried out when a model of a family is loaded that this package's tests do not cover.

**Its tensor-parallel plan** (`check_plan`), before it is split. A plan of transformers is written for its own way of
splitting. Whether it is right here, is seen by training: a model of one layer of each kind, with random weights, computes
hidden states and gradients whole and split, and they must be equal. A wrong gradient is what a comparison of logits alone
would not see: it is what a module gives whose input every rank has, but whose output each uses for its own heads.

**The loaded model** (`probe`), on a dozen tokens. Some families compute something else beyond a number of tokens that their
configuration states, such as a window. Rows of 8192 tokens would take minutes on a CPU, and a small model of the family would
not have the attention, the shards and the weights of this one. So the loaded model itself is also tried with smaller numbers
(`with_numbers`), which its code reads in every forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distill_rl.errors import ConfigError, first_line
from distill_rl.models import forward, varlen
from distill_rl.models.families import decoder_layers, family_of, tensor_parallel_problems
from distill_rl.models.forward import inner_model
from distill_rl.models.parallelize import reshard, split, tie_again
from distill_rl.models.weights import restore_buffers
from distill_rl.parallel.mesh import TP, World
from distill_rl.parallel.sequence import own_positions
from distill_rl.parallel.shards import local_part, local_slices

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_FIRST, _SECOND = 5, 7
"""Lengths of the two documents that are packed into one row."""
_SMALL = 3
"""Tokens that both documents exceed."""
NUMBERS = {
    "attention_chunk_size": "attention_chunk_size",
    "floor_scale": "floor_scale",
    "index_block_size": "block_size",
    "index_topk": "index_topk",
    "index_topk_blocks": "topk_blocks",
    "keep_window_size": "keep_window_size",
    "sliding_window": "sliding_window",
}
"""Numbers in a configuration beyond which a family computes something else, and what modules call their copies of them."""
SCALED_BEYOND = "original_max_position_embeddings"
"""One more, among the parameters of rotary positions, in families that scale queries by position (Ministral 3)."""
SIZES_OF_WEIGHTS = "compress_rates"
"""Numbers of this kind, by kind of layer, that weights have as their size (DeepSeek-V4): the row is lengthened instead."""

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
        _fill_both(whole, parts, world.device)
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
def _fill_both(whole: PreTrainedModel, parts: PreTrainedModel, device: torch.device) -> None:
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
    if not world.all_agree(_same(hidden[1], hidden[0])):
        yield "other hidden states"
    shards = dict(parts.named_parameters())
    for name, parameter in whole.named_parameters():
        if parameter.grad is None:
            continue
        found = shards[name].grad
        gradient = found.full_tensor() if isinstance(found, DTensor) else found
        if not world.all_agree(gradient is not None and _same(gradient, parameter.grad)):
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


def _same(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() <= _CLOSE * wanted.norm() + 1e-6)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # programs for a few tokens would count against the limit of torch.compile
def probe(
    model: PreTrainedModel, *, packing: bool, chunked_head: bool, world: World, longest: int | None = None
) -> None:
    """Tries out a model of a family that the tests do not cover, on a dozen tokens. Leaves the model as it was.

    Collective over the model's ranks.

    Args:
        longest: most tokens of a row of several documents; None: any number.

    Raises:
        ConfigError: documents in one row see each other, or depend on their place in a row of at most `longest` tokens
            (checked with `packing`); the logits cannot be computed from hidden states (checked with `chunked_head`), or
            they change if positions are divided over ranks (checked with sp).
    """
    training, family = model.training, f"model type {model.config.model_type}"
    numbers = numbers_of(model.config)
    exceeded = {name: number for name, number in numbers.items() if longest is None or _exceeds(longest, name, number)}
    model.eval()
    try:
        with _attention(model, "eager") if world.sp > 1 else nullcontext():  # whole rows, in the model's own way
            if packing and packing_leaks(model, numbers, exceeded):
                rule = "documents packed into one row must not see each other"
                raise ConfigError(family, rule, "they do", "set data.packing: false")
            if packing and (counted := counted_in_row(model, numbers, exceeded)):
                rule = "packed documents must not depend on the rest of their row"
                found, remedy = f"they do in rows beyond {' and '.join(counted)}", "a smaller data.max_length"
                raise ConfigError(family, rule, found, f"set data.packing: false, or {remedy}")
            if chunked_head and not head_is_known(model):
                rule = "logits must follow from hidden states and the output embedding"
                raise ConfigError(family, rule, "they differ from the model's own", "use a teacher of another family")
        if world.sp > 1 and (why := undivided(model, world, exceeded, packing=packing)) is not None:
            rule = "logits must not change if the positions of rows are divided over ranks"
            raise ConfigError(family, rule, why, "set parallel.sp: 1")
    finally:
        model.train(training)
        reshard(model)  # or the optimizer would be given the gathered copies


def numbers_of(hf_config: PreTrainedConfig) -> dict[str, int]:
    """The numbers of tokens in a model's configuration beyond which its family may compute something else, by name."""
    rope = getattr(hf_config, "rope_parameters", None) or {}
    numbers: dict[str, Any] = {name: vars(hf_config).get(name) for name in NUMBERS}
    if "llama_4_scaling_beta" in rope:
        numbers[SCALED_BEYOND] = rope.get(SCALED_BEYOND)
    numbers[SIZES_OF_WEIGHTS] = max((getattr(hf_config, SIZES_OF_WEIGHTS, None) or {}).values(), default=0)
    return {name: int(number) for name, number in numbers.items() if type(number) in (int, float) and number > 0}


def _exceeds(length: int, name: str, number: int) -> bool:
    """Whether a row is long enough for another computation. Llama 4 takes the next scale one token earlier."""
    return length > number or (length == number and name == "floor_scale")


@contextmanager
def with_numbers(model: PreTrainedModel, names: Collection[str], tokens: int) -> Iterator[None]:
    """Lets numbers of a model's configuration be `tokens` inside the block; a number of blocks becomes 1.

    Those that weights have as their size stay as they are.
    """
    kept = []
    for holder in list(_holders(model)):
        for name in names:
            for own in {name, NUMBERS.get(name, name)} & holder.keys():
                if type(holder[own]) in (int, float):
                    kept.append((holder, own, holder[own]))
                    holder[own] = 1 if name == "index_topk_blocks" else tokens
    try:
        yield
    finally:
        for holder, own, number in kept:
            holder[own] = number


def _holders(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Yields, each once, what may hold such a number: attributes of configurations and modules, and rotary parameters."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        yield vars(config)
        yield getattr(config, "rope_parameters", None) or {}
    yield from map(vars, model.modules())


def packing_leaks(model: PreTrainedModel, numbers: Collection[str], exceeded: Mapping[str, int]) -> bool:
    """Whether the logits of a row's second document depend on the first one, or on its position in the row.

    Runs the model three times, with larger numbers than the row. Collective over its ranks.

    Args:
        numbers: of `numbers_of`.
        exceeded: those of them that rows can exceed.
    """
    ids, positions = _two_documents(model, exceeded)
    rows = ids, _another_first(ids)
    with with_numbers(model, numbers, ids.shape[1] + 1):
        packed, after_another = (forward.logits(model, row, positions).float()[:, _FIRST:] for row in rows)
        alone = forward.logits(model, ids[:, _FIRST:], positions[:, _FIRST:]).float()
    # Equal shapes round alike, whereas another row length may round differently; hence the two bounds.
    return not (_close(packed, after_another, 1e-4) and _close(packed, alone, 3e-2))


def counted_in_row(model: PreTrainedModel, numbers: Collection[str], exceeded: Mapping[str, int]) -> list[str]:
    """The numbers, as `name=value`, that rows must not exceed, because documents then depend on the rest of the row.

    Rows have equal shapes, so that they round alike, and a small effect shows. Arguments as in `packing_leaks`. Runs the
    model four times if there is a number to exceed. Collective over its ranks.
    """
    ids, positions = _two_documents(model, exceeded)

    def logits(ids: Tensor, names: Collection[str], tokens: int) -> Tensor:
        with with_numbers(model, names, tokens):
            return forward.logits(model, ids, positions).float()[:, _FIRST:]

    def depends(names: Collection[str]) -> bool:
        # A number of which the documents fall short and the row does not must change nothing. For a count that begins
        # with 1, it is larger than a document by one.
        if not _close(logits(ids, names, int(positions.max()) + 2), within, 1e-4):
            return True
        # Beyond a number, another first document must change nothing.
        return not _close(logits(ids, names, _SMALL), logits(_another_first(ids), names, _SMALL), 1e-4)

    if not exceeded:
        return []
    with with_numbers(model, numbers, ids.shape[1] + 1):
        within = logits(ids, [], 0)
        if not depends(exceeded):
            return []
        names = [name for name in exceeded if depends([name])] or exceeded
    return [f"{name}={exceeded[name]}" for name in names]


def undivided(model: PreTrainedModel, world: World, exceeded: Mapping[str, int], *, packing: bool) -> str | None:
    """Why a model's rows cannot be divided over the ranks of `world`; None if the logits are those of whole rows.

    Collective. Whole rows go through `eager` attention, which every family has in its own way.

    Args:
        exceeded: as in `packing_leaks`; they are tried as they are, and smaller.
        packing: try a row of two documents; otherwise of one.
    """
    ids, positions = _two_documents(model, exceeded, multiple=world.sp)
    if not packing:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    part, host = own_positions(world, ids.shape[1]), positions.cpu().numpy()
    documents = varlen.Documents.of(host, ids.device, world.sp_group)
    for tried in ({}, exceeded) if exceeded else ({},):
        with with_numbers(model, tried, _SMALL):
            with _attention(model, "eager"):
                whole = forward.logits(model, ids, positions).float()
            why = "they do"
            try:
                divided = forward.logits(model, ids[:, part], positions[:, part], documents).float()
                close = _close(divided, whole[:, part], 3e-2)
            except (ValueError, RuntimeError, TypeError) as error:  # some families' code requires a mask
                close, why = False, first_line(error)
        if not world.all_agree(close):
            return why
    return None


@contextmanager
def _attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    config: Any = model.config
    kept = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = kept


def head_is_known(model: PreTrainedModel) -> bool:
    """Whether `forward.head` of `forward.body` gives the model's own logits, up to rounding. Collective.

    The model must be without FSDP.
    """
    ids, positions = _two_documents(model)
    whole = forward.logits(model, ids, positions).float()
    return _close(forward.head(model, forward.body(model, ids, positions)).float(), whole, 1e-3)


def _two_documents(
    model: PreTrainedModel, exceeded: Mapping[str, int] | None = None, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Made-up ids and positions [1, n] of two packed documents: positions start again at 0 in the second."""
    device, second = model.device, _SECOND + (exceeded or {}).get(SIZES_OF_WEIGHTS, 0)
    second += -(_FIRST + second) % multiple
    ids = torch.arange(3, 3 + _FIRST + second, device=device) % model.config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(_FIRST, device=device), torch.arange(second, device=device)])
    return ids[None], positions[None]


def _another_first(ids: Tensor) -> Tensor:
    """The ids of `_two_documents` with the first document in reverse order."""
    return torch.cat([ids[:, :_FIRST].flip(1), ids[:, _FIRST:]], dim=1)


def _close(left: Tensor, right: Tensor, share: float) -> bool:
    """Whether the largest absolute difference is at most this share of the largest absolute value of `right`."""
    return bool((left - right).abs().max() <= share * right.abs().max())
