"""The rules of teachers whose targets are read or stored, as far as they can be checked without opening a file."""

from __future__ import annotations

from collections.abc import Iterator

from distill_rl.config.paths import teacher_folder
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import problem

STORED = ("topk", "sampled")
"""Values of `teachers[].export` that a store can hold."""


def store_problems(config: Config) -> Iterator[str]:
    """Yields problems of stores and caches, one line each."""
    for i, teacher in enumerate(config.teachers):
        yield from _of_teacher(f"teachers.{i}", teacher)
    folders = [teacher.targets_store for teacher in config.teachers if teacher.targets_store is not None]
    if len(set(folders)) < len(folders):
        rule = "every teacher needs a store of its own"
        yield problem("teachers", rule, ", ".join(folders), "name another folder for each of them")
    if (
        config.evaluate.teachers
        and config.evaluate.suites
        and not all(teacher.runs_model for teacher in config.teachers)
    ):
        rule = "evaluates the teachers, and the run does not load the model of one: it is read from a store, or served"
        yield problem("evaluate.teachers", rule, "true", "leave it out")


def _of_teacher(key: str, teacher: TeacherConfig) -> Iterator[str]:
    """Yields the problems of one teacher."""
    if teacher.backend == "store" and teacher.store is None:
        yield problem(f"{key}.store", "backend store needs the folder of a store", "null", f"add {key}.store=FOLDER")
    if teacher.backend != "store" and teacher.store is not None:
        remedy = f"add {key}.backend=store to read from it, or use {key}.cache to fill it"
        yield problem(f"{key}.store", "is read with backend store only", teacher.store, remedy)
    if teacher.backend == "store" and teacher.cache is not None:
        yield problem(f"{key}.cache", "is filled by a teacher that computes", teacher.cache, "leave it out")
    if teacher.targets_store is not None and teacher.export not in STORED:
        rule = f"a store holds {' or '.join(STORED)}, and this teacher exports {teacher.export}"
        name = "store" if teacher.backend == "store" else "cache"
        remedy = (
            f"set {key}.export=topk and a loss that works with it (docs/losses.md), or run the teacher without {name}"
        )
        yield problem(f"{key}.{name}", rule, teacher.targets_store, remedy)
    if teacher.only_reads and teacher.parallel.tp > 1:
        rule = "a store is read, and no model is divided"
        yield problem(f"{key}.parallel.tp", rule, teacher.parallel.tp, "leave it at 1; dp readers share the rows")
    if (
        teacher.backend == "store"
        and teacher.runs_model
        and teacher.store
        and teacher.model == teacher_folder(teacher.store)
    ):
        rule = "missing: live runs the teacher for what the store lacks"
        yield problem(
            f"{key}.model", rule, "missing value", f"add {key}.model=PATH, or set {key}.missing to skip or fail"
        )
