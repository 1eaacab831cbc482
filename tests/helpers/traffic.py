"""Counts the bytes that tensor operations read and write while a program runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OVERWRITING = {"copy_", "_foreach_copy_", "fill_", "zero_", "normal_", "uniform_"}
"""In-place operations that do not read their tensor."""
MAKING = {"new_zeros", "new_full", "zeros_like", "full_like", "ones_like"}
"""Operations that read only the size of their tensor."""
SELECTING = {"gather", "index_select", "embedding", "index"}
"""Operations that read as many bytes of their first operand as they return."""
SCATTERING = {"scatter_", "scatter_add_", "index_copy_"}
"""Operations that write as many bytes of their tensor as their source holds."""
ONLY_READ = {"_fused_adamw_": "grads"}
"""Operands that the schema marks as written, but that are only read without a gradient scaler."""
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
    """Counts bytes by operation, in `bytes`, inside a `with` block, including backward passes.

    The count is a lower bound: an operation reads each operand once and writes each result once. Views are free, and of
    an expanded operand only the stored elements count. Matrix products and attention are left out, because they are
    bound by arithmetic.
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
        ids = sum(_stored(tensor) for tensor in _tensors(args[1:]) if tensor.dtype == torch.int64)
        return 2 * _stored(result) + ids
    if name in SCATTERING:
        index, source = args[2], args[3]
        written = source.numel() if isinstance(source, Tensor) else index.numel()
        passes = 2 if name == "scatter_add_" else 1
        return passes * written * args[0].element_size() + sum(_stored(tensor) for tensor in _tensors(args[1:]))
    return sum(_by_schema(function, name, args, kwargs, result))


def _by_schema(function: Any, name: str, args: tuple, kwargs: dict, result: Any) -> Iterator[int]:
    """Bytes by the operation's schema: operands are read unless they are overwritten, and written if the schema says so;
    new results are written."""
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
        count *= size if stride or not size else 1
    return count * tensor.element_size()
