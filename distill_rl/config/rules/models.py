"""The rules of student and teachers by feature, as far as they can be checked without opening a file or asking a server.

Backends of teachers, whose own rules stand beside their settings; teachers chosen by row; quantised weights, adapters, long rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from distill_rl.config.facts import TOKENS, UNKNOWN, Facts
from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import Config
from distill_rl.config.schema.backends import SECTIONS, STORED
from distill_rl.errors import problem


def backend_problems(config: Config) -> Iterator[str]:
    """Yields problems of the teachers' backends and of their settings elsewhere, one line each."""
    for i, teacher in enumerate(config.teachers):
        key = f"teachers.{i}"
        yield from teacher.origin.problems(key, teacher, config)
        for section in (getattr(teacher, name) for name in SECTIONS):
            if section is not teacher.origin:
                yield from section.misplaced(key)
        if teacher.targets_store is not None and teacher.export not in STORED:
            rule = f"a store holds {' or '.join(STORED)}, and this teacher exports {teacher.export}"
            name = "store" if teacher.origin.is_store else "cache"
            remedy = f"set {key}.export=topk and a loss that works with it (docs/losses.md), or run the teacher without {name}"
            yield problem(f"{key}.{name}", rule, teacher.targets_store, remedy)
    first = {teacher.backend: teacher for teacher in reversed(config.running_teachers)}
    for teacher in first.values():
        yield from teacher.origin.of_run(teacher, config)
    folders = [teacher.targets_store for teacher in config.teachers if teacher.targets_store is not None]
    if len(set(folders)) < len(folders):
        rule = "every teacher needs a store of its own"
        yield problem("teachers", rule, ", ".join(folders), "name another folder for each of them")
    evaluate = config.evaluate
    if evaluate.teachers and evaluate.suites and not all(teacher.origin.runs_model for teacher in config.teachers):
        rule = "evaluates the teachers, and the run does not load the model of one: it is read from a store, or served"
        yield problem("evaluate.teachers", rule, "true", "leave it out")


# Teachers that are chosen by row.


def routing_problems(config: Config) -> Iterator[str]:
    """Yields problems of `teachers[].where` and `teachers[].weight_column`, and of settings that do not go with them."""
    chosen = [i for i, teacher in enumerate(config.teachers) if teacher.is_chosen_by_row]
    for i in chosen:
        for column, values in config.teachers[i].where.items():
            key = f"teachers.{i}.where"
            if not column.strip():
                yield problem(key, "must name columns of the data", repr(column))
            if values == []:
                yield problem(f"{key}.{column}", "must have at least one value", "[]", "leave the teacher out instead")
        if config.teachers[i].score != "static":
            rule = "compares the teachers on the same tokens, and where or weight_column gives each tokens of its own"
            yield problem(f"teachers.{i}.score", rule, config.teachers[i].score, "use score=static, or no such column")
    if not chosen:
        return
    key = f"teachers.{chosen[0]}.{'where' if config.teachers[chosen[0]].where else 'weight_column'}"
    if config.data.concatenate:
        rule = f"joins texts into one, and {key} may ask different teachers for them"
        yield problem("data.concatenate", rule, "true", "leave it out; data.packing puts several texts into a row")
    if config.projection.learnable:
        rule = f"needs chunks on every rank in every step, and with {key} a rank may have no row of the teacher"
        yield problem("projection.learnable", rule, "true", "leave one of them out")


# Quantised weights.


def quantization_problems(config: Config) -> Iterator[str]:
    """Yields problems of `teachers[].quantization`, and of settings that do not go with it, one line each."""
    for i, teacher in enumerate(config.teachers):
        key, value = f"teachers.{i}", teacher.quantization
        if value is None:
            continue
        if value == AS_STORED and teacher.parallel.tp > 1:
            rule = "must be 1 with quantization as_stored: weights that are stored quantised are not split over ranks"
            yield problem(f"{key}.parallel.tp", rule, teacher.parallel.tp, "set it to 1, or use the original weights")
        if value == AS_STORED and teacher.export == "hidden":
            rule = "hidden needs the output layer of unquantised weights, which the student reads from the teacher's folder"
            yield problem(f"{key}.export", rule, None, f"set {key}.export=topk, or use the original weights")
        if config.evaluate.teachers and config.evaluate.suites:
            rule = f"evaluates teachers with all of their weights; {key}.quantization is {value}"
            yield problem("evaluate.teachers", rule, "true", "leave one of them out")


# Adapters (`student.lora`).


def lora_problems(config: Config) -> Iterator[str]:
    """Yields problems of the adapters' settings, one line each.

    An input that is dropped as a whole, lists of layers that are empty or hold an empty name, a name in both, and
    quantised weights without adapters.
    """
    lora, key = config.student.lora, "student.lora"
    if lora is None:
        if (quantization := config.student.quantization) is not None:
            rule = "is for the weights that adapters leave as they are, and all weights of this student are trained"
            yield problem("student.quantization", rule, quantization, "add student.lora={}, or leave it out")
        return
    if lora.dropout == 1:
        yield problem(f"{key}.dropout", "must be less than 1: the adapters would never see their input", lora.dropout)
    if lora.targets is not None and not lora.targets:
        yield problem(f"{key}.targets", "must name a layer", "[]", "leave it out: all linear layers get an adapter")
    for name in ("targets", "modules_to_save"):
        for i, target in enumerate(getattr(lora, name) or ()):
            if not target.strip(". "):
                yield problem(f"{key}.{name}.{i}", "must be the end of a name, such as q_proj", repr(target))
    for both in sorted({*(lora.targets or ())} & {*lora.modules_to_save}):
        rule = f"must not be in {key}.targets too: a module that is trained whole needs no adapter"
        yield problem(f"{key}.modules_to_save", rule, both, "leave one of the two out")


# Rows whose positions are divided over ranks (`parallel.sp`), and activations in host memory.


def long_row_problems(config: Config) -> Iterator[str]:
    """Yields what is wrong without opening a file, one line each.

    A teacher with sp that this package does not compute itself, compiled layers with sp, and activation offload without
    checkpointing. Whether sp divides the heads is checked where the models are opened.
    """
    student = config.student
    for i, teacher in enumerate(config.teachers):
        if teacher.parallel.sp > 1 and (teacher.origin.engine or not teacher.origin.runs_model):
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
