"""Forks of a process that has imported what they need: what starts them sees no difference."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from pathlib import Path

import psutil
import pytest

from distill_rl.errors import WorkerError
from distill_rl.system.fork_server import LAUNCHER, ForkServer, launcher
from distill_rl.system.processes import call_in_child
from tests.helpers.command import until

DEADLINE_S = 300.0


@pytest.fixture(scope="module", params=["1", "2", None], ids=["one thread", "two threads", "threads not set"])
def server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    started = ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "HF_HUB_DISABLE_TELEMETRY",
            "HF_ENDPOINT",
            "HF_DATASETS_OFFLINE",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN",
            "DO_NOT_TRACK",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS",
        ):
            patch.setenv(name, "1")
        patch.setenv("HF_TOKEN", "of the user")
        if request.param is None:
            patch.delenv("OMP_NUM_THREADS", raising=False)
        else:
            patch.setenv("OMP_NUM_THREADS", request.param)
        with started:
            yield started


def where() -> tuple[int, bool, int, bool]:
    import torch  # of a fork, imported before

    return os.getppid(), "distill_rl.student.engine" in sys.modules, torch.get_num_threads(), gc.isenabled()


def sleep_forever(file: Path) -> None:
    file.write_text(str(os.getpid()))
    signal.pause()


def command(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([launcher(), *arguments], capture_output=True, text=True, **options)


def test_a_function_is_called_in_a_fork(server):
    parent, imported, threads, collects = call_in_child("the test", where, deadline_s=DEADLINE_S)
    assert parent == server.process.pid
    assert imported
    assert collects
    assert threads == int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def test_output_and_exit_code_are_those_of_the_command(server):
    done = command("-m", "distill_rl", "check", "-c", "missing.yaml")
    direct = subprocess.run(
        [sys.executable, "-m", "distill_rl", "check", "-c", "missing.yaml"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (direct.returncode, direct.stdout, direct.stderr)
    assert done.returncode == 2


def test_what_is_not_known_runs_in_the_interpreter(server, tmp_path):
    done = command("-c", "import os, sys; print(os.getcwd(), 'torch' in sys.modules); sys.exit(7)", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, f"{tmp_path} False\n")


def test_other_variables_of_libraries_than_those_at_the_import_get_no_fork(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    parent, *_ = call_in_child("the test", where, deadline_s=DEADLINE_S)
    assert parent == os.getpid()


def started(function: Callable[..., object], *arguments: object) -> multiprocessing.Process:
    """A process of `multiprocessing` from the launcher."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments, daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "_python_exe", os.fsencode(launcher()))
        process.start()
    return process


def fork_of(file: Path) -> psutil.Process:
    """That of `sleep_forever`."""
    until(lambda: file.exists() and file.read_text(), "a fork")
    return psutil.Process(int(file.read_text()))


def test_a_fork_ends_with_its_launcher(server, tmp_path):
    process = started(sleep_forever, tmp_path / "pid")
    fork = fork_of(tmp_path / "pid")
    assert fork.pid != process.pid
    process.kill()
    process.join()
    until(lambda: not psutil.pid_exists(fork.pid), "the end of the fork")


def test_a_killed_fork_is_an_error(server):
    with pytest.raises(WorkerError, match=r"exit code -9 without an answer; .*memory runs out"):
        call_in_child("the test", end_by, signal.SIGKILL, deadline_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (130, 130), ("an error", 1), ("", 0)]
)
def test_a_launcher_ends_as_its_fork(server, tmp_path, capfd, how, code):
    process = started(end_by, how, tmp_path / "last")
    process.join(DEADLINE_S)
    assert process.exitcode == code
    assert capfd.readouterr().err.count("RuntimeError: an error\n") == (code == 1)
    assert (tmp_path / "last").exists() == isinstance(how, str)


def end_by(how: int | str, last: Path | None = None) -> None:
    """Ends this process by a signal, an exit code, or an error and what is left to do at the end."""
    atexit.register(lambda: last and last.touch())
    if isinstance(how, signal.Signals):
        os.kill(os.getpid(), how)
    elif isinstance(how, int):
        os._exit(how)
    elif how:
        raise RuntimeError(how)


def test_processes_of_others_are_started_as_before(server):
    before = spawn.get_executable()
    call_in_child("the test", where, deadline_s=DEADLINE_S)
    assert spawn.get_executable() == before


NO_THIRD_FORK = """
import os
fork, forks = os.fork, []
def limited():
    forks.append(None)
    if len(forks) == 3:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = limited
"""


def test_a_fork_that_fails_ends_no_other(tmp_path, monkeypatch):
    """The server's first fork is that for Ray's services."""
    (tmp_path / "sitecustomize.py").write_text(NO_THIRD_FORK)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setenv(LAUNCHER, str(python))
    server = ForkServer()
    with server:
        process = started(sleep_forever, tmp_path / "pid")
        fork = fork_of(tmp_path / "pid")
        assert fork.ppid() == server.process.pid
        parents = [call_in_child("the test", os.getppid, deadline_s=DEADLINE_S) for _ in range(2)]
        assert parents == [os.getpid(), server.process.pid]
        assert fork.is_running()
        process.kill()
        process.join()


def test_without_its_server_a_launcher_is_the_interpreter():
    with ForkServer():
        path = launcher()
    done = subprocess.run([path, "-m", "distill_rl", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("distill-rl ")
