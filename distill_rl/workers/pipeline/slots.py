"""Which slots of a teacher's rings are free, as the driver keeps account of them: handed out and not yet returned means
in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from distill_rl.transport.base import Slot

FIRST_GENERATION = 2
"""Generation of every slot at the start; only the probe that is sent before the first step carries it."""


class SlotLedger:
    """The slots of one teacher. All its replicas use the same slots at the same time, each in its own ring.

    A slot is returned once every reader's call has returned. It is handed out again with the next generation, the slot
    that was returned first going first.
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
        """Takes `count` free slots, those that were returned first going first, with new generations.

        Raises:
            RuntimeError: fewer slots are free; check `free` first.
        """
        if count > self.free:
            raise RuntimeError(f"{count} slots of {self.num_slots} were asked for; {self.free} are free")
        taken = [self._free.popleft() for _ in range(count)]
        for i in taken:
            self._generations[i] += 2
        self._peak = max(self._peak, self.held)
        return tuple(Slot(i, self._generations[i]) for i in taken)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Frees slots whose readers are done."""
        self._free.extend(slot.index for slot in slots)

    def occupancy(self) -> float:
        """Returns the largest share (0 to 1) of the slots in use at once since the last call."""
        peak, self._peak = self._peak, self.held
        return peak / self.num_slots
