"""How a teacher's tensors reach a student: slots, handles, generations.

A *slot* is room for one teacher micro-batch. A teacher rank owns a ring of them; the driver says with
each call which slots to use and which generation to write, so that a call that fails or a teacher that
is replaced can never shift the count. A generation is odd from before the first byte is written until
after the last, then even; a reader checks it before and after reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """Where to write: `index` in the ring, and the even `generation` that the finished write will bear."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Which part of the global batch the tensors cover: `num_rows` rows from `first_row`, S tokens each."""

    first_row: int
    num_rows: int
    tokens_per_row: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype (`"float32"`) of one tensor in a slot; its first dimension is tokens."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Handle:
    """A small, picklable claim on one written slot.

    `payload` belongs to the transport that made it (an object reference, a segment's name).
    """

    transport: str
    node_id: str
    device: str
    """`"cpu"` or a GPU's UUID"""
    slot: Slot
    layout: Layout
    tensors: tuple[TensorSpec, ...]
    payload: Any = field(repr=False, default=None)

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)


def describe(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """The specs of named tensors, in their order."""
    return tuple(
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        for name, tensor in tensors.items()
    )


class Transport(Protocol):
    """One medium. The writing side calls publish and release; the reading side calls fetch."""

    name: str

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        """Copies the tensors into the slot.

        Raises:
            TransportError: the slot's last content has not been released, or does not fit.
        """
        ...

    def fetch(self, handle: Handle) -> AbstractContextManager[dict[str, Tensor]]:
        """The tensors, valid inside the block only; never write into them.

        Raises:
            TransportError: the slot bears another generation than the handle, before or after the block.
        """
        ...

    def release(self, slot: Slot) -> None:
        """Frees the slot, once every reader is done. Releasing a slot twice, or one never written, does nothing."""
        ...

    def close(self) -> None:
        """Gives back everything; the transport is unusable afterwards."""
        ...
