"""Slots in memory that the processes of one node share: a copy in, then views.

The CPU twin of `cuda_ipc`: the same words, offers and rules, with the slots behind the words in one segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Offer, Receipt, Ring, Slot, TensorSpec, describe
from distill_rl.transport.ring import (
    SlotReader,
    SlotWriter,
    check_offer,
    check_reader,
    find_ring,
    place,
    round_up,
    state_bytes,
    unwritten,
)
from distill_rl.transport.segment import Address, Backing, Segment

_PAGE = 4096


@dataclass(frozen=True)
class _Own:
    segment: Segment
    ring: Ring
    writer: SlotWriter
    unopened: set[int]


@dataclass(frozen=True)
class _Open:
    nonce: bytes
    segment: Segment
    ring: Ring
    reader: SlotReader


class SharedMemoryTransport:
    """A ring that this process writes, or those of others that it reads; tensors of GPUs are copied to the CPU.

    Args:
        ring: what to write; None for a side that only reads.
        source: the ring's name.
        node_id: of this process; readers elsewhere are refused.
        backing: `file` only where readers cannot open a memfd.

    Raises:
        TransportError: there is too little shared memory.
    """

    name = "shared_memory"

    def __init__(self, ring: Ring | None = None, *, source: str = "", node_id: str = "", backing: Backing = "memfd"):
        self._source, self._node_id = source, node_id
        self._opened: dict[str, _Open] = {}
        self._own: _Own | None = None
        if ring is not None:
            segment = Segment.create(_data_start(ring) + ring.num_slots * _slot_stride(ring), backing)
            self._own = _Own(segment, ring, SlotWriter(segment.words, ring), set(ring.readers))

    def offer(self, reader: int) -> Offer:
        own = self._writing_side()
        check_reader(own.ring, reader, self._source)
        return Offer(self.name, self._source, self._node_id, "cpu", reader, (own.segment.address, own.ring))

    def open(self, offer: Offer) -> Receipt:
        check_offer(offer, self.name, self._node_id)
        address: Address
        ring: Ring
        address, ring = offer.payload
        segment = Segment.attach(address, f"ring of {offer.source or 'a writer'}")
        reader = SlotReader(segment.words, ring, offer.reader)
        self._opened[offer.source] = _Open(address.nonce, segment, ring, reader)
        return Receipt(offer.reader)

    def accept(self, receipt: Receipt) -> None:
        own = self._writing_side()
        own.unopened.discard(receipt.reader)
        if not own.unopened:
            own.segment.forget_name()

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        own, specs = self._writing_side(), describe(tensors)
        with own.writer.writing(slot, specs, layout):
            views = _views(own.segment.view, own.ring, slot.index, specs)
            for name, tensor in tensors.items():
                views[name].copy_(tensor.detach())
        payload = (self._source, own.segment.address.nonce)
        return Handle(self.name, self._node_id, "cpu", slot, layout, specs, payload)

    @contextmanager
    def fetch(self, handle: Handle) -> Iterator[dict[str, Tensor]]:
        opened = find_ring(self._opened, handle)
        with opened.reader.reading(handle):
            views = _views(opened.segment.view, opened.ring, handle.slot.index, handle.tensors)
            with unwritten(views, handle.slot):
                yield views

    def release(self, slot: Slot) -> None:
        if self._own is not None:
            self._own.writer.release(slot)

    def close(self) -> None:
        """The memory goes when the last view of it does."""
        self._opened.clear()
        if self._own is not None:
            self._own.segment.close()
            self._own = None

    def _writing_side(self) -> _Own:
        if self._own is None:
            raise TransportError(f"transport {self.name}", "this side has no ring to write, or has closed it")
        return self._own


def _data_start(ring: Ring) -> int:
    return round_up(state_bytes(ring), _PAGE)


def _slot_stride(ring: Ring) -> int:
    return round_up(ring.slot_bytes, _PAGE)


def _views(memory: memoryview, ring: Ring, index: int, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """The tensors of a slot where they lie, each with a count of its own of who wrote to it."""
    start = _data_start(ring) + index * _slot_stride(ring)
    offsets, _ = place(specs)
    with torch.inference_mode(False):
        return {spec.name: _view(memory, start + offset, spec) for spec, offset in zip(specs, offsets)}


def _view(memory: memoryview, offset: int, spec: TensorSpec) -> Tensor:
    dtype, count = getattr(torch, spec.dtype), prod(spec.shape)
    if not count:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(spec.shape)
