"""What all autograd functions of this package share.

torch.compile does not trace them, they choose their own dtypes, and second derivatives raise an error instead of
silently being 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Entry = TypeVar("Entry", bound=Callable[..., Any])


def untraced(entry: Entry) -> Entry:
    """Decorator of the public functions: torch.compile does not trace them; a compiled caller has a graph break there.

    Traced, the loop over chunks would be unrolled, or broken at every collective.
    """
    return cast(Entry, torch.compiler.disable(entry))


def own_dtypes(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of an autograd function's `forward`: runs it with autocast disabled on the device of its first tensor.

    Autocast would do its matrix products in bf16.
    """

    @wraps(forward)
    def wrapped(ctx: Any, tensor: Tensor, *arguments: Any) -> Any:
        with _without_autocast(tensor.device.type):
            return forward(ctx, tensor, *arguments)

    return wrapped


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of an autograd function's `backward`: runs it without autocast and without building a graph.

    It calls `backward(ctx, saved, *grads)`, `saved` being `ctx.saved_tensors`, which are read once: hooks on saved
    tensors may move them anew at each reading, and `torch.utils.checkpoint` refuses a second one. If `ctx.refusal` is
    set, it is raised as a RuntimeError before they are read.

    With `create_graph=True` the returned gradients raise RuntimeError when they are differentiated in turn.

    torch's `once_differentiable` does this only if an incoming gradient requires a gradient. The second derivative of a
    loss that is the root of its graph would silently be 0.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor | None) -> Any:
        """Runs `backward` without a graph; under `create_graph`, differentiating the results raises RuntimeError."""
        if refusal := getattr(ctx, "refusal", None):
            raise RuntimeError(refusal)
        saved = ctx.saved_tensors
        device = next((each.device.type for each in grads if each is not None), "cpu")
        with torch.no_grad(), _without_autocast(device):
            found = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():
            return found
        # The saved inputs keep the gradients connected to the graph, so that differentiating them reaches `_Refusing`.
        sources = [each for each in (*saved, *grads) if each is not None and each.requires_grad]
        alone = not isinstance(found, tuple)
        made = tuple(
            _Refusing.apply(each, *sources) if isinstance(each, Tensor) else each
            for each in ((found,) if alone else found)
        )
        return made[0] if alone else made

    return wrapped


def _without_autocast(device: str) -> torch.autocast:
    """Returns a context manager that disables autocast on this type of device, such as "cuda".

    For a type without autocast, such as "meta", it disables the CPU's.
    """
    known = torch.amp.is_autocast_available(device)  # not on the meta device
    return torch.autocast(device if known else "cpu", enabled=False)


class _Refusing(torch.autograd.Function):
    """Copies a gradient; backward through the copy raises RuntimeError."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *sources: Tensor) -> Tensor:
        """Returns a copy of the gradient.

        Args:
            sources: tensors that require a gradient; they only connect the copy to the graph.
        """
        return gradient.clone()  # a view could not be modified in place downstream

    @staticmethod
    def backward(ctx, *grads: Tensor):
        """Always raises RuntimeError: a second derivative was asked for."""
        raise RuntimeError(
            "second derivative: the losses of this package have first derivatives only; take it of "
            "losses.reference, which is plain autograd in fp64"
        )


class Anchor(torch.autograd.Function):
    """Returns an empty tensor connected to another one in the graph, without keeping its memory alive.

    It passes no gradient back.
    """

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None
