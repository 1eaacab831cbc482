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

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from distill_rl.errors import TransportError

if TYPE_CHECKING:
    import torch
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
        """Takes note on the writer's side that a reader has opened the ring. Call it once per receipt. Nothing by default."""
        return

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


# Where a rank's tensors are: what the choice of a transport depends on.


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank's tensors are."""

    node_id: str
    device: str
    """`"cpu"` or the UUID of a GPU."""
    uid: int
    expandable: str = ""
    """The environment variable that turns expandable segments on, whose memory cannot be shared. Empty: none."""
    reaches: tuple[str, ...] = ()
    """UUIDs of the GPUs whose memory this process can map: its own, and visible peers."""


def place_of(device: torch.device, node_id: str) -> Place:
    """The place of the calling process, whose model is on `device`. For a GPU, this initialises CUDA.

    Args:
        device: without an index, the current GPU.
        node_id: of this process's node, as Ray names it.
    """
    expandable = expandable_segments(os.environ)
    if device.type != "cuda":
        return Place(node_id, "cpu", os.getuid(), expandable)
    import torch

    this_gpu = torch.cuda.current_device() if device.index is None else device.index
    reaches = tuple(
        gpu_uuid(index)
        for index in range(torch.cuda.device_count())
        if index == this_gpu or torch.cuda.can_device_access_peer(this_gpu, index)
    )
    return Place(node_id, gpu_uuid(this_gpu), os.getuid(), expandable, reaches)


def gpu_uuid(index: int) -> str:
    """The name of a GPU that is the same in all processes. Its index depends on CUDA_VISIBLE_DEVICES."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def expandable_segments(environment: Mapping[str, str]) -> str:
    """The environment variable that turns expandable segments of torch's allocator on; empty if none does.

    Args:
        environment: variables and their values, such as `os.environ`.
    """
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        settings = environment.get(variable, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in settings:
            return variable
    return ""


@dataclass(frozen=True, slots=True)
class SlotPiece:
    """Tokens `start` to `stop` of the source with index `source`."""

    source: int
    start: int
    stop: int


# Re-sharding: which slots, and which tokens in them, make up the rows that a student rank needs.
#
# Teacher and student may split a global batch over different numbers of ranks and micro-batches. Rows keep their global
# numbers, so the pieces follow from intervals of row numbers. For a student that needs rows 2 to 6:
#
#     teacher micro-batches    [0 1 2] [3 4 5] [6 7 8]
#     student rows                 [2   3 4 5   6]
#     pieces                       2 of the first, 3 4 5 of the second, 6 of the third


def readers_of(layout: Layout, first_row: int, num_rows: int, *, dp: int, per_row: int) -> tuple[int, ...]:
    """The student ranks that read some row of `layout`, ascending.

    The `num_rows` rows from `first_row` are divided evenly, in order, over `dp` data-parallel ranks, so `num_rows` must
    be a multiple of `dp`, and the layout's rows must lie among them. Each data-parallel rank is `per_row` neighbouring
    ranks, sequence-parallel and tensor-parallel ones, which all read its rows.
    """
    rows_per_rank = num_rows // dp
    start = layout.first_row - first_row
    stop = start + layout.num_rows
    dp_ranks = range(start // rows_per_rank, -(-stop // rows_per_rank))
    return tuple(dp_rank * per_row + i for dp_rank in dp_ranks for i in range(per_row))


def plan(layouts: Sequence[Layout], first_row: int, num_rows: int) -> list[SlotPiece]:
    """The pieces that make up the `num_rows` rows from `first_row`, in row order.

    Args:
        layouts: of the sources, in any order; a piece names its source by the index here. Those without a needed row
            are ignored.

    Raises:
        TransportError: a row is in no source, or in two.
    """
    pieces: list[SlotPiece] = []
    row, end = first_row, first_row + num_rows
    for source in sorted(range(len(layouts)), key=lambda i: layouts[i].first_row):
        layout = layouts[source]
        start, stop = max(first_row, layout.first_row), min(end, layout.first_row + layout.num_rows)
        if start >= stop:
            continue
        if start != row:
            raise _not_once(min(start, row), "none or two")
        offset, width = layout.first_row, layout.tokens_per_row
        pieces.append(SlotPiece(source, (start - offset) * width, (stop - offset) * width))
        row = stop
    if row != end:
        raise _not_once(row, "none")
    return pieces


def _not_once(row: int, sources: str) -> TransportError:
    return TransportError(f"row {row} of a batch", "must come from exactly one teacher micro-batch", sources)


def assemble(
    content: Callable[[Handle], Mapping[str, Tensor]], handles: Sequence[Handle], first_row: int, num_rows: int
) -> dict[str, Tensor]:
    """Returns the tensors of the `num_rows` global rows from `first_row`, by name, each `[num_rows · S, …]`.

    They are views if one slot holds all of the rows, otherwise copies. All slots must have the same tensors and S.

    Args:
        content: gives the tensors of a handle's slot, which must stay open while the result is used if that is a view.

    Raises:
        TransportError: a row is in no slot, or in two.
    """
    parts = []
    for piece in plan([handle.layout for handle in handles], first_row, num_rows):
        tensors = content(handles[piece.source])
        parts.append({name: tensor[piece.start : piece.stop] for name, tensor in tensors.items()})
    if len(parts) == 1:
        return parts[0]
    import torch

    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
