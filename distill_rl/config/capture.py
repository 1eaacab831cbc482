"""From a training configuration to that of a capture: the same documents and rows, teachers that store, no student."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distill_rl.config.schema import Config, EvaluateConfig, StudentConfig, TeacherConfig
from distill_rl.config.schema.fields import MISSING
from distill_rl.errors import problem

CAPTURES = "captures"
"""The folder in a store with the logs of every capture."""


def to_capture(config: Config, problems: list[str], out: Path) -> Config:
    """The configuration of a capture into the folder `out`.

    1. Every teacher stores what it computes: one teacher in `out`, several in `out`/NAME.
    2. Rows are made as the training run makes them. Without a student, the teacher's own tokenizer decides.
    3. All documents are read once, but no more than the training run would read. If its epochs differ in their
       documents, all of them are gone through. With train.minutes, which says nothing of a teacher, it is one pass.
    4. What only training needs is switched off. The run directory is `out`/captures/NAME.

    Args:
        problems: lines about the training configuration; those about a missing student are removed, and what a capture
            cannot do is added.
    """
    student = _student(config, problems)
    if not config.teachers or config.loss.kd_weight == 0:
        problems.append(problem("teachers", "a capture needs a teacher, and loss.kd_weight above 0", "none"))
    epochs = config.train.epochs
    if config.repeats_documents:
        epochs = min(epochs or 1.0, 1.0)
    elif config.train.steps is None:
        epochs = epochs or 1.0
    return replace(
        config,
        run=replace(config.run, dir=str(out / CAPTURES)),
        student=student,
        teachers=[_storing(config, i, out, problems) for i in range(len(config.teachers))],
        train=replace(config.train, epochs=epochs, minutes=None),
        faults=replace(config.faults, lost_teacher="fail"),
        checkpoint=replace(config.checkpoint, resume="auto", keep_best=0, every=0),
        evaluate=EvaluateConfig(),
    )


def _student(config: Config, problems: list[str]) -> StudentConfig:
    """The student that decides how rows are made: the configured one, or the only teacher in its place."""
    if config.student.model != MISSING or not config.teachers:
        return config.student
    problems[:] = [line for line in problems if not line.startswith("student.model:")]
    teacher = config.teachers[0]
    if teacher.origin.is_served:
        rule = "a server's model is not here, and rows are made for a student"
        problems.append(problem("student.model", rule, "missing value", "name the student"))
        return config.student
    if len(config.teachers) > 1:
        rule = "several teachers are captured together for the rows of a student"
        remedy = "name the student, or capture one teacher at a time"
        problems.append(problem("student.model", rule, "missing value", remedy))
    same = {name: getattr(teacher, name) for name in ("model", "tokenizer", "revision", "dtype")}
    return replace(config.student, **same)


def _storing(config: Config, i: int, out: Path, problems: list[str]) -> TeacherConfig:
    """A teacher that stores its targets in `out` or, if there are several, below it."""
    teacher, compact = config.teachers[i], config.capture.format == "compact"
    if teacher.origin.is_store:
        rule = "a capture runs the teacher; this one is read from a store"
        problems.append(problem(f"teachers.{i}.backend", rule, "store", "use backend: hf and the model"))
        return teacher
    if compact and teacher.export != "topk":
        rule = f"compact is a format of the top k, and teacher {teacher.name} exports {teacher.export}"
        problems.append(problem("capture.format", rule, "compact", "use capture.format=exact"))
    folder = out if len(config.teachers) == 1 else out / teacher.name
    storing = replace(teacher, cache=str(folder), score="static")
    return replace(storing, wire_dtype="fp32") if compact else storing


def stores_of(config: Config) -> list[Path]:
    """The folders that a capture fills."""
    return [Path(teacher.cache) for teacher in config.running_teachers if teacher.cache is not None]
