"""Shared memory of an engine that is killed with all its processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.helpers.command import until

ENGINE = """
import sys
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from distill_rl.models.vllm_guard import SharedMemoryGuard

guard = SharedMemoryGuard()
memory = SharedMemory(create=True, size=4096)
lock = get_context("spawn").Lock()
guard.started()
print(memory.name, lock._semlock.name.removeprefix("/"), flush=True)
for line in sys.stdin:
    if line == "leave and close\\n":
        memory.close()
    guard.close()
    print("closed", flush=True)
"""


@contextmanager
def engine() -> Iterator[tuple[subprocess.Popen, list[Path]]]:
    """A process with shared memory and a semaphore under guard, and their files."""
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        files = [Path("/dev/shm", name.replace("mp-", "sem.mp-")) for name in process.stdout.readline().split()]
        try:
            yield process, files
        finally:
            kill_family(process.pid)
            for file in files:
                file.unlink(missing_ok=True)


def guards(pid: int) -> list[psutil.Process]:
    """The guards of a process."""
    return [each for each in psutil.process_iter(["cmdline"]) if guarded(each.info["cmdline"] or [], pid)]


def guarded(command: list[str], pid: int) -> bool:
    return len(command) > 2 and command[-2].endswith("vllm_guard.py") and command[-1] == str(pid)


def kill_family(pid: int) -> None:
    """Kills a process with its descendants; Python's resource tracker, which would remove the memory, is one."""
    if psutil.pid_exists(pid):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            each.kill()


def test_memory_of_a_killed_engine_is_removed_and_its_guard_ends() -> None:
    with engine() as (process, files):
        assert len(files) == 2
        assert all(file.exists() for file in files)
        (guard,) = guards(process.pid)
        assert guard not in psutil.Process(process.pid).children(recursive=True)
        kill_family(process.pid)
        until(lambda: not any(file.exists() for file in files), "the memory to be removed")
        until(lambda: not guard.is_running(), "the guard to end")


def close(process: subprocess.Popen, how: str = "close") -> None:
    """Makes the engine say that it has ended, and waits for its guard to end."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(how + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "closed\n"
    until(lambda: not guards(process.pid), "the guard to end")


def test_what_a_process_still_uses_after_its_engine_has_ended_is_left_alone() -> None:
    with engine() as (process, files):
        close(process)
        kill_family(process.pid)
        assert all(file.exists() for file in files)


def test_what_an_ended_engine_has_left_behind_is_removed() -> None:
    with engine() as (process, (memory, lock)):
        close(process, "leave and close")
        assert not memory.exists()
        assert lock.exists()
