"""The interface of what gives a teacher's targets, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from distill_rl.transport.base import Layout
from distill_rl.types import RankBatch


class TeacherBackend(Protocol):
    """Turns rows into targets: `TeacherEngine` runs a model, and the classes of this folder ask somebody else."""

    micro_batch_size: int
    """Rows that `forward` covers at a time."""
    score: float
    """Of the last complete `forward`: sum over labelled positions of −log p(label), or of the entropy
    (`teachers[].score`); 0 if that is `static`."""

    @property
    def bytes_per_token(self) -> int:
        """The most bytes per position of the tensors that `forward` yields."""
        ...

    def forward(self, batch: RankBatch) -> Iterator[tuple[Layout, dict[str, Tensor]]]:
        """Yields the targets of this rank's part of a global batch, micro-batch by micro-batch, in order.

        The same rows always give the same targets. Positions without a label have some valid target. Micro-batches are
        those of `models.inputs.micro_batches`: rows that the teacher is not asked for are not among them, and the
        layout counts those that are (`RoutedTeacher` adds the others).

        Yields:
            The rows covered, and their targets in the wire form of `losses.targets`, on any device.

        Raises:
            DistillError: the targets cannot be had.
        """
        ...

    def unused_targets(self, positions: int) -> dict[str, Tensor]:
        """A valid target for each of some positions, which nothing reads, in the form in which `forward` yields targets."""
        ...

    def close(self) -> None:
        """Ends what the backend has started; does nothing the second time."""
        ...
