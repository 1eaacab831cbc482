"""Bytes that the operations on tensors read and write, counted while a program runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
"""In-place operations that do not read what they are called on."""
MAKING = {"new_zeros", "new_full", "zeros_like", "full_like", "ones_like"}
"""Read nothing of what they are called on but its size."""
SELECTING = {"gather", "index_select", "embedding", "index"}
"""Read of their first operand as much as they return."""
SCATTERING = {"scatter_", "scatter_add_", "index_copy_"}
"""Write, of what they are called on, as much as their source holds."""
ONLY_READ = {"_fused_adamw_": "grads"}
"""Operands that the schema says are written and that are not, unless a gradient scaler is in use."""
FREE = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
}
MATRIX = {"mm", "addmm", "bmm", "baddbmm"}
ATTENTION = "_scaled_dot_product"


class Traffic(TorchDispatchMode):
    """Bytes by operation, in `bytes`, of what runs inside the `with` block, backward passes included.

    An operation reads each operand once and writes each result once, whatever a kernel does beyond that. Views cost
    nothing, and of an expanded operand only what is stored counts. Matrix products and attention do not count: their
    time is that of their arithmetic.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        if name not in FREE | MATRIX and not name.startswith(ATTENTION):
            self.bytes[name] += _moved(function, name, args, kwargs, result)
        return result


def _moved(function: Any, name: str, args: tuple, kwargs: dict, result: Any) -> int:
    if name in MAKING:
        return _stored(result)
    if name in SELECTING:
        ids = sum(_stored(each) for each in _tensors(args[1:]) if each.dtype == torch.int64)
        return 2 * _stored(result) + ids
    if name in SCATTERING:
        index, source = args[2], args[3]
        written = source.numel() if isinstance(source, Tensor) else index.numel()
        passes = 2 if name == "scatter_add_" else 1
        return passes * written * args[0].element_size() + sum(_stored(each) for each in _tensors(args[1:]))
    return sum(_by_schema(function, name, args, kwargs, result))


def _by_schema(function: Any, name: str, args: tuple, kwargs: dict, result: Any) -> Iterator[int]:
    """What an operation may write it writes; whatever it does not overwrite unseen it reads; new results it writes."""
    values = {argument.name: value for argument, value in zip(function._schema.arguments, args)} | kwargs
    for argument in function._schema.arguments:
        alias = argument.alias_info
        if alias is not None and not alias.is_write and _tensors(values.get(argument.name)):
            return  # a view
        overwritten = name in OVERWRITING or argument.is_out
        for tensor in _tensors(values.get(argument.name)):
            if alias is not None and argument.name != ONLY_READ.get(name):
                yield _stored(tensor)
                if overwritten:
                    continue
            yield _stored(tensor)
    operands = {each.untyped_storage()._cdata for each in _tensors([args, kwargs])}
    for tensor in _tensors(result):
        if tensor.untyped_storage()._cdata not in operands:
            yield _stored(tensor)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _stored(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride or not size else 1
    return count * tensor.element_size()
