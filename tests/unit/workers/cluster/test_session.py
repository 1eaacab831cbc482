import os
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from distill_rl.errors import ConfigError
from distill_rl.workers.cluster import session
from distill_rl.workers.cluster.session import _has_pending, _killed_when_asked_to_end, _object_store_bytes

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


@pytest.mark.parametrize("spare", [True, False])
def test_targets_that_fit_neither_into_shared_memory_nor_onto_the_disk_are_refused(monkeypatch, spare):
    """What the operating system says of the room is the only thing made up."""
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(session, "object_store_room", lambda: 10 << 30)
    monkeypatch.setattr(session.shutil, "disk_usage", lambda path: usage((500 if spare else 5) << 30))
    if spare:
        assert _object_store_bytes(100 << 30) == 8 << 30
    else:
        with pytest.raises(
            ConfigError, match=rf"/tmp: .* for targets of {100 << 30}; got {5 << 30} bytes free; free some"
        ):
            _object_store_bytes(100 << 30)


def test_a_link_in_the_place_of_a_folder_is_not_followed_when_the_dead_are_swept(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    link = Path("/tmp") / f"drl-{gone.pid}-{os.getpid()}"
    (tmp_path / "mine").mkdir()
    link.symlink_to(tmp_path / "mine")
    try:
        session.sweep(link.name)
        assert not list((tmp_path / "mine").iterdir())
        assert link.is_symlink()
    finally:
        link.unlink(missing_ok=True)
