"""Which calls would make the host wait for a GPU, counted while the same program runs on a CPU."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,  # item(), bool(), int(), float() of a tensor
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.bincount.default,
}
"""Operators whose value or shape is known only when the device has computed it."""
METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}
"""Copies to the host, which no operator shows where the tensor is there already."""
SOURCES = ("distill_rl/", "transformers/")


class HostWaits:
    """Counts waits by operator and place: `("nonzero", "losses/kd.py:streamed")`, inside a `with` block."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._modes = (_Functions(self.counts), _Operators(self.counts))

    def __enter__(self) -> HostWaits:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counter[tuple[str, str]]):
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS or _waits_for_shape(func, args, kwargs):
            self._counts[func.overloadpacket.__name__, _place()] += 1
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    def __init__(self, counts: Counter[tuple[str, str]]):
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self._counts[func.__name__, _place()] += 1
        return func(*args, **(kwargs or {}))


def _waits_for_shape(func: Any, args: Any, kwargs: Any) -> bool:
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        filled = len(args) > 2 and args[2].numel() == 1  # becomes a masked_fill
        return masks and not filled
    return False


def _place() -> str:
    """The innermost function of the package, or of transformers, that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        source = next((name for name in SOURCES if f"/{name}" in path), None)
        if source is not None:
            return f"{path.rpartition('/' + source)[2]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
