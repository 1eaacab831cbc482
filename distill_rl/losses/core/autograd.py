"""What all autograd functions of this package have in common: they are not compiled, they choose their dtypes themselves,
and a derivative of their gradients is refused instead of silently taken for 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Entry = TypeVar("Entry", bound=Callable[..., Any])


def untraced(entry: Entry) -> Entry:
    """For the entries of the package: a model that is compiled and calls one has a single graph break, there. What is
    streamed a chunk at a time would be unrolled otherwise, chunk by chunk, or broken at every collective."""
    return cast(Entry, torch.compiler.disable(entry))


def own_dtypes(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For the `forward` of an autograd function: autocast would have its matrix products in bf16."""

    @wraps(forward)
    def wrapped(ctx: Any, tensor: Tensor, *arguments: Any) -> Any:
        with _without_autocast(tensor.device.type):
            return forward(ctx, tensor, *arguments)

    return wrapped


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the `backward` of an autograd function, which is done in the dtypes that it chooses. Where the graph of the
    gradient is asked for (`create_graph=True`), the gradients refuse to be differentiated.

    torch's `once_differentiable` does so only where an incoming gradient requires one: the second derivative of a loss
    that is the root of its graph would be 0 there, without a word.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor | None) -> Any:
        device = next((each.device.type for each in grads if each is not None), "cpu")
        with torch.no_grad(), _without_autocast(device):
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        # Through what was saved the gradients stay connected with the inputs, so that a derivative reaches the refusal.
        sources = [each for each in (*ctx.saved_tensors, *grads) if each is not None and each.requires_grad]
        alone = not isinstance(found, tuple)
        made = tuple(
            _Refusing.apply(each, *sources) if isinstance(each, Tensor) else each
            for each in ((found,) if alone else found)
        )
        return made[0] if alone else made

    return wrapped


def _without_autocast(device: str) -> torch.autocast:
    known = torch.amp.is_autocast_available(device)  # the meta device knows of none
    return torch.autocast(device if known else "cpu", enabled=False)


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()  # a view could not be written to by whoever is next

    @staticmethod
    def backward(ctx, *grads: Tensor):
        raise RuntimeError(
            "second derivative: the losses of this package have first derivatives only; take it of "
            "losses.reference, which is plain autograd in fp64"
        )


class Anchor(torch.autograd.Function):
    """An empty tensor that autograd connects with another one, and that does not keep its memory alive."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None
