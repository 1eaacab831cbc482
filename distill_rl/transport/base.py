"""What crosses from a teacher to a student, and what a transport promises: rings of slots, handles, offers, receipts.

The protocol, the same for every medium:

1. A teacher rank owns a *ring* of *slots*; a slot has room for one teacher micro-batch. Before the first step every
   student rank that reads from the teacher opens the ring: the writer makes an `Offer`, the reader answers with a
   `Receipt`, the writer accepts it.
2. The driver decides which slots a call writes and which *generation* each of them gets, and passes both as arguments.
   The teacher keeps no count of its own, so a call that fails, or a teacher that is replaced, cannot shift it.
3. `publish` sets the slot's generation to an odd number, copies the tensors, sets it to the even number it was given,
   and returns a small `Handle`. The handle travels through Ray as the result of the call.
4. `fetch` compares the slot's generation with the handle's before and after its block, and then acknowledges it.
5. The driver reuses a slot only after all calls that read it have returned. `publish` verifies this from the
   acknowledgements and raises if a reader is late. It never waits.
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
    """Size of one slot, including the gaps between its tensors (`bytes_needed`)."""
    readers: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where to write: the index in the ring, and the even generation that marks the finished write."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Which part of the global batch the tensors cover: `num_rows` rows from `first_row`, S tokens each."""

    first_row: int
    num_rows: int
    tokens_per_row: int
    readers: tuple[int, ...] | None = None
    """Student ranks that read these rows. None: all readers of the ring."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype (`"float32"`) of one tensor in a slot. Its first dimension is tokens."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Handle:
    """A small, picklable reference to the content of one slot."""

    transport: str
    node_id: str
    """Where it was written."""
    slot: Slot
    layout: Layout
    tensors: tuple[TensorSpec, ...]
    payload: Any = field(repr=False, default=None)
    """Private to the transport that made the handle: an object reference, or the name and nonce of a ring."""

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one reader needs to open one writer's ring. Small, picklable, and valid for that reader alone."""

    transport: str
    source: str
    """Name of the writer. A later offer with the same source replaces the earlier ring."""
    node_id: str
    device: str
    """`"cpu"` or the UUID of a GPU."""
    reader: int
    payload: Any = field(repr=False, default=None)

    @property
    def ring_name(self) -> str:
        """The ring in messages: `ring of SOURCE`, or `ring of a writer` without a source."""
        return f"ring of {self.source or 'a writer'}"


@dataclass(frozen=True, slots=True)
class Receipt:
    """A reader's answer to the writer whose ring it has opened."""

    reader: int
    payload: Any = field(repr=False, default=None)


def describe(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """The specs of named tensors, in their order; the layout of a slot follows from them."""
    return tuple(
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        for name, tensor in tensors.items()
    )


class Transport(Protocol):
    """One medium. The writing side calls offer, accept and publish; the reading side calls open and fetch."""

    name: str

    def offer(self, reader: int) -> Offer:
        """Describes the ring for one of its readers. Call it once per reader."""

    def open(self, offer: Offer) -> Receipt:
        """Opens a writer's ring for reading. Call it before the first step: the ring of a dead writer cannot be opened.

        Raises:
            TransportError: the ring is on another node, is gone, or cannot be reached from this process.
        """

    def accept(self, receipt: Receipt) -> None:
        """Takes note on the writer's side that a reader has opened the ring. Call it once per receipt."""

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        """Copies the tensors into the slot, replacing its content, and returns the handle by which readers fetch it.

        Never waits for a reader: one that is late is an error.

        Args:
            slot: where to write; its generation must be even and larger than that of the slot's previous content.
            layout: the rows that the tensors cover, and which readers must acknowledge them.

        Raises:
            TransportError: a reader has not acknowledged the previous content, the generation is odd or not larger than
                the previous one, or the tensors do not fit.
        """

    def fetch(self, handle: Handle) -> AbstractContextManager[dict[str, Tensor]]:
        """Gives a `with` block the tensors by name, read-only and valid inside the block only.

        A block that ends without an error is acknowledged to the writer.

        Raises:
            TransportError: the slot's generation differs from the handle's, before or after the block; the ring was not
                opened; or the block wrote to a tensor.
        """

    def close(self) -> None:
        """Frees everything. The transport is unusable afterwards."""
