"""The rules of a ring of slots, the same for every medium: generations, acknowledgements, the layout of a slot.

The state of a ring is an array of 8-byte words, one per cache line (R readers):

    line 0                    nonce of the ring
    line 1 + i·(1 + R)        generation of slot i, written by the writer alone
    the R lines after that    acknowledgement of each reader of slot i, written by that reader alone

Every word has exactly one writer, so no atomic addition is needed; a counter shared by the readers (`+= 1`) would lose
almost half of its counts. A slot goes through these states:

    generation even, g        whole; readable by handles of generation g
    generation odd, g + 1     being written, or left half-written by a writer that died
    generation even, g + 2    whole again; handles of generation g are refused

The writer moves from g to g + 1 only if every reader of generation g has acknowledged g. `WrittenRing` and `OpenedRing`
implement the two sides, and `RingTransport` the calls of a transport around them. A medium decides where the words and
the slots are stored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Offer, Receipt, Ring, Slot, TensorSpec, Transport, describe
from distill_rl.transport.segment import Segment

ALIGNMENT = 256
"""Offsets of tensors in a slot are multiples of this, which is more than any dtype or vector load needs."""
PAGE = 4096
LINE = 64
_WORDS_PER_LINE = LINE // 8

Words = MutableSequence[int] | memoryview


def round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def place(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """The offset of each tensor in a slot, in bytes and in the order of `specs`, and the size of all of them together.

    Offsets and size are multiples of `ALIGNMENT`.
    """
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end = round_up(end + spec.num_bytes, ALIGNMENT)
    return offsets, end


def slot_stride(ring: Ring) -> int:
    """Bytes from the beginning of one slot to that of the next in a ring's buffer: the slot's size in whole pages."""
    return round_up(ring.slot_bytes, PAGE)


def bytes_needed(sizes: Sequence[int]) -> int:
    """Bytes that a slot needs for tensors of these sizes in bytes, each rounded up to a multiple of `ALIGNMENT`."""
    return sum(round_up(size, ALIGNMENT) for size in sizes)


def state_bytes(ring: Ring) -> int:
    """Bytes of a ring's words, rounded up to whole pages.

    They are one line for the nonce and, per slot, one for the generation and one for each reader.
    """
    return round_up(LINE * (1 + ring.num_slots * (1 + len(ring.readers))), PAGE)


@contextmanager
def unwritten(tensors: dict[str, Tensor], slot: Slot) -> Iterator[dict[str, Tensor]]:
    """Checks that the block does not write to the fetched tensors, which must have been made outside inference mode.

    Yields `tensors` themselves. Nothing is checked if the block fails.

    Args:
        slot: for messages.

    Raises:
        TransportError: at the end of the block, if it wrote to a tensor or to a view of one.
    """
    before = {name: tensor._version for name, tensor in tensors.items()}
    yield tensors
    for name, version in before.items():
        if tensors[name]._version != version:
            rule = "fetched tensors must not be written to, because other readers see the same memory"
            raise TransportError(f"tensor {name} of slot {slot.index}", rule, remedy="clone it first")


@dataclass(frozen=True, kw_only=True)
class _MappedRing:
    ring: Ring
    nonce: bytes
    buffer: Tensor
    """All slots: uint8 [slots · `slot_stride`], made outside inference mode."""
    words: Words
    """The ring's state."""

    def _word(self, index: int, reader: int | None = None) -> int:
        """Index in the words of a slot's generation or, with `reader`, of that reader's acknowledgement."""
        line = 1 + index * (1 + len(self.ring.readers))
        if reader is not None:
            line += 1 + self.ring.readers.index(reader)
        return line * _WORDS_PER_LINE

    def generation(self, index: int) -> int:
        """The slot's present generation; 0 before the first write, odd while it is written."""
        return self.words[self._word(index)]

    def views(self, index: int, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """The tensors of a slot by name, without a copy; writing to one writes to the slot.

        Args:
            index: of the slot.
            specs: those with which the slot was or will be written, in the same order.
        """
        offsets, _ = place(specs)
        start = index * slot_stride(self.ring)
        # Tensors made in inference mode have no version counter for `unwritten`.
        with torch.inference_mode(False):
            return {spec.name: self._view(start + offset, spec) for spec, offset in zip(specs, offsets)}

    def _view(self, offset: int, spec: TensorSpec) -> Tensor:
        """A tensor of this spec at a byte offset of the buffer; a tensor without elements is a new one."""
        dtype = getattr(torch, spec.dtype)
        if not prod(spec.shape):
            return torch.empty(spec.shape, dtype=dtype, device=self.buffer.device)
        # `.data` gives each view a version counter of its own; plain views would share the buffer's.
        return self.buffer[offset : offset + spec.num_bytes].view(dtype).view(spec.shape).data


@dataclass(frozen=True, kw_only=True)
class WrittenRing(_MappedRing):
    """A ring that this process writes: decides whether a slot may be written, and marks the write."""

    _readers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By slot."""

    def readers_of(self, index: int) -> tuple[int, ...]:
        """The readers of the slot's current content. Empty if there is none, or its write failed."""
        return self._readers.get(index, ())

    @contextmanager
    def writing(self, slot: Slot, specs: Sequence[TensorSpec], layout: Layout) -> Iterator[None]:
        """Marks the slot as being written while the block runs, and gives it the generation of `slot` afterwards.

        The block does the writing. If it fails, the generation stays odd, so that nobody can read the slot.

        Args:
            specs: the tensors to be written, in their order.
            layout: names the readers that must acknowledge the content before the slot is written again.

        Raises:
            TransportError: as for `Transport.publish`, before the block runs and with nothing changed.
        """
        readers = self._check(slot, specs, layout)
        word = self._word(slot.index)
        self.words[word] = slot.generation - 1
        self._readers.pop(slot.index, None)
        yield
        self._readers[slot.index] = readers
        self.words[word] = slot.generation

    def _check(self, slot: Slot, specs: Sequence[TensorSpec], layout: Layout) -> tuple[int, ...]:
        """Checks whether the slot may be written, and returns the readers of the new content; changes nothing."""
        ring, what = self.ring, f"slot {slot.index}"
        if not 0 <= slot.index < ring.num_slots:
            raise TransportError(what, f"the ring has {ring.num_slots} slots")
        current = self.generation(slot.index)
        if slot.generation % 2 or slot.generation <= current:
            raise TransportError(what, f"the generation must be even and above {current}", slot.generation)
        if late := [i for i in self.readers_of(slot.index) if self.words[self._word(slot.index, i)] != current]:
            rule = f"every reader must be done with generation {current} before it is written again"
            raise TransportError(what, rule, f"still reading: {', '.join(map(str, late))}")
        _, size = place(specs)
        if size > ring.slot_bytes:
            raise TransportError(what, f"its {ring.slot_bytes} bytes must hold the tensors", f"{size} bytes")
        readers = ring.readers if layout.readers is None else layout.readers
        if unknown := set(readers) - set(ring.readers):
            raise TransportError(what, f"the ring is for readers {list(ring.readers)}", f"{sorted(unknown)}")
        return readers


@dataclass(frozen=True, kw_only=True)
class OpenedRing(_MappedRing):
    """A ring that this process reads, usually another process's: compares generations, and acknowledges."""

    reader: int

    @contextmanager
    def reading(self, handle: Handle) -> Iterator[None]:
        """Checks the slot's generation before and after the block, and then acknowledges the slot to the writer.

        A block that fails is not acknowledged.

        Raises:
            TransportError: the slot's generation is not the handle's, at the beginning or at the end of the block.
        """
        self._check(handle)
        yield
        self._check(handle)
        self.words[self._word(handle.slot.index, self.reader)] = handle.slot.generation

    def _check(self, handle: Handle) -> None:
        """Raises TransportError if the slot's present generation is not the handle's."""
        if (current := self.generation(handle.slot.index)) != handle.slot.generation:
            state = "being written, or left by a writer that died" if current % 2 else "written again"
            rule = f"the handle is for generation {handle.slot.generation}"
            raise TransportError(f"slot {handle.slot.index}", rule, f"generation {current} ({state})")


def words_of(segment: Segment, ring: Ring) -> dict[str, Any]:
    """The parts of a mapped ring whose words are at the beginning of a segment."""
    return {"ring": ring, "nonce": segment.address.nonce, "words": segment.words}


W = TypeVar("W", bound=WrittenRing)
R = TypeVar("R", bound=OpenedRing)


class RingTransport(Transport, Generic[W, R]):
    """A transport whose slots are memory that is written again and again: everything except the memory itself.

    Args:
        written: the ring that this process writes; None for a side that only reads.
        source: name of the ring.
        node_id: node of this process; offers from other nodes are refused.
        device: where the slots are, `"cpu"` or the UUID of a GPU.
    """

    def __init__(self, written: W | None, source: str, node_id: str, device: str = "cpu"):
        self._written, self._source, self._node_id, self._device_name = written, source, node_id, device
        self._opened: dict[str, R] = {}
        """By source."""

    @abstractmethod
    def _payload(self, written: W) -> Any:
        """What a reader needs to open the ring; small and, except within one process, picklable."""

    @abstractmethod
    def _attach(self, offer: Offer) -> R:
        """Opens the ring of an offer, which has passed `check_offer`, for the reader that the offer names."""

    def offer(self, reader: int) -> Offer:
        """Describes the ring that this side writes, for one of its readers. Call it once per reader.

        Raises:
            TransportError: the ring is not for that reader, or this side writes none.
        """
        written = self._writing_side()
        if reader not in written.ring.readers:
            what = f"ring of {self._source or 'a writer'}"
            raise TransportError(what, f"its readers are {list(written.ring.readers)}", reader)
        return Offer(self.name, self._source, self._node_id, self._device_name, reader, self._payload(written))

    def open(self, offer: Offer) -> Receipt:
        """Opens the ring of an offer for reading, in place of an earlier one of the same source.

        Raises:
            TransportError: the ring belongs to another transport or node, is gone, or cannot be reached from here.
        """
        check_offer(offer, self.name, self._node_id)
        self._opened[offer.source] = self._attach(offer)
        return Receipt(offer.reader)

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        """Copies the tensors into the slot, marks it with the slot's generation, and returns a handle on it.

        Never waits for a reader: one that is late is an error.

        Raises:
            TransportError: as for `Transport.publish`; this side writes no ring.
        """
        written, specs = self._writing_side(), describe(tensors)
        with written.writing(slot, specs, layout):
            self._copy(written, slot.index, written.views(slot.index, specs), tensors)
        return Handle(self.name, self._node_id, slot, layout, specs, (self._source, written.nonce))

    @contextmanager
    def fetch(self, handle: Handle) -> Iterator[dict[str, Tensor]]:
        """Gives a `with` block the tensors of a slot by name, as read-only views of its memory, valid inside it only.

        A block that ends without an error is acknowledged to the writer.

        Raises:
            TransportError: as for `Transport.fetch`; the ring was replaced by that of a newer writer.
        """
        opened, slot = self._ring_of(handle), handle.slot
        with opened.reading(handle), unwritten(opened.views(slot.index, handle.tensors), slot) as views:
            yield views

    def close(self) -> None:
        """Lets go of the ring that this side writes and of all that it has opened."""
        self._opened.clear()
        self._written = None

    def _copy(self, written: W, index: int, views: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors into a slot; from GPU to GPU without waiting for the copy."""
        for name, tensor in tensors.items():
            views[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda and written.buffer.is_cuda)

    def _writing_side(self) -> W:
        """The ring that this side writes. Raises TransportError if it only reads, or is closed."""
        if self._written is None:
            raise TransportError(f"transport {self.name}", "this side has no ring to write, or has closed it")
        return self._written

    def _ring_of(self, handle: Handle) -> R:
        """The opened ring that a handle refers to."""
        source, nonce = handle.payload
        what = f"slot {handle.slot.index} of {source or 'a ring'}"
        opened = self._opened.get(source)
        if opened is None:
            rule = "its ring must be opened before it is fetched"
            raise TransportError(what, rule, f"opened: {sorted(self._opened)}")
        if opened.nonce != nonce:
            raise TransportError(what, "its ring was replaced by that of a newer writer")
        return opened


def check_offer(offer: Offer, transport: str, node_id: str) -> None:
    """Raises TransportError if the ring of an offer belongs to another transport or another node.

    Args:
        transport, node_id: of the reader.
    """
    if offer.transport != transport:
        raise TransportError(offer.ring_name, f"its transport is {offer.transport}", f"a reader of {transport}")
    if offer.node_id != node_id:
        remedy = "use transport=object_store, which works between any two nodes"
        raise TransportError(offer.ring_name, f"it is on node {offer.node_id}", f"a reader on node {node_id}", remedy)
