"""Processes that are killed at a chosen rename, exchange, flush or removal of files (`kill_at_call.c`)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.command import environment

NO_EXCHANGE = "renameat2"
"""Refused as on a file system that cannot exchange two folders."""
NO_LOCKS = "renameat2 flock"
"""Refused as on one that has no locks either."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    calls: list[str]
    """The counted calls in order: `fsync PATH`, `rename PATH PATH`, …; what was refused begins with `refused `."""


class Killer:
    """Runs Python with the library that kills.

    Args:
        folder: for the library, its log, and the folders of `every_kill`.
        refuse: names of functions that always fail.
        paths: a text that the paths of the counted calls contain; the default is in all of `every_kill`.
        only: names of the functions whose calls are counted; empty: of all.
    """

    def __init__(self, folder: Path, refuse: str | None = None, paths: str = "/at-", only: str = ""):
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("there is no cc")
        self._folder = folder
        self._library, self._log = folder / "kill_at_call.so", folder / "kill_at_call.log"
        if not self._library.exists():
            source = Path(__file__).with_suffix(".c")
            subprocess.run([compiler, "-shared", "-fPIC", "-o", self._library, source, "-ldl"], check=True)
        self._variables = {"KILL_AT_PATHS": paths} | ({} if refuse is None else {"KILL_AT_REFUSE": refuse})
        self._variables |= {"KILL_AT_ONLY": only} if only else {}

    def run(self, arguments: Sequence[str | Path], kill_at: int | None = None) -> Ended:
        """Runs `python ARGUMENTS` to its end, or until its call number `kill_at`, and then proves from the log that it was that."""
        self._log.unlink(missing_ok=True)
        variables = self._variables | {"LD_PRELOAD": str(self._library), "KILL_AT_LOG": str(self._log)}
        variables |= {"PYTHONPATH": str(ROOT)} | ({} if kill_at is None else {"KILL_AT_CALL": str(kill_at)})
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment() | variables, timeout=240)
        calls = self._log.read_text().splitlines() if self._log.exists() else []
        if kill_at is not None:
            counted = [call for call in calls if not call.startswith("refused ")]
            assert done.returncode == -signal.SIGKILL, done.stderr
            assert len(counted) == kill_at
            assert counted[-1].startswith("killed ")
        return Ended(done.returncode, done.stdout, done.stderr, calls)

    def every_kill(self, prepare: Callable[[Path], Sequence[str | Path]]) -> Iterator[tuple[Path, Ended]]:
        """Runs a program once to its end, and then killed at each of its calls in turn; yields after every kill.

        Args:
            prepare: makes what the program starts from in a new folder, and returns the arguments of `python`.
        """
        whole = self.run(prepare(_made(self._folder / "at-0")))
        assert whole.code == 0, whole.err
        count = sum(not call.startswith("refused ") for call in whole.calls)
        assert count, "the library has seen nothing"
        for number in range(1, count + 1):
            place = _made(self._folder / f"at-{number}")
            yield place, self.run(prepare(place), kill_at=number)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
