"""What gives a teacher's targets: the model itself, in this process or in vLLM, a store, or both."""

from __future__ import annotations

from pathlib import Path

from distill_rl.config.facts import is_chosen_by_row, runs_model, targets_store
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.parallel.mesh import World
from distill_rl.store.store import Store
from distill_rl.store.writer import StoreWriter
from distill_rl.teacher.backends.base import TeacherBackend
from distill_rl.teacher.backends.routed import RoutedTeacher
from distill_rl.teacher.backends.scored import ScoredTeacher
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
) -> TeacherBackend:
    """What gives the targets on one rank of a teacher; arguments as of `TeacherEngine`.

    Args:
        gpu_share, threads: as of `VllmScorer`.

    Raises:
        ConfigError: as for `TeacherEngine` or `VllmScorer`.
        GpuMemoryError: as for `VllmScorer`.
        StoreError: the store cannot be opened.
    """
    live = _live(config, teacher, world, vocabulary_size, gpu_share, threads)
    backend = _with_store(config, teacher, world, live)
    return RoutedTeacher(backend) if is_chosen_by_row(teacher) else backend


def _live(
    config: Config, teacher: TeacherConfig, world: World, vocabulary_size: int, gpu_share: float, threads: int
) -> TeacherBackend | None:
    """What computes targets; None for a teacher that is only read from a store."""
    if teacher.backend == "vllm":
        from distill_rl.teacher.backends.vllm import VllmScorer

        scorer = VllmScorer(config, teacher, gpu_share=gpu_share, threads=threads)
        return ScoredTeacher(config, teacher, world, vocabulary_size=vocabulary_size, scorer=scorer)
    if runs_model(teacher):
        return TeacherEngine(config, teacher, world, vocabulary_size=vocabulary_size)
    return None


def _with_store(config: Config, teacher: TeacherConfig, world: World, live: TeacherBackend | None) -> TeacherBackend:
    """Adds the store that targets are read from or written to."""
    folder = targets_store(teacher)
    if folder is None:
        assert live is not None
        return live
    store = Store(Path(folder))
    writer = None
    if teacher.backend != "store" and world.tp_rank == 0:
        writer = StoreWriter(store, write_every_s=config.capture.write_every_s)
    return StoredTeacher(config, teacher, world, store, live, writer)
