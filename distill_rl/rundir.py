"""The run directory: taken for one run at a time, never overwritten by accident."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from distill_rl.config.load import save_config
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError
from distill_rl.types import RunPaths

_LOCK = ".lock"


def paths_of(config: Config) -> RunPaths:
    return RunPaths(Path(config.run.dir).expanduser() / config.run.name)


def problems(config: Config, *, clean: bool) -> list[str]:
    """What stands in the way of using the run directory; one line each."""
    root = paths_of(config).root
    found = []
    if root.exists() and not root.is_dir():
        found.append(
            ConfigError(
                f"{root}", "the run directory must be a directory", "a file", "choose another run.name or run.dir"
            )
        )
    elif root.exists() and _entries(root):
        if clean and not any((root / name).exists() for name in (_LOCK, "metrics.jsonl")):
            found.append(
                ConfigError(
                    f"{root}",
                    "holds files and is no run directory (it has neither .lock nor metrics.jsonl)",
                    remedy="choose another run.name or run.dir",
                )
            )
        elif not clean and config.checkpoint.resume is None:
            found.append(
                ConfigError(
                    f"{root}",
                    "the run directory is in use",
                    remedy="go on with --resume, start over with --clean, or choose another run.name",
                )
            )
    if clean and config.checkpoint.resume is not None:
        found.append(
            ConfigError(
                "checkpoint.resume",
                "--clean leaves nothing to resume from",
                config.checkpoint.resume,
                "drop one of the two",
            )
        )
    if not found and not _writable(root):
        found.append(
            ConfigError(
                f"{root}", "the run directory must be writable", remedy="choose another run.dir or mend its permissions"
            )
        )
    return [str(problem) for problem in found]


@contextmanager
def occupy(config: Config, *, clean: bool) -> Iterator[RunPaths]:
    """Makes the run directory and holds it against other processes until the block ends.

    Raises:
        ConfigError: another process runs in it.
    """
    paths = paths_of(config)
    paths.root.mkdir(parents=True, exist_ok=True)
    with (paths.root / _LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"{paths.root}",
                "the run directory is in use",
                f"by process {lock.read().strip()}",
                "wait for it, or choose another run.name",
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        for entry in _entries(paths.root) if clean else ():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        paths.logs.mkdir(exist_ok=True)
        if not paths.config.exists():
            record_config(config, paths)
        yield paths


def record_config(config: Config, paths: RunPaths) -> None:
    """Writes config.yaml; how the run was resumed is no part of it."""
    save_config(replace(config, checkpoint=replace(config.checkpoint, resume=None)), paths.config)


def _entries(root: Path) -> list[Path]:
    return [entry for entry in root.iterdir() if entry.name != _LOCK]


def _writable(root: Path) -> bool:
    folder = root
    while not folder.exists():
        folder = folder.parent
    probe = folder / f".distill_rl-probe-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return folder.is_dir()
