"""Registers result dataclasses as pytrees, so that torch.compile, checkpointing and FSDP see the tensors inside."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from torch.utils import _pytree as pytree

T = TypeVar("T")


def as_tree(cls: type[T]) -> type[T]:
    """Decorator of a dataclass: registers it as a torch pytree of its fields and returns it unchanged."""
    names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    pytree.register_pytree_node(
        cls,
        lambda output: ([getattr(output, name) for name in names], None),
        lambda leaves, _: cls(*leaves),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    return cls
