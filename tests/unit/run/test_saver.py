"""Background saves, seen from the driver. The ranks are threads here; real ones: tests/distributed, tests/cli."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distill_rl.errors import CheckpointError, WorkerError
from distill_rl.run import checkpoints
from distill_rl.run.checkpoints import CheckpointStore, SavedState, Saver
from distill_rl.system.files import write_json
from distill_rl.types import TrainState


class Ranks:
    """Keeps the contract of the student's ranks: `save` with a marker returns at once; the files, then the marker, appear when
    `go` is set. An error is in the marker, unless `mute`, and raised once, by the next `save` or `finish_saving`."""

    def __init__(self):
        self.go = threading.Event()
        self.go.set()
        self.fails, self.mute, self.lives = "", False, True
        self.calls = []
        self._threads, self._error = [], ""

    def collective(self, method, *arguments, what):
        self.calls.append(method)
        if method in ("save", "finish_saving"):
            self._finish()
        if method == "save":
            directory, marker = Path(arguments[0]), arguments[1]
            thread = threading.Thread(target=self._write, args=(directory, marker, self.fails), daemon=True)
            thread.start()
            self._threads.append(thread)
            if marker is None:
                self._finish()
        return [100]

    def _finish(self):
        for thread in self._threads:
            thread.join()
        error, self._error = self._error, ""
        if error:
            raise CheckpointError(error)

    def _write(self, directory, marker, fails):
        self.go.wait()
        self._error = fails
        if not fails and directory.is_dir():  # otherwise the run has ended
            (directory / "weights").write_text("weights")
        if marker and not self.mute and directory.is_dir():
            write_json(Path(marker), {"error": fails or None, "files": ["weights"]})

    def dead(self):
        return not self.lives


@pytest.fixture
def ranks():
    return Ranks()


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path, keep_last=9, keep_best=0)


def saver_over(store, ranks, **settings):
    return Saver(store, ranks.collective, in_background=True, deadline_s=30, dead=ranks.dead, **settings)


def state(step):
    return SavedState(TrainState(step))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def no_threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "commit"] == []


def test_next_save_waits_for_the_one_in_flight(store, ranks, tmp_path):
    ranks.go.clear()
    with saver_over(store, ranks) as saver:
        saver.save(state(1))
        assert [name[:12] for name in names(tmp_path)] == [".tmp-step-1-"]
        ranks.go.set()
        saver.save(state(2))
        assert "step-1" in names(tmp_path)
        saver.settle()
        assert names(tmp_path) == ["step-1", "step-2"]
        saver.settle()
    assert store.newest(pytest.fail).state.train.step == 2
    assert no_threads()


@pytest.mark.parametrize("mute", [False, True])
@pytest.mark.parametrize("how", ["save", "settle"])
def test_rank_error_is_raised_by_next_save_or_settle(store, ranks, tmp_path, how, mute):
    """Also an error that did not reach the marker, as on a full disk (`mute`)."""
    with saver_over(store, ranks) as saver:
        saver.save(state(1))
        saver.settle()
        ranks.fails, ranks.mute = "rank 1: OSError: no such luck", mute
        saver.save(state(2))
        with pytest.raises(WorkerError, match=r"saving step 2: .*older checkpoints are intact.*no such luck") as caught:
            saver.save(state(3)) if how == "save" else saver.settle()
        assert caught.value.exit_code == 1
    assert names(tmp_path) == ["step-1"]
    assert no_threads()


def test_the_last_checkpoint_is_saved_although_the_one_before_failed(store, ranks, tmp_path):
    with saver_over(store, ranks) as saver:
        ranks.fails = "rank 1: OSError: no such luck"
        saver.save(state(1))
        saver._in_flight.thread.join()
        ranks.fails = ""
        saver.save(state(2), at_once=True)
        assert names(tmp_path) == ["step-2"]
        with pytest.raises(WorkerError, match=r"saving step 1: .*no such luck"):
            saver.raise_earlier_error()


def test_failed_run_completes_save_in_flight(store, ranks, tmp_path):
    def fail(saver):
        with saver:
            saver.save(state(1))
            threading.Timer(0.5, ranks.go.set).start()
            raise RuntimeError("a teacher died")

    ranks.go.clear()
    with pytest.raises(RuntimeError, match="teacher"):
        fail(saver_over(store, ranks))
    assert names(tmp_path) == ["step-1"]
    assert no_threads()


@pytest.mark.parametrize("why", ["dead", "silent"])
def test_failed_run_drops_save_of_dead_or_silent_ranks(store, ranks, tmp_path, why, monkeypatch):
    def fail(saver):
        with saver:
            saver.save(state(2))
            raise RuntimeError("the student died")

    monkeypatch.setattr(checkpoints, "_PATIENCE_S", 30.0 if why == "dead" else 0.3)
    monkeypatch.setattr(checkpoints, "_LIVENESS_POLL_S", 0.1)
    with saver_over(store, ranks) as saver:
        saver.save(state(1))
        saver.settle()
    ranks.go.clear()
    ranks.lives = why != "dead"
    with pytest.raises(RuntimeError, match="student"):
        fail(saver_over(store, ranks))
    assert names(tmp_path) == ["step-1"]
    assert no_threads()
    ranks.go.set()


def test_missing_marker_is_an_error_after_the_deadline(store, ranks, tmp_path):
    ranks.mute = True
    with Saver(store, ranks.collective, in_background=True, deadline_s=0.2) as saver:
        saver.save(state(1))
        with pytest.raises(WorkerError, match=r"saving step 1: .*ray\.step_timeout_s=0\.2"):
            saver.settle()
    assert names(tmp_path) == []


def test_waiting_for_a_save_can_be_interrupted(store, ranks, tmp_path, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    slow = threading.Event()
    monkeypatch.setattr(store, "commit", lambda draft, commit=store.commit: (slow.wait(), commit(draft)))

    def run(saver):
        with saver:
            saver.save(state(1))
            threading.Timer(0.5, slow.set).start()
            saver.settle()

    with pytest.raises(KeyboardInterrupt):
        run(saver_over(store, ranks, interrupted=interrupt))
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("in_background", [False, True])
def test_save_at_once_commits_and_raises_without_a_thread(store, tmp_path, in_background):
    def collective(method, *arguments, what):
        if arguments:
            directory, marker = arguments
            assert marker is None
            if what.endswith("2"):
                raise CheckpointError("rank 0: no such luck")
            (Path(directory) / "weights").write_text("weights")
        return [100]

    with Saver(store, collective, in_background=in_background, deadline_s=30) as saver:
        saver.save(state(1), at_once=in_background)
        assert no_threads()
        with pytest.raises(WorkerError, match=r"saving step 2: .*no such luck"):
            saver.save(state(2), at_once=in_background)
    assert names(tmp_path) == ["step-1"]


DISK_FULL = """\
import sys
from pathlib import Path
from distill_rl.errors import DistillError
from distill_rl.run.checkpoints import CheckpointStore, Saver
from tests.unit.run.test_saver import Ranks, state

