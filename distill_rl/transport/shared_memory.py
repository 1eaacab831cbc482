"""Slots in memory that the processes of one node share: one copy to write, none to read.

The CPU counterpart of `cuda_ipc`. One segment holds the ring's words and, from the next page on, the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distill_rl.transport.base import Offer, Receipt, Ring
from distill_rl.transport.ring import (
    OpenedRing,
    RingTransport,
    SlotReader,
    SlotWriter,
    WrittenRing,
    slot_stride,
    state_bytes,
)
from distill_rl.transport.segment import Address, Backing, Segment


@dataclass(frozen=True)
class _WrittenSegment(WrittenRing):
    segment: Segment
    unopened: set[int]
    """Readers that have not opened the ring yet."""


class SharedMemoryTransport(RingTransport[_WrittenSegment, OpenedRing]):
    """Writes one ring, or reads those of other processes. Tensors on a GPU are copied to the CPU.

    Args:
        ring: the ring to write; None for a side that only reads.
        source: name of the ring.
        node_id: node of this process; offers from other nodes are refused.
        backing: `file` only where readers cannot open a memfd.

    Raises:
        TransportError: there is too little shared memory.
    """

    name = "shared_memory"

    def __init__(self, ring: Ring | None = None, *, source: str = "", node_id: str = "", backing: Backing = "memfd"):
        written = None
        if ring is not None:
            segment = Segment.create(state_bytes(ring) + ring.num_slots * slot_stride(ring), backing)
            writer = SlotWriter(segment.words, ring)
            unopened = set(ring.readers)
            written = _WrittenSegment(ring, segment.address.nonce, _slots(segment, ring), writer, segment, unopened)
        super().__init__(written, source, node_id)

    def accept(self, receipt: Receipt) -> None:
        """Notes that a reader has the ring open.

        After the last one, the file of a ring that is one is removed, so that nobody else can open it.

        Raises:
            TransportError: this side writes no ring.
        """
        written = self._writing_side()
        written.unopened.discard(receipt.reader)
        if not written.unopened:
            written.segment.forget_name()

    def close(self) -> None:
        """Lets go of all rings that this side writes or has opened; their memory is freed with the last view of it."""
        if self._written is not None:
            self._written.segment.close()
        super().close()

    def _payload(self, written: _WrittenSegment) -> tuple[Address, Ring]:
        return written.segment.address, written.ring

    def _attach(self, offer: Offer) -> OpenedRing:
        address, ring = offer.payload
        segment = Segment.attach(address, offer.ring_name)
        reader = SlotReader(segment.words, ring, offer.reader)
        return OpenedRing(ring, address.nonce, _slots(segment, ring), reader)


def _slots(segment: Segment, ring: Ring) -> Tensor:
    """uint8: the slots of a ring, the part of the segment behind the words."""
    with torch.inference_mode(False):
        return torch.frombuffer(segment.view, dtype=torch.uint8, offset=state_bytes(ring))
