"""Bytes that tensors' operations read and write, counted while a program runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

UNREAD = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
"""In-place operations that overwrite what they are called on without reading it."""
SELECTING = {"gather", "index_select", "embedding", "index"}
"""Read of their first operand as much as they return."""
SCATTERING = {"scatter_": 3, "scatter_add_": 3, "index_copy_": 3}
"""Write of the tensor they are called on as much as the operand at this place holds."""
UNTOUCHED = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
}
MATRIX = {"mm", "addmm", "bmm", "baddbmm", "linear", "linear_backward"}
ATTENTION = "_scaled_dot_product"


class Traffic(TorchDispatchMode):
    """Bytes per operation, in `bytes`, for what runs inside the `with` block, backward passes included.

    An operation reads each of its operands once and writes each of its results once, whatever a kernel does beyond
    that; views cost nothing, and of an expanded operand only what is stored counts. Matrix products and attention are
    kept apart, in `products`, because their time is that of their arithmetic.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.products: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        if name in MATRIX or name.startswith(ATTENTION):
            self.products[name] += 1
        elif name not in UNTOUCHED:
            self.bytes[name] += _moved(function, name, args, kwargs, result)
        return result


def _moved(function: Any, name: str, args: tuple, kwargs: dict, result: Any) -> int:
    if name in SELECTING:
        out = _stored(result)
        return 2 * out + sum(_stored(each) for each in _tensors(args[1:]) if each.dtype == torch.int64)
    if name in SCATTERING:
        index, source = args[2], args[SCATTERING[name]]
        written = source.numel() if isinstance(source, Tensor) else index.numel()
        return written * args[0].element_size() * (2 if name == "scatter_add_" else 1) + sum(
            map(_stored, _tensors(args[1:]))
        )
    return sum(_reads_and_writes(function, name, args, kwargs, result))


def _reads_and_writes(function: Any, name: str, args: tuple, kwargs: dict, result: Any) -> Iterator[int]:
    """By the operator's schema: what it may write, it writes; what it does not overwrite blindly, it reads."""
    written_storages = set()
    values = {argument.name: value for argument, value in zip(function._schema.arguments, args)} | kwargs
    for argument in function._schema.arguments:
        alias = argument.alias_info
        for tensor in _tensors(values.get(argument.name)):
            if alias is not None and alias.is_write:
                written_storages.add(tensor.untyped_storage()._cdata)
                yield _stored(tensor)
                if (argument.kwarg_only and argument.is_out) or name in UNREAD:
                    continue
            elif alias is not None:
                return  # a view: nothing moves
            yield _stored(tensor)
    operands = {tensor.untyped_storage()._cdata for tensor in _tensors([args, kwargs])}
    for tensor in _tensors(result):
        if tensor.untyped_storage()._cdata not in operands:
            yield _stored(tensor)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _stored(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride or size == 0 else 1
    return count * tensor.element_size()
