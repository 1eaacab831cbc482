"""In-process transport: a teacher and a student engine in one interpreter, for notebooks and tests.

It keeps the whole protocol (odd generation while writing, one acknowledgement per reader), so code that passes here
holds to the same rules as on shared memory.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Offer, Receipt, Ring, Slot, describe
from distill_rl.transport.ring import (
    SlotReader,
    SlotWriter,
    check_offer,
    check_reader,
    find_ring,
    state_bytes,
    unwritten,
)


@dataclass(frozen=True)
class _Open:
    nonce: bytes
    writer: LocalTransport
    reader: SlotReader


class LocalTransport:
    """Copies tensors once, when they are published. One object may write a ring and read others, its own too.

    Args:
        ring: what to write; None for a side that only reads.
        source: the ring's name.
    """

    name = "local"

    def __init__(self, ring: Ring | None = None, *, source: str = "", node_id: str = ""):
        self._ring, self._source, self._node_id = ring or Ring(0, 0, ()), source, node_id
        self._nonce = secrets.token_bytes(16)
        self._words = array("Q", bytes(state_bytes(self._ring)))
        self._writer = SlotWriter(self._words, self._ring)
        self._contents: dict[int, dict[str, Tensor]] = {}
        self._opened: dict[str, _Open] = {}

    def __reduce__(self) -> NoReturn:
        raise TransportError("transport local", "works inside one process", remedy="use transport=auto between two")

    def offer(self, reader: int) -> Offer:
        check_reader(self._ring, reader, self._source)
        return Offer(self.name, self._source, self._node_id, "cpu", reader, self)

    def open(self, offer: Offer) -> Receipt:
        check_offer(offer, self.name, self._node_id)
        writer: LocalTransport = offer.payload
        reader = SlotReader(writer._words, writer._ring, offer.reader)
        self._opened[offer.source] = _Open(writer._nonce, writer, reader)
        return Receipt(offer.reader)

    def accept(self, receipt: Receipt) -> None:
        pass

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        specs = describe(tensors)
        with self._writer.writing(slot, specs, layout), torch.inference_mode(False):
            self._contents[slot.index] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        payload = (self._source, self._nonce)
        return Handle(self.name, self._node_id, "cpu", slot, layout, specs, payload)

    @contextmanager
    def fetch(self, handle: Handle) -> Iterator[dict[str, Tensor]]:
        ring = find_ring(self._opened, handle)
        with ring.reader.reading(handle):
            kept = ring.writer._contents.get(handle.slot.index)
            if kept is None:
                raise TransportError(f"slot {handle.slot.index}", "was released, or its ring closed")
            with unwritten({name: tensor.view_as(tensor) for name, tensor in kept.items()}, handle.slot) as views:
                yield views

    def release(self, slot: Slot) -> None:
        if self._writer.release(slot):
            del self._contents[slot.index]

    def close(self) -> None:
        self._contents.clear()
        self._opened.clear()