folder, case = Path(sys.argv[1]), sys.argv[2]
store = CheckpointStore(folder / "checkpoints", keep_last=2, keep_best=0)

class Big(Ranks):
    def _write(self, directory, marker, fails):
        try:
            if case == "meanwhile" and "step-2" in str(directory):  # room when the save began, and no more
                (folder / "filler").write_bytes(bytes(150_000))
            (directory / "optimizer").write_bytes(bytes(450_000))
        except OSError as error:
            self.fails = f"rank 0: OSError: {error}"
        super()._write(directory, marker, self.fails)

ranks = Big()
with Saver(store, ranks.collective, in_background=True, deadline_s=30) as saver:
    saver.save(state(1))
    saver.settle()
    if case == "before":
        (folder / "filler").write_bytes(bytes(200_000))
    try:
        saver.save(state(2))
        saver.settle()
    except DistillError as error:
        print(error.exit_code, error)
assert store.newest(sys.exit).state.train.step == 1, "the old one must be intact"
assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-1"]
"""


@pytest.mark.parametrize("case", ["before", "meanwhile"])
def test_full_disk_keeps_old_checkpoint_and_names_missing_bytes(tmp_path, case):
    """A file system of one megabyte in a separate mount namespace."""
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec '{sys.executable}' -c \"$0\" {tmp_path} {case}"
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    try:
        tried = subprocess.run([*inside, f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs unshare(1)")
    if tried.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {tried.stderr.strip()}")
    done = subprocess.run([*inside, mount, DISK_FULL], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("1 saving step 2: must succeed; older checkpoints are intact")
    needed, free = map(int, re.search(r"needs (\d+) bytes of free space; got (\d+) bytes", line).groups())
    assert 450_000 < needed < 460_000
    assert free < needed
    assert ("No space left on device" in line) == (case == "meanwhile")
