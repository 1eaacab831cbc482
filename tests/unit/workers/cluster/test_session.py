import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from distill_rl.system.files import remove_abandoned
from distill_rl.workers.cluster.session import _has_pending, _kill_on_sigterm

BLOCKS_SIGTERM = (
    "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); print('deaf', flush=True); sys.stdin.read()"
)


def blocking_process() -> subprocess.Popen:
    """A process that blocks SIGTERM, as Ray's do in a run."""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKS_SIGTERM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "deaf\n"
    return process


def test_process_is_killed_once_it_gets_sigterm():
    terminated, other = blocking_process(), blocking_process()
    try:
        with _kill_on_sigterm([psutil.Process(terminated.pid), psutil.Process(other.pid)]):
            assert not _has_pending(terminated.pid, signal.SIGTERM)
            terminated.terminate()
            assert terminated.wait(timeout=30) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (terminated, other):
            process.kill()
            process.wait()


def test_dead_process_has_no_pending_signal():
    process = blocking_process()
    process.kill()
    process.wait()
    assert not _has_pending(process.pid, signal.SIGTERM)


def test_link_is_not_followed_when_removing_folders(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    link = Path("/tmp") / f"drl-{ended.pid}-{os.getpid()}"
    (tmp_path / "mine").mkdir()
    link.symlink_to(tmp_path / "mine")
    try:
        remove_abandoned(Path("/tmp"), link.name)
        assert not list((tmp_path / "mine").iterdir())
        assert link.is_symlink()
    finally:
        link.unlink(missing_ok=True)
