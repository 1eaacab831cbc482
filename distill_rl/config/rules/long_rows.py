"""The rules of rows whose positions are divided over ranks (`parallel.sp`), and of activations in host memory."""

from __future__ import annotations

from collections.abc import Iterator

from distill_rl.config.facts import TOKENS, UNKNOWN, Facts
from distill_rl.config.schema import Config
from distill_rl.errors import problem


def long_row_problems(config: Config) -> Iterator[str]:
    """Yields what is wrong without opening a file, one line each.

    A teacher with sp that this package does not compute itself, compiled layers with sp, and activation offload without
    checkpointing. Whether sp divides the heads is checked where the models are opened.
    """
    student = config.student
    for i, teacher in enumerate(config.teachers):
        if teacher.parallel.sp > 1 and (teacher.in_vllm or not teacher.runs_model):
            rule = "divides the positions of a teacher with backend hf only"
            yield problem(f"teachers.{i}.parallel.sp", rule, teacher.parallel.sp, "leave it at 1")
    if student.parallel.sp > 1 and student.compile:
        rule = f"layers that exchange positions for heads (student.parallel.sp={student.parallel.sp}) are not compiled"
        yield problem("student.compile", rule, "true", "leave it out, or set student.parallel.sp=1")
    if student.activation_offload and not student.activation_checkpointing:
        rule = "moves what activation checkpointing keeps"
        remedy = "add student.activation_checkpointing=true"
        yield problem("student.activation_offload", rule, "true", remedy)


def chunk_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yields teachers that are compared by chunks of text although the student's rows are divided, one line each.

    A chunk may lie on both sides of a border between ranks, and then no rank has its tokens.
    """
    sp = config.student.parallel.sp
    if sp == 1:
        return
    for teacher, method in zip(config.running_teachers, facts.comparisons(config)):
        if method not in (TOKENS, UNKNOWN):
            rule = f"must be 1: teacher {teacher.name} is compared by chunks of text ({method}), which may cross the border between two ranks"
            yield problem(
                "student.parallel.sp", rule, sp, "set student.parallel.tp or activation_checkpointing instead"
            )
