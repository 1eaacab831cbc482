"""In-process transport: a teacher and a student engine in one interpreter, for notebooks and tests.

It follows the whole protocol (odd generation while writing, one acknowledgement per reader), so code that works here
obeys the same rules as on shared memory.
"""

from __future__ import annotations

import secrets
from array import array
from typing import NoReturn

import torch

from distill_rl.errors import TransportError
from distill_rl.transport.base import Offer, Ring
from distill_rl.transport.ring import OpenedRing, RingTransport, WrittenRing, slot_stride, state_bytes


class LocalTransport(RingTransport[WrittenRing, OpenedRing]):
    """Copies tensors once, when they are published. One object may write a ring and read others, its own too.

    Args:
        ring: the ring to write; None for a side that only reads.
        source: name of the ring.
        node_id: node of this process; offers from other nodes are refused.
        device: where the slots are, as torch names it.
    """

    name = "local"

    def __init__(self, ring: Ring | None = None, *, source: str = "", node_id: str = "", device: str = "cpu"):
        written = None
        if ring is not None:
            words = array("Q", bytes(state_bytes(ring)))
            with torch.inference_mode(False):
                buffer = torch.empty(ring.num_slots * slot_stride(ring), dtype=torch.uint8, device=device)
            written = WrittenRing(ring=ring, nonce=secrets.token_bytes(16), buffer=buffer, words=words)
        super().__init__(written, source, node_id)

    def __reduce__(self) -> NoReturn:
        """Raises TransportError: the transport works inside one process and cannot be pickled."""
        raise TransportError("transport local", "works inside one process", remedy="use transport=auto between two")

    def _payload(self, written: WrittenRing) -> WrittenRing:
        return written

    def _attach(self, offer: Offer) -> OpenedRing:
        ring: WrittenRing = offer.payload
        return OpenedRing(ring=ring.ring, nonce=ring.nonce, buffer=ring.buffer, words=ring.words, reader=offer.reader)
