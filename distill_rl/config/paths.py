"""Makes the paths of a configuration absolute: processes on an existing cluster have other working directories."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TypeVar

from distill_rl.config.schema import Config, StudentConfig, TeacherConfig

_Text = TypeVar("_Text", str, str | None)


def absolute(config: Config) -> Config:
    """A copy in which every path that exists on this machine is absolute and `~` is expanded.

    That includes globs in an existing folder, and always `run.dir`. Anything else, such as a name on the hub or of a
    built-in suite, stays as it is.
    """
    config = deepcopy(config)
    config.run.dir = str(Path(config.run.dir).expanduser().absolute())
    models: list[StudentConfig | TeacherConfig] = [config.student, *config.teachers]
    for model in models:
        model.model, model.tokenizer = _absolute(model.model), _absolute(model.tokenizer)
    config.data.path = _absolute(config.data.path)
    config.data.validation.path = _absolute(config.data.validation.path)
    config.projection.path = _absolute(config.projection.path)
    config.evaluate.data = _absolute(config.evaluate.data)
    config.evaluate.suites = [_absolute(suite) for suite in config.evaluate.suites]
    config.checkpoint.resume = _absolute(config.checkpoint.resume)
    return config


def _absolute(text: _Text) -> _Text:
    """A path or glob pattern made absolute if it exists or is a pattern; other text, such as a hub id, unchanged."""
    if not text:
        return text
    path = Path(text).expanduser()
    return str(path.absolute()) if path.exists() or _is_pattern(path) else text  # type: ignore[return-value]


def _is_pattern(path: Path) -> bool:
    """Whether a path is a glob of files (`data/*.parquet`) in an existing folder."""
    fixed = Path(str(path).partition("*")[0])
    return "*" in str(path) and (fixed if fixed.is_dir() else fixed.parent).is_dir()
