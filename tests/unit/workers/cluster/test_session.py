import signal
import subprocess
import sys

import psutil

from distill_rl.workers.cluster.session import _has_pending, _killed_when_asked_to_end

DEAF = "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); print('deaf', flush=True); sys.stdin.read()"


def deaf_process() -> subprocess.Popen:
    """One that does not hear SIGTERM, as those of Ray do not in a run."""
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "deaf\n"
    return process


def test_a_process_is_killed_once_it_was_asked_to_end_and_not_before():
    asked, other = deaf_process(), deaf_process()
    try:
        with _killed_when_asked_to_end([psutil.Process(asked.pid), psutil.Process(other.pid)]):
            assert not _has_pending(asked.pid, signal.SIGTERM)
            asked.terminate()
            assert asked.wait(timeout=30) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (asked, other):
            process.kill()
            process.wait()


def test_a_process_that_is_gone_has_nothing_pending():
    process = deaf_process()
    process.kill()
    process.wait()
    assert not _has_pending(process.pid, signal.SIGTERM)
