"""The probe: 1 KiB of known content that every teacher sends to every student rank before the first step."""

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
    """Why a transport does not work for one rank. Returned, not raised, so that another can be tried."""


PROBE_LAYOUT = Layout(0, 1, 256)


def probe_tensors(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    import torch

    return {"probe": torch.arange(PROBE_LAYOUT.tokens_per_row, dtype=torch.int32, device=device)}


def reporting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method return the errors of a transport or its device as a `Problem`."""

    @wraps(method)
    def reported(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except (TransportError, RuntimeError) as error:
            return Problem(str(error).splitlines()[0])

    return reported
