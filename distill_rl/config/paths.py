"""Paths of a configuration, made absolute: the processes of a cluster that was joined work in other folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from distill_rl.config.schema import Config, StudentConfig, TeacherConfig

_Model = TypeVar("_Model", StudentConfig, TeacherConfig)
_Text = TypeVar("_Text", str, str | None)


def absolute(config: Config) -> Config:
    """A copy in which whatever is a path on this machine is an absolute one; names on a hub stay as they are."""
    data, projection, evaluate, checkpoint = config.data, config.projection, config.evaluate, config.checkpoint
    return replace(
        config,
        run=replace(config.run, dir=str(Path(config.run.dir).expanduser().absolute())),
        student=_model(config.student),
        teachers=[_model(teacher) for teacher in config.teachers],
        data=replace(
            data, path=_found(data.path), validation=replace(data.validation, path=_found(data.validation.path))
        ),
        projection=replace(projection, path=_found(projection.path)),
        evaluate=replace(evaluate, data=_found(evaluate.data), suites=[_found(suite) for suite in evaluate.suites]),
        checkpoint=replace(checkpoint, resume=_found(checkpoint.resume)),
    )


def _model(model: _Model) -> _Model:
    return replace(model, model=_found(model.model), tokenizer=_found(model.tokenizer))


def _found(text: _Text) -> _Text:
    if not text:
        return text
    path = Path(text).expanduser()
    return str(path.absolute()) if path.exists() or _is_pattern(path) else text  # type: ignore[return-value]


def _is_pattern(path: Path) -> bool:
    """Whether it is a glob of files (`data/*.parquet`): the folder before the first star is there."""
    fixed = Path(str(path).partition("*")[0])
    return "*" in str(path) and (fixed if fixed.is_dir() else fixed.parent).is_dir()
