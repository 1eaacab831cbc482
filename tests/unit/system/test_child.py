"""A function in a process of its own answers, or fails in one line; the process is gone either way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from distill_rl.errors import ConfigError, WorkerError
from distill_rl.system.processes import call_in_child

BLOCKED_ON_IMPORT = signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture(autouse=True)
def nothing_left():
    before = set(multiprocessing.active_children())  # other tests keep ranks
    yield
    assert set(multiprocessing.active_children()) <= before


def _pid_and(*values: int) -> tuple[int, ...]:
    return os.getpid(), *values


def _blocked() -> tuple[set[int], set[int]]:
    return BLOCKED_ON_IMPORT, signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _refuse() -> None:
    raise ConfigError("student.model", "must be small", 7)


def _sleep() -> None:
    time.sleep(600)


def _die(how: int) -> None:
    os.kill(os.getpid(), how)


def test_result_comes_from_another_process():
    pid, *values = call_in_child("it", _pid_and, 1, 2, deadline_s=60)
    assert values == [1, 2]
    assert pid != os.getpid()


def test_no_signal_ends_a_process_while_it_starts():
    """It would print a traceback, as its parent would that has started half of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    starting, running = call_in_child("it", _blocked, deadline_s=60)
    assert starting >= {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
    assert running == set()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_while_it_starts_waits_until_it_has_what_it_is_to_do(threads, number):
    """Else it prints that its input ended; at the first start in this process, and with threads that take the signal."""
    code = f"""
import multiprocessing.util, os, signal, threading
from distill_rl.system.processes import call_in_child
end = threading.Event()
others = [threading.Thread(target=end.wait) for _ in range({threads})]
for other in others:
    other.start()
spawn = multiprocessing.util.spawnv_passfds
def hit(*arguments):
    pid = spawn(*arguments)
    if b"spawn_main" in b"".join(map(os.fsencode, arguments[1])):
        os.kill(os.getpid(), signal.{number})
    return pid
multiprocessing.util.spawnv_passfds = hit
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    call_in_child("it", os.getpid, deadline_s=60)
except KeyboardInterrupt:
    print("interrupted")
end.set()
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (child.stdout, child.stderr) == ("interrupted\n", "")


def test_an_exception_is_raised_here():
    with pytest.raises(ConfigError, match=r"student\.model: must be small; got 7"):
        call_in_child("it", _refuse, deadline_s=60)


def test_a_process_without_answer_is_killed_at_the_deadline():
    with pytest.raises(WorkerError, match=r"^student.model: .* must answer within 0.5 s; got no answer; .*busy$"):
        call_in_child("student.model", _sleep, deadline_s=0.5)


def test_death_is_reported_before_the_deadline():
    with pytest.raises(
        WorkerError, match=r"^student.model: .* got exit code -9 without an answer; .*memory runs out: .*$"
    ):
        call_in_child("student.model", _die, int(signal.SIGKILL), deadline_s=600)
