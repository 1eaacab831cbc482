"""GPUs, and what connects them."""

from __future__ import annotations

from dataclasses import dataclass

from distill_rl.scaling.parts import CARDS, Card

MEMORY = {"h100": 80e9, "h200": 141e9}
"""Bytes of a card's memory, by the names of `CARDS`."""


@dataclass(frozen=True, slots=True)
class Network:
    """Rates at which a GPU sends to others, in bytes per second, as collectives reach them."""

    inside: float = 360e9
    """To GPUs of its node: NVLink's 450 GB/s in one direction, of which NCCL reaches about four fifths."""
    between: float = 42e9
    """To other nodes: a port of 400 Gbit/s for every GPU, of which NCCL reaches about five sixths."""


@dataclass(frozen=True, slots=True)
class Cluster:
    gpus: int
    card: str = "h100"
    """A name of `CARDS`."""
    per_node: int = 8
    network: Network = Network()

    @property
    def rates(self) -> Card:
        return CARDS[self.card]

    @property
    def memory(self) -> float:
        """Bytes of a GPU."""
        return MEMORY[self.card]

    def all_reduce(self, num_bytes: float, ranks: int) -> float:
        """Seconds in which neighbouring ranks add up what each has, `num_bytes`."""
        return 2 * self._ring(num_bytes, ranks)

    def gather(self, num_bytes: float, ranks: int) -> float:
        """Seconds in which neighbouring ranks exchange their parts of `num_bytes`, or add up and keep a part each."""
        return self._ring(num_bytes, ranks)

    def _ring(self, num_bytes: float, ranks: int) -> float:
        rate = self.network.inside if ranks <= self.per_node else self.network.between
        return (ranks - 1) / ranks * num_bytes / rate
