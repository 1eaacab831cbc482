"""What gives a teacher's targets: the model itself, in this process or in vLLM, a server, a store, or a store and one of
the others."""

from __future__ import annotations

from pathlib import Path

from distill_rl.config.facts import is_chosen_by_row, only_reads, targets_store
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.parallel.mesh import World
from distill_rl.store.store import Store
from distill_rl.store.writer import StoreWriter
from distill_rl.teacher.backends.base import TeacherBackend
from distill_rl.teacher.backends.endpoint.token import token_of
from distill_rl.teacher.backends.routed import RoutedTeacher
from distill_rl.teacher.backends.scored import ScoredTeacher
from distill_rl.teacher.backends.scores import PromptScorer
from distill_rl.teacher.backends.store import StoredTeacher
from distill_rl.teacher.engine import TeacherEngine


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
        token: of the teacher's server; None: that of the environment, if `teachers[].token_env` is set.

    Raises:
        ConfigError: as for `TeacherEngine` or `VllmScorer`, or a server's address cannot be used.
        GpuMemoryError: as for `VllmScorer`.
        StoreError: the store cannot be opened.
    """

    def scored(scorer: PromptScorer) -> TeacherBackend:
        return ScoredTeacher(config, teacher, world, vocabulary_size=vocabulary_size, scorer=scorer)

    live: TeacherBackend | None = None
    if teacher.backend == "vllm":
        from distill_rl.teacher.backends.vllm import VllmScorer

        live = scored(VllmScorer(config, teacher, gpu_share=gpu_share, threads=threads))
    elif teacher.backend == "endpoint":
        from distill_rl.teacher.backends.endpoint.scorer import EndpointScorer

        live = scored(EndpointScorer(teacher, token_of(teacher) if token is None else token))
    elif not only_reads(teacher):
        live = TeacherEngine(config, teacher, world, vocabulary_size=vocabulary_size)
    backend = _with_store(config, teacher, world, live)
    return RoutedTeacher(backend) if is_chosen_by_row(teacher) else backend


def _with_store(config: Config, teacher: TeacherConfig, world: World, live: TeacherBackend | None) -> TeacherBackend:
    """What computes targets, with the store that they are read from or written to."""
    folder = targets_store(teacher)
    if folder is None:
        assert live is not None
        return live
    store = Store(Path(folder))
    writer = None
    if teacher.backend != "store" and world.reports:
        writer = StoreWriter(store, write_every_s=config.capture.write_every_s)
    return StoredTeacher(config, teacher, world, store, live, writer)
