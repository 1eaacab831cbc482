"""The run directory: used by one process at a time, never overwritten by accident."""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from distill_rl.config.save import save_config
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, problem, problems_of
from distill_rl.system.files import DRAFT, close_folder, lock_file, point_at, remove_leftovers
from distill_rl.types import QUEUE, RunPaths

_LOCK, _JOB_LOCK = ".lock", ".job.lock"
"""Held by the process that uses the directory, and by the batch script of its job."""
SUBMISSION = ("submit.yaml", "submit.sbatch", "evaluate.sbatch")
"""Files that `train --dry-run` writes to a run directory. With only these in it, the directory is not in use."""
AFRESH = "start over with --clean"
WAYS_ON = f"go on with --resume, {AFRESH}"
"""How to use a run directory with an earlier run, in the words of the command line."""
_OF_A_START = ("config.yaml", "logs", "bad_rows.jsonl", QUEUE)
"""What a run writes before its first step, and a later one replaces or continues."""
_OF_STEPS = ("metrics.jsonl", "checkpoints", "evals")
"""What a run makes before its first step and fills afterwards."""
_SIGN_EVERY_S = 5.0
ATTEMPT = "DISTILL_RL_ATTEMPT"
"""Set by a batch script, which writes its own logs to the same folder; see `RunPaths.attempt`."""


def paths_of(config: Config) -> RunPaths:
    """The paths of the run directory, `<run.dir>/<run.name>`, as of attempt 1; looks at no file."""
    return RunPaths(Path(config.run.dir).expanduser() / config.run.name)


def problems(config: Config, *, clean: bool | None) -> list[str]:
    """Returns why the run directory cannot be used, one line per reason; empty if it can.

    Changes nothing, apart from a probe file that is removed again. Does not look whether another process uses it.

    Args:
        clean: whether an earlier run in it will be deleted. A run that resumes may find one, too. None: it may hold one,
            because none is started now.
    """
    root, resumes = paths_of(config).root, config.checkpoint.resume is not None
    lines = list(_folder_problems(root, clean=not resumes if clean is None else clean, resume=resumes))
    if clean and resumes:
        rule = "--clean leaves nothing to resume from"
        lines.append(problem("checkpoint.resume", rule, config.checkpoint.resume, "drop one of the two"))
    return lines or _probe_problems(root)


def _folder_problems(root: Path, *, clean: bool, resume: bool) -> Iterator[str]:
    """Yields at most one problem with what is in the place of the run directory: a file, a bad link, or contents."""
    # Contents are allowed that are not `in_use`; any with `resume` but not `clean`; an earlier run with `clean`.
    if root.exists() and not root.is_dir():
        remedy = "choose another run.name or run.dir"
        yield problem(f"{root}", "the run directory must be a directory", "a file", remedy)
    elif link := _link_to_outside(root):
        rule, remedy = "a run writes nowhere but in its directory", "remove the link; run.dir can name any folder"
        yield problem(f"{link}", rule, f"a link to {link.resolve()}", remedy)
    elif in_use(root):
        is_run = any((root / name).exists() for name in (_LOCK, "metrics.jsonl"))
        if clean and not is_run:
            rule = "holds files and is no run directory (it has neither .lock nor metrics.jsonl)"
            yield problem(f"{root}", rule, remedy="choose another run.name or run.dir")
        elif not clean and not resume:
            yield str(_occupied(root))


def in_use(root: Path) -> bool:
    """Whether a run directory holds anything that a new run could spoil; it need not exist.

    It does not if a start left it that never finished a step, because it was refused, stopped or killed: there is then
    no record in metrics.jsonl, no checkpoint, no evaluation, and no file that a run does not write before its first
    step. What a killed process left of replacing a file or folder does not count.
    """
    if not root.is_dir():
        return False
    started = (root / _LOCK).exists()
    return not all(
        entry.name in SUBMISSION
        or (started and entry.name in _OF_A_START)
        or (started and entry.name in _OF_STEPS and _is_empty(entry))
        for entry in _entries(root)
    )


def _is_empty(entry: Path) -> bool:
    return not _entries(entry) if entry.is_dir() else entry.lstat().st_size == 0


def _occupied(root: Path) -> ConfigError:
    ways = WAYS_ON if any((root / "checkpoints").glob("step-*")) else f"no checkpoint is saved: {AFRESH}"
    return ConfigError(f"{root}", "the run directory is in use", remedy=f"{ways}, or choose another run.name")


