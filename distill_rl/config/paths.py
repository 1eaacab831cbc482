"""Makes the paths of a configuration absolute: processes on an existing cluster have other working directories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from distill_rl.config.schema import Config, StudentConfig, TeacherConfig

_Model = TypeVar("_Model", StudentConfig, TeacherConfig)
_Text = TypeVar("_Text", str, str | None)


def absolute(config: Config) -> Config:
    """A copy in which every path that exists on this machine is absolute. Names on the hub stay as they are."""
    data, projection, evaluate, checkpoint = config.data, config.projection, config.evaluate, config.checkpoint
    return replace(
        config,
        run=replace(config.run, dir=str(Path(config.run.dir).expanduser().absolute())),
        student=_model(config.student),
        teachers=[_model(teacher) for teacher in config.teachers],
        data=replace(
            data, path=_absolute(data.path), validation=replace(data.validation, path=_absolute(data.validation.path))
        ),
        projection=replace(projection, path=_absolute(projection.path)),
        evaluate=replace(
            evaluate, data=_absolute(evaluate.data), suites=[_absolute(suite) for suite in evaluate.suites]
        ),
        checkpoint=replace(checkpoint, resume=_absolute(checkpoint.resume)),
    )


def _model(model: _Model) -> _Model:
    return replace(model, model=_absolute(model.model), tokenizer=_absolute(model.tokenizer))


def _absolute(text: _Text) -> _Text:
    if not text:
        return text
    path = Path(text).expanduser()
    return str(path.absolute()) if path.exists() or _is_pattern(path) else text  # type: ignore[return-value]


def _is_pattern(path: Path) -> bool:
    """Whether a path is a glob of files (`data/*.parquet`) in an existing folder."""
    fixed = Path(str(path).partition("*")[0])
    return "*" in str(path) and (fixed if fixed.is_dir() else fixed.parent).is_dir()
