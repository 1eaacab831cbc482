"""What gives a teacher's targets: the model itself, a store, or both."""

from __future__ import annotations

from pathlib import Path

from distill_rl.config.facts import is_chosen_by_row, runs_model, targets_store
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.parallel.mesh import World
from distill_rl.store.store import Store
from distill_rl.store.writer import StoreWriter
from distill_rl.teacher.backends.base import TeacherBackend
from distill_rl.teacher.backends.routed import RoutedTeacher
from distill_rl.teacher.backends.store import StoredTeacher
from distill_rl.teacher.engine import TeacherEngine


def build_teacher(config: Config, teacher: TeacherConfig, world: World, *, vocabulary_size: int) -> TeacherBackend:
    """What gives the targets on one rank of a teacher; arguments as of `TeacherEngine`.

    Raises:
        ConfigError: as for `TeacherEngine`.
        StoreError: the store cannot be opened.
    """
    backend = _backend(config, teacher, world, vocabulary_size)
    return RoutedTeacher(backend) if is_chosen_by_row(teacher) else backend


def _backend(config: Config, teacher: TeacherConfig, world: World, vocabulary_size: int) -> TeacherBackend:
    """What gives the targets of the rows that the teacher is asked for."""
    live = TeacherEngine(config, teacher, world, vocabulary_size=vocabulary_size) if runs_model(teacher) else None
    folder = targets_store(teacher)
    if folder is None:
        assert live is not None
        return live
    store = Store(Path(folder))
    writer = None
    if teacher.backend != "store" and world.tp_rank == 0:
        writer = StoreWriter(store, write_every_s=config.capture.write_every_s)
    return StoredTeacher(config, teacher, world, store, live, writer)
