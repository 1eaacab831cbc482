"""Runs programs in forks of a process that has imported what they import (tests/helpers/fork_server.py).

A run with four actors would otherwise import torch and Transformers five times, for two or three seconds of processor time each.
"""

from __future__ import annotations

import atexit
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import pytest

from tests.helpers import fork_server
from tests.helpers.guard import temporary_prefix

VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
"""Variables of all programs that tests start."""
_FORKS = {"RAY_prestart_worker_first_driver": "0"}
"""Ray starts no processes before it knows whose actors they will be: that would import `ray` twice."""


class Refused(RuntimeError):
    """The program has variables with which its imports would be others than those of this session's process."""


class Forked(psutil.Process):
    """A program in a fork, with what tests use of a `Popen`."""

    def __init__(self, connection: socket.socket, pid: int):
        super().__init__(pid)
        self._connection = connection
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:  # type: ignore[override]
        """Waits until the program ends, and returns its exit code; -n if signal n ended it.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["python"], timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(int(self._connection.recv(100)))
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


def fork(
    arguments: Sequence[str],
    variables: Mapping[str, str],
    folder: str | Path,
    outputs: Sequence[int],
    *,
    session: bool = False,
) -> Forked:
    """Runs `python` with these arguments in a fork; parameters as of `fork_server.ask`.

    Raises:
        Refused: by its variables.
    """
    connection, pid = fork_server.ask(
        _session()[0], arguments, {**variables, **_FORKS}, str(folder), outputs, session=session
    )
    if not pid:
        raise Refused
    return Forked(connection, pid)


@contextmanager
def forked_actors() -> Iterator[None]:
    """While the block runs, Ray starts actors as forks if this process starts Ray."""
    name, scripts = _session()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", fork_server.write_script(scripts, name, name))
        for variable, value in {**VARIABLES, **_FORKS}.items():
            patch.setenv(variable, value)
        yield


@cache
def _session() -> tuple[str, str]:
    """Starts this session's process that forks, and returns its name and the folder of scripts."""
    name = f"forks-{os.getpid()}"
    scripts = tempfile.mkdtemp(prefix=temporary_prefix(os.getpid()), dir="/tmp")
    atexit.register(shutil.rmtree, scripts, ignore_errors=True)
    with fork_server.listen(name) as listening:
        command = [sys.executable, "-m", fork_server.__name__, str(listening.fileno()), str(os.getpid()), scripts]
        root = Path(__file__).parents[2]
        variables = os.environ | VARIABLES
        subprocess.Popen(command, pass_fds=[listening.fileno()], cwd=root, env=variables, start_new_session=True)
    return name, scripts
