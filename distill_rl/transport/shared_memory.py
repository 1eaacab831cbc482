"""Slots in memory that the processes of one node share: one copy to write, none to read.

The CPU counterpart of `cuda_ipc`. One segment holds the ring's words and, from the next page on, the slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distill_rl.transport.base import Offer, Receipt, Ring
from distill_rl.transport.ring import OpenedRing, RingTransport, WrittenRing, slot_stride, state_bytes, words_of
from distill_rl.transport.segment import Address, Backing, Segment


@dataclass(frozen=True, kw_only=True)
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
            written = _WrittenSegment(**_mapped(segment, ring), segment=segment, unopened=set(ring.readers))
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
        return OpenedRing(**_mapped(Segment.attach(address, offer.ring_name), ring), reader=offer.reader)


def _mapped(segment: Segment, ring: Ring) -> dict[str, Any]:
    """The parts of a ring in a segment: the slots are behind the words."""
    with torch.inference_mode(False):
        slots = torch.frombuffer(segment.view, dtype=torch.uint8, offset=state_bytes(ring))
    return words_of(segment, ring) | {"buffer": slots}
