import contextlib
import gc
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from distill_rl.errors import TransportError
from distill_rl.system import files
from distill_rl.transport import segment as module
from distill_rl.transport.base import Ring
from distill_rl.transport.segment import NONCE_BYTES, SHM, Segment, sweep
from tests.helpers.transports import Process

SIZE = 1 << 16


@pytest.fixture(params=["memfd", "file"])
def segment(request):
    made = Segment.create(SIZE, request.param)
    yield made
    made.close()


def folders():
    return {path for path in SHM.iterdir() if path.name.startswith(f"distill_rl-{os.getuid()}-")}


def mappings(pid="self"):
    """Lines of a process's memory map that belong to segments."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "distill_rl" in line]


def test_writes_are_seen_by_the_other_side(segment):
    other = Segment.attach(segment.address, "ring")
    segment.view[NONCE_BYTES] = 7
    other.view[SIZE - 1] = 9
    assert (other.view[NONCE_BYTES], segment.view[SIZE - 1]) == (7, 9)
    assert len(segment.words) == SIZE // 8
    other.close()


def test_all_pages_are_mapped_at_once(segment):
    """A page that is first accessed later costs several times its copy, or a bus error if memory is full."""
    assert Path(segment.address.path).stat().st_blocks * 512 >= SIZE


@pytest.mark.parametrize("changed", [{"nonce": bytes(NONCE_BYTES)}, {"size": SIZE // 2}])
def test_different_file_under_the_same_name_is_refused(segment, changed):
    with pytest.raises(TransportError, match="ring x: its shared memory must be the writer's; got another file"):
        Segment.attach(replace(segment.address, **changed), "ring x")


def test_memory_is_freed_with_the_last_view():
    for backing in ("memfd", "file"):
        segment = Segment.create(SIZE, backing)
        view = segment.view[:8]
        segment.close()
        assert len(mappings()) == 1
        assert view[0] >= 0
        del view
        gc.collect()
        assert mappings() == []
        with pytest.raises(TransportError):
            Segment.attach(segment.address, "ring")


def test_closing_twice_does_nothing(segment):
    segment.close()
    segment.close()
    assert len(segment.view) == 0


def test_memfd_cannot_be_truncated():
    segment = Segment.create(SIZE)
    fd = os.open(segment.address.path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    segment.close()


def test_excessive_size_is_refused_before_allocation():
    fds, before = psutil.Process().num_fds(), folders()
    for backing in ("memfd", "file"):
        with pytest.raises(TransportError, match=r"take \d+ bytes of shared memory; got \d+ bytes of memory are free"):
            Segment.create(1 << 50, backing)
    assert (psutil.Process().num_fds(), folders()) == (fds, before)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Inside the block this process can open only this many more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count + 1)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(("backing", "left"), [("memfd", 0), ("memfd", 1), ("file", 0), ("file", 1), ("file", 2)])
def test_missing_descriptors_fail_without_leftovers(backing, left):
    fds, before = psutil.Process().num_fds(), folders()
    with (
        descriptors_left(left),
        pytest.raises(
            TransportError, match=r"could not be created; got Too many open files; use transport=object_store"
        ),
    ):
        Segment.create(SIZE, backing)
    assert (psutil.Process().num_fds(), folders()) == (fds, before)


def test_folder_swept_before_locking_is_recreated(monkeypatch):
    """The sweep happens between the creation and the locking of the first folder."""
    sweep()
    before, claim, lost = folders(), files.claim, []

    def late_claim(folder):
        if not lost and folder not in before:
            lost.append(folder)
            assert sweep() == [folder]
        return claim(folder)

    monkeypatch.setattr(files, "claim", late_claim)
    segment = Segment.create(SIZE, "file")
    assert folders() - before == {Path(segment.address.folder)} != set(lost)
    segment.close()
    assert folders() == before


def test_file_replaces_an_unavailable_memfd(monkeypatch):
    monkeypatch.setattr(module, "_memfd", lambda: -1)
    segment = Segment.create(SIZE)
    assert segment.address.path.startswith("/dev/shm/")
    Segment.attach(segment.address, "ring").close()
    segment.close()


def test_forgotten_file_is_gone_but_readable():
    before = folders()
    segment = Segment.create(SIZE, "file")
    reader = Segment.attach(segment.address, "ring")
    segment.forget_name()
    assert folders() == before
    segment.view[NONCE_BYTES] = 5
    assert reader.view[NONCE_BYTES] == 5
    reader.close()
    segment.close()


def test_only_folders_of_dead_owners_are_swept():
    sweep()
    living = Segment.create(SIZE, "file")
    process = Process()
    process.tell("make", 0, "shared_memory", "cpu", "file", {"ring": Ring(2, 4096)})
    assert len(folders()) == 2
    assert sweep() == []
    process.kill()
    assert len(sweep()) == 1
    assert folders() == {Path(living.address.folder)}
    living.close()
    assert folders() == set()


def test_any_new_segment_sweeps():
    process = Process()
    process.tell("make", 0, "shared_memory", "cpu", "file", {"ring": Ring(2, 4096)})
    process.kill()
    assert len(folders()) == 1
    Segment.create(SIZE, "memfd").close()
    assert folders() == set()


def test_foreign_folders_and_links_are_left_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / f"distill_rl-{os.getuid()}-link").symlink_to(tmp_path / "kept")
    (tmp_path / "distill_rl-4294967294-x").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert sweep(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before
