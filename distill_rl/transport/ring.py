"""The rules of a ring of slots, the same for every medium: generations, acknowledgements, where tensors lie in a slot.

A ring's state is a row of 8-byte words: a nonce, then per slot its generation and one acknowledgement per reader. Each
word has a cache line and one process that writes it, so nobody needs an atomic addition (a shared `+= 1` loses almost half of
its counts). `SlotWriter` and `SlotReader` are the two sides of it; where the words lie is for the medium to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Offer, Ring, Slot, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256
"""what a tensor's offset in a slot is a multiple of: more than any dtype or vector load asks for"""
LINE = 64
_WORDS_PER_LINE = LINE // 8

Words = MutableSequence[int] | memoryview


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def place(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """The offset of each tensor in a slot, and the room that all of them need."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end = round_up(end + spec.num_bytes, ALIGNMENT)
    return offsets, end


def bytes_needed(sizes: Sequence[int]) -> int:
    """Room in a slot for tensors of these sizes in bytes."""
    return sum(round_up(size, ALIGNMENT) for size in sizes)


def state_bytes(ring: Ring) -> int:
    """Room for a ring's words: a line for the nonce, per slot one for the generation and one for each reader."""
    return LINE * (1 + ring.num_slots * (1 + len(ring.readers)))


@contextmanager
def unwritten(tensors: dict[str, Tensor], slot: Slot) -> Iterator[dict[str, Tensor]]:
    """Fetched tensors for a block that must not write to them; they must have been made outside inference mode.

    Raises:
        TransportError: at the end of the block, if it wrote to one or to a view of one.
    """
    before = {name: tensor._version for name, tensor in tensors.items()}
    yield tensors
    for name, version in before.items():
        if tensors[name]._version != version:
            raise TransportError(
                f"tensor {name} of slot {slot.index}",
                "what was fetched must not be written to: other readers see the same memory",
                remedy="clone it first",
            )


class _State:
    """A ring's words, by name."""

    def __init__(self, words: Words, ring: Ring):
        self._words, self._ring = words, ring

    def _line(self, index: int, reader: int | None = None) -> int:
        line = 1 + index * (1 + len(self._ring.readers))
        if reader is not None:
            line += 1 + self._ring.readers.index(reader)
        return line * _WORDS_PER_LINE

    def generation(self, index: int) -> int:
        return self._words[self._line(index)]


class SlotWriter(_State):
    """The writer's side: which slots may be written, and when their content counts."""

    def __init__(self, words: Words, ring: Ring):
        super().__init__(words, ring)
        self._awaited: dict[int, tuple[int, ...]] = {}
        """per slot the readers of its last content, until it is released"""

    def readers_of(self, index: int) -> tuple[int, ...]:
        """Who reads, or has read, what the slot holds now."""
        return self._awaited.get(index, ())

    @contextmanager
    def writing(self, slot: Slot, specs: Sequence[TensorSpec], layout: Layout) -> Iterator[None]:
        """The block writes the slot; it stays odd, and so unreadable, if the block fails.

        Raises:
            TransportError: see `Transport.publish`.
        """
        readers = self._check(slot, specs, layout)
        word = self._line(slot.index)
        self._words[word] = slot.generation - 1
        self._awaited.pop(slot.index, None)
        yield
        self._awaited[slot.index] = readers
        self._words[word] = slot.generation

    def release(self, slot: Slot) -> bool:
        """Stops waiting for the readers of this content; whether it was there."""
        if slot.index in self._awaited and self.generation(slot.index) == slot.generation:
            del self._awaited[slot.index]
            return True
        return False

    def _check(self, slot: Slot, specs: Sequence[TensorSpec], layout: Layout) -> tuple[int, ...]:
        ring, what = self._ring, f"slot {slot.index}"
        if not 0 <= slot.index < ring.num_slots:
            raise TransportError(what, f"the ring has {ring.num_slots} slots")
        now = self.generation(slot.index)
        if slot.generation % 2 or slot.generation <= now:
            raise TransportError(what, f"the generation must be even and above {now}", slot.generation)
        late = [reader for reader in self.readers_of(slot.index) if self._words[self._line(slot.index, reader)] != now]
        if late:
            raise TransportError(
                what,
                f"every reader must be done with generation {now} before it is written again",
                f"still reading: {', '.join(map(str, late))}",
            )
        _, size = place(specs)
        if size > ring.slot_bytes:
            raise TransportError(what, f"its {ring.slot_bytes} bytes must hold what is published", f"{size} bytes")
        readers = ring.readers if layout.readers is None else layout.readers
        if strangers := set(readers) - set(ring.readers):
            raise TransportError(what, f"the ring is for readers {list(ring.readers)}", f"{sorted(strangers)}")
        return readers


class SlotReader(_State):
    """One reader's side."""

    def __init__(self, words: Words, ring: Ring, reader: int):
        super().__init__(words, ring)
        self._reader = reader

    @contextmanager
    def reading(self, handle: Handle) -> Iterator[None]:
        """The block reads the slot; acknowledged when it ends well.

        Raises:
            TransportError: the slot holds, or held by the end, something else than the handle says.
        """
        self._check(handle)
        yield
        self._check(handle)
        self._words[self._line(handle.slot.index, self._reader)] = handle.slot.generation

    def _check(self, handle: Handle) -> None:
        now = self.generation(handle.slot.index)
        if now != handle.slot.generation:
            state = "being written, or left by a writer that died" if now % 2 else "written again"
            raise TransportError(
                f"slot {handle.slot.index}",
                f"the handle is for generation {handle.slot.generation}",
                f"generation {now} ({state})",
            )


def check_offer(offer: Offer, transport: str, node_id: str) -> None:
    """Raises TransportError if a ring of another transport or another node is opened here."""
    what = f"ring of {offer.source or 'a writer'}"
    if offer.transport != transport:
        raise TransportError(what, f"its transport is {offer.transport}", f"a reader of {transport}")
    if offer.node_id != node_id:
        remedy = "use transport=object_store, which goes from any node to any node"
        raise TransportError(what, f"it is on node {offer.node_id}", f"a reader on node {node_id}", remedy)


def check_reader(ring: Ring, reader: int, source: str) -> None:
    """Raises TransportError if the ring is not for this reader."""
    if reader not in ring.readers:
        raise TransportError(f"ring of {source or 'a writer'}", f"its readers are {list(ring.readers)}", reader)


class OpenRing(Protocol):
    """What a process keeps of a ring that it has opened."""

    @property
    def nonce(self) -> bytes: ...


R = TypeVar("R", bound=OpenRing)


def find_ring(opened: Mapping[str, R], handle: Handle) -> R:
    """The opened ring, by source, that a handle's slot lies in; the handle's payload is (source, nonce).

    Raises:
        TransportError: it was never opened, or another has taken its place.
    """
    source, nonce = handle.payload
    what = f"slot {handle.slot.index} of {source or 'a ring'}"
    ring = opened.get(source)
    if ring is None:
        raise TransportError(what, "its ring must be opened before it is fetched", f"opened: {sorted(opened)}")
    if ring.nonce != nonce:
        raise TransportError(what, "its ring was replaced by that of a newer writer")
    return ring
