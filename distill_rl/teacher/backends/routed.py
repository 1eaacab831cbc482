"""A teacher that is asked for some of the rows only (`teachers[].where`, `teachers[].weight_column`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from distill_rl.teacher.backends.base import TeacherBackend
from distill_rl.transport.base import Layout
from distill_rl.types import RankBatch


class RoutedTeacher:
    """Lets a backend compute the rows that it is asked for, and gives all others a target that nothing reads.

    So every micro-batch is published as a whole, whoever is asked for its rows. The backend gets the whole batch in one
    call, and leaves out the other rows itself (`models.inputs.micro_batches`), so that one that sends all of its
    requests at once still does.

    Args:
        backend: of any kind.
    """

    def __init__(self, backend: TeacherBackend):
        self.backend = backend
        self.micro_batch_size = backend.micro_batch_size
        self.score = 0.0
        """As of `TeacherBackend`; 0, because a teacher that is chosen by row has the score `static`."""

    @property
    def bytes_per_token(self) -> int:
        """As of `TeacherBackend`."""
        return self.backend.bytes_per_token

    def forward(self, batch: RankBatch) -> Iterator[tuple[Layout, dict[str, Tensor]]]:
        """As of `TeacherBackend`. Each layout has all rows of its micro-batch."""
        found = self.backend.forward(batch)
        if batch.asked is None:
            yield from found
            return
        for start in range(0, batch.rows.shape[0], self.micro_batch_size):
            part = slice(start, start + self.micro_batch_size)
            rows, asked = batch.rows[part].cut(), batch.asked[part]
            layout = Layout(batch.first_row + start, *rows.shape)
            if not asked.any():
                yield layout, self.unused_targets(rows.input_ids.size)
                continue
            _, tensors = next(found)
            yield layout, tensors if asked.all() else self._with_others(tensors, asked, rows.shape[1])
        next(found, None)  # the backend's work after its last micro-batch

    def unused_targets(self, positions: int) -> dict[str, Tensor]:
        """As of `TeacherBackend`."""
        return self.backend.unused_targets(positions)

    def close(self) -> None:
        self.backend.close()

    def _with_others(self, tensors: dict[str, Tensor], asked: np.ndarray, width: int) -> dict[str, Tensor]:
        """The targets of all rows of a micro-batch.

        Args:
            tensors: of the rows that are asked for, one after the other; empty on a rank that has none.
            asked: bool [R]
            width: positions per row.
        """
        if not tensors:
            return {}
        unused = self.unused_targets(asked.size * width)
        whole: dict[str, Tensor] = {}
        for name, part in tensors.items():
            tensor = unused[name].to(part.device, part.dtype)
            kept = torch.from_numpy(asked).to(part.device)
            by_row = tensor.view(asked.size, width, *tensor.shape[1:])
            by_row[kept] = part.view(-1, width, *part.shape[1:])
            whole[name] = tensor
        return whole


def unrouted(backend: TeacherBackend) -> TeacherBackend:
    """The backend behind a `RoutedTeacher`, or the backend itself."""
    return backend.backend if isinstance(backend, RoutedTeacher) else backend
