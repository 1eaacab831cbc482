"""Which slots of a teacher's rings are free, as the driver knows: what it gave out and has not got back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from distill_rl.transport.base import Slot

FIRST_GENERATION = 2
"""of every slot, borne by nothing but the probe that is sent before the first step"""


class SlotLedger:
    """The slots of one teacher. Its replicas use the same ones at the same time, each in a ring of its own.

    A slot comes back when every reader's call has returned; it is given out again with the next generation, the one that
    waited longest first.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._generations = [FIRST_GENERATION] * num_slots
        self._peak = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.num_slots - self.free

    def take(self, count: int) -> tuple[Slot, ...]:
        """
        Raises:
            RuntimeError: fewer are free; ask `free` first.
        """
        if count > self.free:
            raise RuntimeError(f"{count} slots of {self.num_slots} were asked for; {self.free} are free")
        taken = [self._free.popleft() for _ in range(count)]
        for index in taken:
            self._generations[index] += 2
        self._peak = max(self._peak, self.held)
        return tuple(Slot(index, self._generations[index]) for index in taken)

    def give_back(self, slots: Sequence[Slot]) -> None:
        self._free.extend(slot.index for slot in slots)

    def occupancy(self) -> float:
        """The largest share of the slots in use at once since this was last asked."""
        peak, self._peak = self._peak, self.held
        return peak / self.num_slots
