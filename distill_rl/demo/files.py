"""The folder of a trial: two run directories, the configuration, the result and the report."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from distill_rl.config.save import escaped
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import ConfigError, problem
from distill_rl.observe.log import printable
from distill_rl.system.files import lock_file, write_atomic
from distill_rl.system.redact import redact
from distill_rl.types import RunPaths

WITH, WITHOUT = "with-teacher", "without-teacher"
"""Names of the two run directories."""
CONFIGURATION, RESULT, REPORT = "try.yaml", "result.json", "report.html"
_LOCK = ".lock"
_ATTEMPTS = 10
_NAME = re.compile(r"[^\w.-]+")


class TrialPaths:
    """The paths in the folder of a trial."""

    def __init__(self, root: Path):
        self.root = root
        self.configuration, self.result, self.report = root / CONFIGURATION, root / RESULT, root / REPORT
        self.taught, self.control = RunPaths(root / WITH), RunPaths(root / WITHOUT)


def default_out(student: str, teacher: str) -> Path:
    """The folder of a trial that is given none."""
    names = (_NAME.sub("-", Path(name).name) or "model" for name in (student, teacher))
    return Path("runs") / f"try-{'-'.join(names)}"


def out_problems(root: Path, *, clean: bool, resume: bool = False) -> Iterator[str]:
    """Yields at most one problem: the folder of a new trial is a file or holds something.

    Args:
        clean: whether an earlier trial in it will be deleted.
        resume: whether a trial in it that was stopped will be gone on with.
    """
    if os.path.lexists(root) and not root.is_dir():
        found = "a file" if root.exists() else "a link to nothing"
        yield problem(f"{root}", "the folder of a trial must be a folder", found, "choose another --out")
    elif root.is_dir() and _entries(root):
        is_trial = (root / CONFIGURATION).is_file()
        stopped = is_trial and not (root / RESULT).exists()
        if resume and stopped:
            return
        if clean and not is_trial:
            rule = f"holds files and no earlier trial (no {CONFIGURATION})"
            yield problem(f"{root}", rule, remedy="choose another --out")
        elif not clean:
            remedy = "choose another --out"
            if is_trial:
                remedy = f"{'go on with --resume, ' if stopped else ''}start over with --clean, or {remedy}"
            yield problem(f"{root}", "the folder is in use", remedy=remedy)


@contextmanager
def claimed(root: Path, *, clean: bool, resume: bool = False) -> Iterator[None]:
    """Keeps the folder of a trial from other trials until the block ends; it is made if needed.

    The lock is removed at the end, and so is what was made, if nothing came into it. A folder that has problems
    (`out_problems`) is left alone: it will be refused with all others.

    Raises:
        ConfigError: another trial uses the folder, or it cannot be made or written.
    """
    if any(out_problems(root, clean=clean, resume=resume)):
        yield
        return
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        lock = _locked(root)
    except BlockingIOError:
        remedy = "wait for it, or choose another --out"
        raise ConfigError(f"{root}", "the folder is in use", "another `distill-rl try`", remedy) from None
    except OSError as error:
        rule = "the folder of a trial must be one that can be made and written"
        raise ConfigError(f"{root}", rule, error.strerror, "choose another --out") from None
    try:
        yield
    finally:
        with lock, suppress(OSError):
            (root / _LOCK).unlink()
            for folder in new:
                folder.rmdir()


def _locked(root: Path) -> IO[str]:
    """The lock file of a folder, made if needed, open and locked.

    Raises:
        BlockingIOError: another process has it.
        OSError: it cannot be made.
    """
    for _ in range(_ATTEMPTS):
        root.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its last holder removed the folder
            lock = (root / _LOCK).open("a")
            try:
                if not lock_file(lock, root):
                    raise BlockingIOError
                if os.path.samestat(os.fstat(lock.fileno()), (root / _LOCK).stat()):
                    return lock
            except BaseException:
                lock.close()
                raise
            lock.close()  # its last holder removed it, and others would lock a new one
    raise BlockingIOError


def begin(paths: TrialPaths, *, clean: bool) -> None:
    """Empties the folder of a trial, which is `claimed`.

    Raises:
        ConfigError: something has come into it that may not be deleted.
    """
    if problems := [*out_problems(paths.root, clean=clean)]:
        raise ConfigError.many(problems)
    for entry in _entries(paths.root):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _entries(root: Path) -> list[Path]:
    """What is in the folder of a trial, but for the lock."""
    return [entry for entry in root.iterdir() if entry.name != _LOCK]


def write_configuration(path: Path, config: Config, comments: Sequence[str]) -> None:
    """Writes a configuration for people: settings that differ from their defaults, below lines of comment.

    Secrets are redacted.
    """
    tree = escaped(redact(differing(asdict(config), asdict(Config()))))
    lines = [f"# {printable(comment)}".rstrip() for comment in comments]
    write_atomic(path, "\n".join(lines) + "\n\n" + OmegaConf.to_yaml(OmegaConf.create(tree)))


def differing(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration's tree that differ from its defaults, in their order; of teachers, theirs."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        default = defaults.get(key)
        if value == default:
            continue
        if key == "teachers":
            found[key] = [differing(teacher, asdict(TeacherConfig())) for teacher in value]
        elif isinstance(value, dict) and isinstance(default, dict) and default:
            found[key] = differing(value, default)
        else:
            found[key] = value
    return found
