"""What gives a teacher's targets: the model itself, in this process or in vLLM, a server, a store, or a store and one of
the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.parallel.mesh import World
from distill_rl.store.store import Store, StoreWriter
from distill_rl.teacher.base import PromptScorer, TeacherBackend, token_of
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.teacher.scored import ScoredTeacher
from distill_rl.teacher.stored import StoredTeacher
from distill_rl.transport.base import Layout
from distill_rl.types import RankBatch

# A teacher that is asked for some of the rows only (`teachers[].where`, `teachers[].weight_column`).


class RoutedTeacher:
    """Lets a backend compute the rows that it is asked for, and gives all others a target that nothing reads.

    So every micro-batch is published as a whole, whoever is asked for its rows. The backend gets the whole batch in one
    call, and leaves out the other rows itself (`models.forward.micro_batches`), so that one that sends all of its
    requests at once still does.

    Args:
        backend: of any kind.
    """

    def __init__(self, backend: TeacherBackend):
        self.backend = backend
        self.micro_batch_size, self.bytes_per_token = backend.micro_batch_size, backend.bytes_per_token
        self.score = 0.0
        """As of `TeacherBackend`; 0, because a teacher that is chosen by row has the score `static`."""

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
        """The targets of all rows of a micro-batch."""
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


def build_teacher(
    config: Config,
    teacher: TeacherConfig,
    world: World,
    *,
    vocabulary_size: int,
    gpu_share: float = 1.0,
    threads: int = 0,
    token: str | None = None,
) -> TeacherBackend:
    """What gives the targets on one rank of a teacher; arguments as of `TeacherEngine`.

    Args:
        gpu_share, threads: as of `VllmScorer`.
        token: of the teacher's server; None: that of the environment, if `teachers[].endpoint.token_env` is set.

    Raises:
        ConfigError: as for `TeacherEngine` or `VllmScorer`, or a server's address cannot be used.
        GpuMemoryError: as for `VllmScorer`.
        StoreError: the store cannot be opened.
    """
    scorer: PromptScorer | None = None
    if teacher.backend == "vllm":
        from distill_rl.teacher.vllm import VllmScorer

        scorer = VllmScorer(config, teacher, gpu_share=gpu_share, threads=threads)
    elif teacher.origin.is_served:
        from distill_rl.teacher.endpoint import EndpointScorer

        scorer = EndpointScorer(teacher, token_of(teacher) if token is None else token)
    backend: TeacherBackend | None = None
    if scorer is not None:
        backend = ScoredTeacher(config, teacher, world, vocabulary_size=vocabulary_size, scorer=scorer)
    elif not teacher.origin.only_reads:
        backend = TeacherEngine(config, teacher, world, vocabulary_size=vocabulary_size)
    if teacher.targets_store is not None:
        store, writes = Store(Path(teacher.targets_store)), not teacher.origin.is_store and world.reports
        writer = StoreWriter(store, write_every_s=config.capture.write_every_s) if writes else None
        backend = StoredTeacher(config, teacher, world, store, backend, writer)
    assert backend is not None
    return RoutedTeacher(backend) if teacher.is_chosen_by_row else backend
