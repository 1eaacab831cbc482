"""How evenly a mixture of experts spreads the tokens it is trained on, as a metric and as a loss.

With E experts of which each token visits K, a document d of T labelled tokens has the balance

    Bd  =  Σᵢ fᵢ · Pᵢ        fᵢ = E / (K·T) · |{t : token t visits expert i}|        Pᵢ = 1/T · Σₜ pₜᵢ

where pₜ are the softmax of the router's logits or, of routers with a bias per expert that corrects their scores (DeepSeek-V3 and
its like), their sigmoids divided by the sum of these. It is 1 if all experts are visited alike, and E / K if K of them get everything. This is the sequence-wise balance loss
of DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437). A batch's balance is the mean over its labelled tokens, each with the
balance of its document, and over the layers. Since no document's balance depends on another document, neither does the
gradient on how a batch is divided into micro-batches, rows or ranks; the usual one, over whatever is in a forward pass, does.

The loss is added where the router is: its output passes through unchanged, and the backward pass through it adds the
gradient of the balance. So it needs no path of its own past FSDP2's units or through recomputed activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill_rl.errors import ConfigError
from distill_rl.models.forward import to_device
from distill_rl.parallel.mesh import World
from distill_rl.parallel.sequence import own_positions
from distill_rl.types import IGNORE_INDEX, TokenRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class _Labelled:
    """The labelled tokens of a micro-batch, as a router sees them: this rank's positions of every row, flattened."""

    tokens: Tensor
    """int64 [L]: their indices."""
    documents: Tensor
    """int64 [L]: the document of each, from 0."""
    sizes: Tensor
    """fp32 [D]: labelled tokens of each document of the whole rows; never 0."""

    @classmethod
    def of(cls, rows: TokenRows, world: World) -> _Labelled:
        part, is_labelled = own_positions(world, rows.shape[1]), rows.labels != IGNORE_INDEX
        every = np.cumsum(rows.position_ids.ravel() == 0).reshape(rows.shape)
        labelled, sizes = np.unique(every[is_labelled], return_counts=True)
        own = is_labelled[:, part]
        documents = np.searchsorted(labelled, every[:, part][own])
        tokens = np.flatnonzero(own)
        place = world.device
        return cls(to_device(tokens, place), to_device(documents, place), to_device(sizes, place).float())


class RouterBalance:
    """Measures the balance of a model's routers, and adds the gradient of `loss.router_weight` times it.

    Does nothing for a model without routers.

    Args:
        model: sharded or not; hooks are left on its routers.
        weight: `loss.router_weight`.
        world: this rank.

    Raises:
        ConfigError: the weight is not 0, and this release of transformers does not tell where the model's routers are.
    """

    def __init__(self, model: PreTrainedModel, weight: float, world: World):
        self._weight, self._world = weight, world
        self._routers = _routers(model)
        for router, index in self._routers:
            router.register_forward_hook(lambda module, _, output, index=index: self._after(module, output, index))
        if weight and not self._routers:
            rule = "needs a mixture of experts whose routers transformers knows"
            remedy = "set it to 0, or use a newer transformers"
            raise ConfigError("loss.router_weight", rule, f"{weight:g} with {model.config.model_type}", remedy)
        self._labelled: _Labelled | None = None
        self._num_labels = 1
        self._sum: Tensor | None = None

    def __bool__(self) -> bool:
        """Whether the model is a mixture of experts whose routers are known."""
        return bool(self._routers)

    @contextmanager
    def of(self, rows: TokenRows, num_labels: int) -> Iterator[Tensor]:
        """Measures the forward pass inside the block, whose backward pass may follow it outside.

        Yields an fp64 scalar, complete after the block: the balance summed over the labelled tokens, a mean over layers; under
        sequence parallelism this rank's part of it.

        Args:
            rows: of the micro-batch, in host memory.
            num_labels: labelled tokens of the global batch, which divide the loss.
        """
        self._num_labels = max(num_labels, 1)
        self._labelled = _Labelled.of(rows, self._world) if self._routers else None
        self._sum = torch.zeros((), dtype=torch.float64, device=self._world.device)
        try:
            yield self._sum
        finally:
            self._sum = None  # activations are computed again in the backward pass, which must not count them again

    def _after(self, router: nn.Module, output: Any, index: int) -> Any:
        """Forward hook of a router: measures it, and attaches the loss to its output."""
        if self._labelled is None or not router.training:
            return output
        is_trained = self._weight > 0 and torch.is_grad_enabled()
        with torch.set_grad_enabled(is_trained):
            balance = _balance(router, output, index, self._labelled, self._world) / len(self._routers)
        if self._sum is not None:
            self._sum += balance.detach()
        if not is_trained:
            return output
        return _WithLoss.apply(balance * (self._weight / self._num_labels), *output)


def _routers(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """The routers of a model, and where in the output of each its logits are, by transformers' own table."""
    for inner in model.modules():
        recorder = (getattr(inner, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", None)  # a list of recorders names other things than routers
        if recorder is not None and kind is not None:
            routers = [each for each in model.modules() if isinstance(each, kind) and hasattr(each, "top_k")]
            return [(each, recorder.index) for each in routers]
    return []


def _balance(router: nn.Module, output: Sequence[Tensor], index: int, labelled: _Labelled, world: World) -> Tensor:
    """Σ T·Bd over the documents of a micro-batch, fp32; under sequence parallelism the part of this rank's positions."""
    # Visits are counted over whole documents, whose probabilities are then summed position by position: the ranks'
    # parts add up.
    logits = output[index][labelled.tokens].float()
    chosen = next((each for each in output if not each.is_floating_point()), None)
    chosen = logits.topk(int(router.top_k)).indices if chosen is None else chosen[labelled.tokens]  # type: ignore[arg-type]
    if hasattr(router, "e_score_correction_bias"):
        scores = logits.sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
    else:
        probabilities = logits.softmax(-1)
    shape = len(labelled.sizes), logits.shape[-1]
    visits = torch.zeros_like(logits).scatter_(1, chosen, 1.0)
    visits, sums = (logits.new_zeros(shape).index_add(0, labelled.documents, each) for each in (visits, probabilities))
    if world.sp_group is not None:
        dist.all_reduce(visits, group=world.sp_group)
    products = (visits * sums).sum(-1) / labelled.sizes
    return products.sum() * (shape[1] / chosen.shape[1])


class _WithLoss(torch.autograd.Function):
    """Returns tensors unchanged; the backward pass through any of them is one through the loss, too."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        one = next(each for each in gradients if each is not None).new_ones((), dtype=torch.float32)
        return one, *gradients
