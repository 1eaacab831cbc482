"""In-process transport: a teacher and a student engine in one interpreter, for notebooks and tests.

It keeps the full slot protocol (odd generation while writing, one acknowledgement per reader), so code
that passes here holds to the same rules as on shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Slot, describe


@dataclass
class _Cell:
    generation: int = 0
    unread: int = 0
    """readers that have not yet acknowledged the current content"""
    tensors: dict[str, Tensor] = field(default_factory=dict)


class LocalTransport:
    """A ring of `num_slots` slots in this process, each read by `num_readers` readers before it is free again."""

    name = "local"

    def __init__(self, num_slots: int, num_readers: int = 1):
        self._cells = [_Cell() for _ in range(num_slots)]
        self._num_readers = num_readers

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        cell = self._cell(slot)
        if cell.unread:
            raise TransportError(
                f"slot {slot.index}",
                "every reader must be done before it is written again",
                f"{cell.unread} still reading",
            )
        if slot.generation % 2 or slot.generation <= cell.generation:
            raise TransportError(
                f"slot {slot.index}", f"the generation must be even and above {cell.generation}", slot.generation
            )
        cell.generation = slot.generation - 1
        cell.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        cell.generation = slot.generation
        cell.unread = self._num_readers
        device = next(iter(tensors.values())).device
        return Handle(self.name, "", str(device), slot, layout, describe(tensors))

    @contextmanager
    def fetch(self, handle: Handle) -> Iterator[dict[str, Tensor]]:
        cell = self._cell(handle.slot)
        self._check(cell, handle)
        yield {name: tensor.view_as(tensor) for name, tensor in cell.tensors.items()}
        self._check(cell, handle)
        cell.unread = max(cell.unread - 1, 0)

    def release(self, slot: Slot) -> None:
        cell = self._cell(slot)
        if cell.generation == slot.generation:
            cell.unread, cell.tensors = 0, {}

    def close(self) -> None:
        self._cells = []

    def _cell(self, slot: Slot) -> _Cell:
        if not 0 <= slot.index < len(self._cells):
            raise TransportError(f"slot {slot.index}", f"the ring has {len(self._cells)} slots")
        return self._cells[slot.index]

    @staticmethod
    def _check(cell: _Cell, handle: Handle) -> None:
        if cell.generation != handle.slot.generation or not cell.tensors:
            raise TransportError(
                f"slot {handle.slot.index}",
                f"the handle is for generation {handle.slot.generation}",
                f"generation {cell.generation}",
            )
