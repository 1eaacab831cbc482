"""Runs the real command line, and finds the processes, shared memory and files that it must not leave behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from tests.helpers.forks import VARIABLES, Refused, fork

DEADLINE_S = 240


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("distill-rl: error: ")]


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that runs can join, which saves each of them from starting the eight processes of its own Ray."""

    address: str
    variables: Mapping[str, str]
    """Environment variables with which a process may join."""

    @property
    def settings(self) -> tuple[str, ...]:
        return (f"ray.address={self.address}",)


def distill_rl(*arguments: str | Path, cwd: Path | None = None, cluster: Cluster | None = None) -> Ended:
    """Runs `distill-rl` to its end in a fork, on the given Ray cluster if there is one."""
    command = ["-m", "distill_rl", *map(str, arguments), *(cluster.settings if cluster else ())]
    variables = environment() | dict(cluster.variables if cluster else {})
    return run_python(command, variables, cwd, DEADLINE_S)


def run_python(arguments: Sequence[str], variables: Mapping[str, str], cwd: Path | None, timeout_s: float) -> Ended:
    """Runs `python` with these arguments to its end: in a fork, or as a process of its own if its variables ask for that."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, Path(os.devnull).open() as nothing:
        outputs = [nothing.fileno(), out.fileno(), err.fileno()]
        try:
            process = fork(arguments, variables, cwd or Path.cwd(), outputs)
        except Refused:
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, stdin=nothing, stdout=out, stderr=err, cwd=cwd, env=variables)
        try:
            code = process.wait(timeout_s)
        except BaseException:
            process.kill()
            raise
        return Ended(code, *(_text(file) for file in (out, err)))


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def distill_rl_in_process(*arguments: str | Path) -> Ended:
    """Runs a command that starts neither processes nor Ray by its entry point, without the cost of starting Python."""
    from distill_rl import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(list(map(str, arguments)))
        except SystemExit as ended:  # what argparse does for `--help`, `--list` and the like
            code = ended.code
    return Ended(code, out.getvalue(), err.getvalue())


_MAPPED = re.compile(r" (\d+) +/dev/shm/")
"""In /proc/PID/maps: the inode of a mapped file."""


def command_lines() -> list[str]:
    """The command lines of all processes on this machine."""
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return lines


@contextlib.contextmanager
def running(
    *arguments: str | Path, log: Path, cluster: Cluster | None = None, variables: Mapping[str, str] | None = None
) -> Iterator[psutil.Popen]:
    """Starts `distill-rl` in its own process group, on the given Ray cluster if there is one; kills the group at the end."""
    command = [sys.executable, "-m", "distill_rl", *map(str, arguments)]
    variables = environment() | dict(cluster.variables if cluster else {}) | dict(variables or {})
    with log.open("wb") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=variables)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def environment() -> dict[str, str]:
    return os.environ | VARIABLES


def until(condition: Callable[[], object], what: str, deadline_s: float = 300.0, every_s: float = 0.05) -> None:
    """Waits until the condition holds, which is looked at every few milliseconds; fails at the deadline with `what` was waited for."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {deadline_s:g} s")
        time.sleep(every_s)


def records(run: Path) -> list[dict]:
    """The records of metrics.jsonl, whole lines only, because the run may be writing."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def series(run: Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) of one metric, in file order."""
    return [(record["step"], record[metric]) for record in records(run) if metric in record]


def leftovers(root: int) -> dict[int, psutil.Process]:
    """All current descendants of process `root`, by id, so that `survivors` can look for them later."""
    return {process.pid: process for process in psutil.Process(root).children(recursive=True)}


def survivors(processes: Iterable[psutil.Process], deadline_s: float = 10.0) -> list[psutil.Process]:
    """The processes that still run at the deadline. Zombies do not count: init may take seconds to reap them."""
    deadline = time.monotonic() + deadline_s
    while (left := [process for process in processes if runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def runs(process: psutil.Process) -> bool:
    """Whether the process has not ended. A zombie has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def ended(pid: int) -> bool:
    """Whether no process of this id runs any more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not runs(psutil.Process(pid))
    return True


def names(processes: Iterable[psutil.Process]) -> list[str]:
    """The names of those processes that have not ended yet."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.name())
    return found


def told(processes: Iterable[psutil.Process]) -> list[str]:
    """The command lines of processes, for messages; their states if they end meanwhile."""
    lines = []
    for process in processes:
        try:
            lines.append(" ".join(process.cmdline()))
        except psutil.Error as error:
            lines.append(str(error))
    return lines


def actor_pid(root: int, name: str) -> int:
    """The process id of a Ray actor below `root`, found by the class name in its process title."""
    for process in leftovers(root).values():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[0].startswith(f"ray::{name}"):
                return process.pid
    raise AssertionError(f"no actor {name} below process {root}")


def shared_memory() -> set[str]:
    """The names in /dev/shm, but for those that only processes of other tests use."""
    files = {path.name: path.stat().st_ino for path in Path("/dev/shm").iterdir()}
    own = psutil.Process()
    ours = {own.pid, *(process.pid for process in own.children(recursive=True))}
    others = _mapped(set(psutil.pids()) - ours) - _mapped(ours) if files else set()
    return {name for name, inode in files.items() if inode not in others}


def shared_memory_of(pid: int) -> set[Path]:
    """The files in /dev/shm that a process and its descendants use."""
    process = psutil.Process(pid)
    inodes = _mapped({pid, *(child.pid for child in process.children(recursive=True))})
    return {path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in inodes}


def _mapped(pids: Iterable[int]) -> set[int]:
    """The inodes of the files in /dev/shm that these processes have mapped or opened.

    Names would not do: a semaphore is mapped under another name than it has later.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # ended meanwhile, or of another user
            process = Path("/proc", str(pid))
            inodes |= {int(inode) for inode in _MAPPED.findall((process / "maps").read_text())}
            opened = [link for link in (process / "fd").iterdir() if str(link.readlink()).startswith("/dev/shm/")]
            inodes |= {link.stat().st_ino for link in opened}
    return inodes


def temporary(pid: int) -> list[Path]:
    """The temporary directories in /tmp of a `distill-rl` process."""
    return list(Path("/tmp").glob(f"drl-{pid}-*"))