@contextmanager
def occupy(config: Config, *, clean: bool) -> Iterator[RunPaths]:
    """Creates the run directory, closes it to other users' writes, and locks it until the block ends.

    With `clean`, its contents are deleted first; otherwise what killed processes left of replacing files and folders.
    Creates the folder of logs of this attempt, to which `logs/latest` is set, and writes config.yaml unless there is
    one. Yields the paths with the number of the attempt.

    After a start that never finished a step (`in_use`), its logs are kept, and its list of bad rows is moved to them.

    Raises:
        ConfigError: another process uses it, or has done so since it was checked; or a batch script gives a bad number
            of the attempt.
        OSError: it cannot be created or written.
    """
    paths = paths_of(config)
    paths.root.mkdir(parents=True, exist_ok=True)
    for folder in (paths.root, paths.checkpoints):
        close_folder(folder)
    with (paths.root / _LOCK).open("a+") as lock, ExitStack() as stack:
        if not lock_file(lock, paths.root) or _works_elsewhere(lock):
            lock.seek(0)
            value, remedy = f"by process {lock.read().strip()}", "wait for it, or choose another run.name"
            raise ConfigError(f"{paths.root}", "the run directory is in use", value, remedy)
        if not clean and config.checkpoint.resume is None and in_use(paths.root):
            raise _occupied(paths.root)
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {socket.gethostname()}")
        lock.flush()
        stack.enter_context(_signs_of_life(lock))
        for folder in (paths.root, paths.root / "logs", paths.evals):
            remove_leftovers(folder)
        for entry in paths.root.iterdir() if clean else ():
            if entry.name not in (_LOCK, _JOB_LOCK):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        paths = RunPaths(paths.root, _attempt(paths.root / "logs"))
        paths.logs.mkdir(parents=True, exist_ok=True)
        paths.queue.unlink(missing_ok=True)  # of a start that was killed in the queue
        if paths.bad_rows.exists() and not in_use(paths.root):
            paths.bad_rows.replace(paths.logs / f"earlier_{paths.bad_rows.name}")
        point_at(paths.logs.with_name("latest"), paths.logs.name)
        if not paths.config.exists():
            record_config(config, paths)
        yield paths


def _works_elsewhere(lock: TextIO) -> bool:
    """Whether a process of another node works in the directory, whose lock this node does not see (Lustre: -o localflock)."""
    # A process that was killed has left its name in the file as well, but gives no signs of life.
    lock.seek(0)
    if lock.read().partition(" on ")[2] in ("", socket.gethostname()):
        return False
    seen, deadline = os.fstat(lock.fileno()).st_mtime_ns, time.monotonic() + 3 * _SIGN_EVERY_S
    while time.monotonic() < deadline:
        time.sleep(_SIGN_EVERY_S / 10)
        Path(lock.name).stat()  # fetched anew from a file system that caches
        if os.fstat(lock.fileno()).st_mtime_ns != seen:
            return True
    return False


@contextmanager
def _signs_of_life(lock: TextIO) -> Iterator[None]:
    """Touches the lock file again and again while the block runs; then empties it."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_SIGN_EVERY_S):
            with suppress(OSError):
                os.utime(lock.fileno())

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        lock.truncate(0)


def record_config(config: Config, paths: RunPaths) -> None:
    """Writes config.yaml in the run directory, with `checkpoint.resume` null; an earlier one is replaced."""
    save_config(replace(config, checkpoint=replace(config.checkpoint, resume=None)), paths.config)


def _attempt(logs: Path) -> int:
    # That given by the batch script, or one more than the highest `attempt_N` in `logs`.
    text = os.environ.get(ATTEMPT)
    if text is not None:
        if not (text.isdecimal() and text.isascii() and int(text) >= 1):
            raise ConfigError(ATTEMPT, "must be a whole number from 1", text, "unset it: the next number is taken")
        return int(text)
    matches = [re.fullmatch(r"attempt_([0-9]+)", entry.name) for entry in logs.glob("attempt_*")]
    return max((int(match[1]) for match in matches if match), default=0) + 1


def _link_to_outside(root: Path) -> Path | None:
    """The first link found that leads out of the run directory; None if there is none."""
    # The directory itself, or an entry of it, of its `logs` or of its `checkpoints`; others are not looked at.
    if root.is_symlink():
        return root
    within = root.resolve()
    folders = [folder for folder in (root, root / "logs", root / "checkpoints") if folder.is_dir()]
    links = (entry for folder in folders for entry in folder.iterdir() if entry.is_symlink())
    return next((link for link in links if not link.resolve().is_relative_to(within)), None)


def _entries(root: Path) -> list[Path]:
    entries = (entry for entry in root.iterdir() if entry.name not in (_LOCK, _JOB_LOCK))
    return [entry for entry in entries if not DRAFT.fullmatch(entry.name)]


def _probe_problems(root: Path) -> list[str]:
    """Why no file can be made and locked in the run directory, or in the nearest existing folder above it; makes and removes one."""
    folder = root
    while not folder.exists():
        folder = folder.parent
    probe = folder / f".distill_rl-probe-{os.getpid()}"
    try:
        with probe.open("a") as file:
            return problems_of(lambda: lock_file(file, root))
    except OSError:
        remedy = "choose another run.dir or fix its permissions"
        return [problem(f"{root}", "the run directory must be writable", remedy=remedy)]
    finally:
        with suppress(OSError):
            probe.unlink()
