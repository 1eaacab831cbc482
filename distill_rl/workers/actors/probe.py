"""What is sent from every teacher to every student rank before the first step: 1 KiB that both know, or a problem."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from distill_rl.errors import TransportError
from distill_rl.transport.base import Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Problem(str):
    """What is in the way of a transport, as one rank sees it; returned, so that another transport can be tried."""


PROBE_LAYOUT = Layout(0, 1, 256)


def probe_tensors(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    import torch

    return {"probe": torch.arange(PROBE_LAYOUT.tokens_per_row, dtype=torch.int32, device=device)}


def reporting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what a transport or its device raises as a `Problem`."""

    @wraps(method)
    def reported(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except (TransportError, RuntimeError) as error:
            return Problem(str(error).splitlines()[0])

    return reported
