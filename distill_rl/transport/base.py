"""How a teacher's tensors reach a student: rings of slots, handles, generations, acknowledgements.

A *slot* is room for one teacher micro-batch. A teacher rank owns a ring of them, which every reader opens before the
first step. The driver says with each call which slots to write and which generation they get, so that a call that fails
or a teacher that is replaced can never shift the count. A generation is odd from before the first byte is written until
after the last, then even; a reader checks it before and after reading, and acknowledges it. A slot is written again only
after the driver has heard from all its readers; `publish` verifies that, and never waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ring:
    """The slots of one teacher rank, and the student ranks that read them."""

    num_slots: int
    slot_bytes: int
    """room of one slot, the gaps between its tensors included (`bytes_needed`)"""
    readers: tuple[int, ...] = (0,)


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
    readers: tuple[int, ...] | None = None
    """student ranks that read these rows; None: all of the ring's"""


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

    `payload` belongs to the transport that made it (an object reference, a ring's nonce).
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


@dataclass(frozen=True, slots=True)
class Offer:
    """What one reader needs to open one writer's ring; small, picklable, and good for that reader alone."""

    transport: str
    source: str
    """whose ring it is; a later offer of the same source takes the place of the earlier one"""
    node_id: str
    device: str
    reader: int
    payload: Any = field(repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a reader hands back to the writer whose ring it has opened."""

    reader: int
    payload: Any = field(repr=False, default=None)


def describe(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """The specs of named tensors, in their order."""
    return tuple(
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        for name, tensor in tensors.items()
    )


class Transport(Protocol):
    """One medium. The writing side calls offer, accept, publish and release; the reading side open and fetch."""

    name: str

    def offer(self, reader: int) -> Offer:
        """The writer's ring for one of its readers; to be asked once per reader."""
        ...

    def open(self, offer: Offer) -> Receipt:
        """Opens a writer's ring for reading, before the first step: a dead writer's ring cannot be opened any more.

        Raises:
            TransportError: the ring is on another node, gone, or not to be reached from this process.
        """
        ...

    def accept(self, receipt: Receipt) -> None:
        """Completes what `open` began, on the writer's side."""
        ...

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        """Copies the tensors into the slot. Never waits.

        Raises:
            TransportError: a reader has not acknowledged the slot's last content, the generation is odd or does not
                grow, or the tensors do not fit.
        """
        ...

    def fetch(self, handle: Handle) -> AbstractContextManager[dict[str, Tensor]]:
        """The tensors, valid inside the block only; never write into them. Acknowledged when the block ends well.

        Raises:
            TransportError: the slot bears another generation than the handle, before or after the block; its ring was
                not opened; or a tensor was written to.
        """
        ...

    def release(self, slot: Slot) -> None:
        """Frees a slot whatever its readers did. Releasing a slot twice, or one never written, does nothing."""
        ...

    def close(self) -> None:
        """Gives back everything; the transport is unusable afterwards."""
        ...
