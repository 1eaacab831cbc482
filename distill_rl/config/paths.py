"""The settings that are paths, and how they become absolute: processes elsewhere have other working directories."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from distill_rl.config.schema import MISSING, Config, StudentConfig, TeacherConfig


def absolute(config: Config) -> Config:
    """A copy in which every path that exists on this machine is absolute and `~` is expanded.

    That includes globs in an existing folder, and always `run.dir` and `teachers[].cache`. Anything else, such as a name on the hub or of a
    built-in suite, stays as it is.
    """
    config = deepcopy(config)
    replace_paths(config, lambda _, text: _absolute(text))
    config.run.dir = str(Path(config.run.dir).expanduser().absolute())
    for teacher in config.teachers:
        if teacher.cache is not None:
            teacher.cache = str(Path(teacher.cache).expanduser().absolute())
    return config


def described_by(model: StudentConfig | TeacherConfig) -> tuple[str, str | None]:
    """Where config and tokenizer of a model are, and the revision.

    Those of a teacher that only reads a store are in the store, and of one that a server runs there is the tokenizer
    alone. So a machine that trains need not have the teacher, whatever `model` says.
    """
    origin = model.origin
    if origin.is_served:
        return model.tokenizer or MISSING, None
    if origin.only_reads and origin.teacher_folder is not None:
        return origin.teacher_folder, None
    return model.model, model.revision


def replace_paths(config: Config, change: Callable[[str, Any], Any]) -> None:
    """Replaces every setting that is or may be a path by `change(dotted key, value)`, in place; values may be None."""
    models: dict[str, StudentConfig | TeacherConfig] = {"student": config.student}
    models |= {f"teachers.{i}": teacher for i, teacher in enumerate(config.teachers)}
    for key, model in models.items():
        if not model.origin.is_served:  # its model is a name
            model.model = change(f"{key}.model", model.model)
        model.tokenizer = change(f"{key}.tokenizer", model.tokenizer)
    for i, teacher in enumerate(config.teachers):
        teacher.endpoint.ca_file = change(f"teachers.{i}.endpoint.ca_file", teacher.endpoint.ca_file)
        teacher.store.path = change(f"teachers.{i}.store.path", teacher.store.path)
        teacher.cache = change(f"teachers.{i}.cache", teacher.cache)
    config.data.path = change("data.path", config.data.path)
    for i, source in enumerate(config.data.sources):
        source.path = change(f"data.sources.{i}.path", source.path)
    config.data.validation.path = change("data.validation.path", config.data.validation.path)
    config.projection.path = change("projection.path", config.projection.path)
    config.evaluate.data = change("evaluate.data", config.evaluate.data)
    config.checkpoint.resume = change("checkpoint.resume", config.checkpoint.resume)
    config.run.dir = change("run.dir", config.run.dir)
    config.evaluate.suites = [change("evaluate.suites", suite) for suite in config.evaluate.suites]


def _absolute(text: Any) -> Any:
    """A path, or glob of files (`data/*.parquet`) in a folder, made absolute if it exists; other text, such as a hub id, unchanged."""
    path = Path(text or "").expanduser()
    fixed, star, _ = str(path).partition("*")
    folder = Path(fixed) if Path(fixed).is_dir() else Path(fixed).parent
    return str(path.absolute()) if text and (path.exists() or (star and folder.is_dir())) else text
