"""Forks of a process that has imported what they need: what starts them sees no difference."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distill_rl.errors import WorkerError
from distill_rl.system.fork_server import ForkServer, launcher
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


def where() -> tuple[int, bool, int]:
    import torch  # of a fork, imported before

    return os.getppid(), "distill_rl.student.engine" in sys.modules, torch.get_num_threads()


def sleep_forever(file: Path) -> None:
    file.write_text(str(os.getpid()))
    signal.pause()


def command(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([launcher(), *arguments], capture_output=True, text=True, **options)


def test_a_function_is_called_in_a_fork(server):
    parent, imported, threads = call_in_child("the test", where, deadline_s=DEADLINE_S)
    assert parent == server.process.pid
    assert imported
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


def test_a_fork_ends_with_its_launcher(server, tmp_path):
    from multiprocessing import get_context

    context = get_context("spawn")
    context.set_executable(launcher())
    process = context.Process(target=sleep_forever, args=(tmp_path / "pid",), daemon=True)
    process.start()
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "a fork")
    fork = psutil.Process(int((tmp_path / "pid").read_text()))
    assert fork.pid != process.pid
    process.kill()
    process.join()
    until(lambda: not psutil.pid_exists(fork.pid), "the end of the fork")


def test_a_killed_fork_is_an_error(server):
    with pytest.raises(WorkerError, match="exit code 137"):
        call_in_child("the test", kill_itself, deadline_s=DEADLINE_S)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_without_its_server_a_launcher_is_the_interpreter():
    with ForkServer():
        path = launcher()
    done = subprocess.run([path, "-m", "distill_rl", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("distill-rl ")
