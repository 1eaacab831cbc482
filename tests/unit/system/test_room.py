import mmap
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from distill_rl.errors import ConfigError
from distill_rl.system import memory
from distill_rl.system.memory import MEMBERSHIP, MOUNT, available_bytes, object_store_size

MIB = 1 << 20


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def room(root: Path, lines: str) -> int:
    (root / "membership").write_text(lines)
    return available_bytes(root / "membership", root / "mount")


def test_version_2_counts_reclaimable_pages_as_free(tmp_path):
    stat = f"anon {8 * MIB}\ninactive_file {3 * MIB}\nactive_file {MIB}\nshmem {5 * MIB}\n"
    write(tmp_path / "mount/job", memory__max=f"{20 * MIB}\n", memory__current=f"{17 * MIB}\n", memory__stat=stat)
    assert room(tmp_path, "0::/job\n") == 7 * MIB


def test_version_1_uses_other_files(tmp_path):
    stat = f"cache {9 * MIB}\ninactive_file 0\ntotal_inactive_file {2 * MIB}\ntotal_active_file {MIB}\n"
    files = {"memory__limit_in_bytes": f"{20 * MIB}\n", "memory__usage_in_bytes": f"{17 * MIB}\n"}
    write(tmp_path / "mount/memory/job", **files, memory__stat=stat)
    assert room(tmp_path, "9:name=systemd:/\n4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n") == 6 * MIB


@pytest.mark.parametrize("tightest", ["", "outer", "outer/inner"])
def test_tightest_parent_group_counts(tmp_path, tightest):
    for group in ("", "outer", "outer/inner"):
        limit = f"{4 * MIB}" if group == tightest else "max"
        write(tmp_path / "mount" / group, memory__max=limit, memory__current=f"{MIB}")
    assert room(tmp_path, "0::/outer/inner\n") == 3 * MIB


@pytest.mark.parametrize("path", ["/docker/0123", "/../../job"])
def test_root_of_the_mount_is_the_group_of_a_container(tmp_path, path):
    write(tmp_path / "mount/memory", memory__limit_in_bytes=f"{4 * MIB}", memory__usage_in_bytes=f"{MIB}")
    assert room(tmp_path, f"4:memory:{path}\n") == 3 * MIB


def test_group_over_its_limit_has_nothing_left(tmp_path):
    write(tmp_path / "mount", memory__max=f"{MIB}", memory__current=f"{2 * MIB}")
    assert room(tmp_path, "0::/\n") == 0


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory__max": "max", "memory__current": "1"},
        {"memory__max": "1"},
        {"memory__max": "one", "memory__current": "1"},
        {"memory__limit_in_bytes": "9223372036854771712", "memory__usage_in_bytes": "1"},
    ],
)
def test_unreadable_limits_are_ignored(tmp_path, files):
    for folder in ("mount", "mount/memory"):
        write(tmp_path / folder, **files)
    found, machine = room(tmp_path, "4:memory:/\n0::/\n"), psutil.virtual_memory()
    assert machine.total // 100 < found <= machine.total


def test_without_control_groups_the_machine_counts(tmp_path):
    assert available_bytes(tmp_path / "none", tmp_path) > mmap.PAGESIZE


def test_this_machine_is_an_upper_bound():
    assert 0 < available_bytes(MEMBERSHIP, MOUNT) <= psutil.virtual_memory().total


@pytest.mark.parametrize("spare", [True, False])
def test_targets_that_fit_neither_memory_nor_disk_are_refused(monkeypatch, spare):
    """Only the free space that the operating system reports is simulated."""
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage((500 if spare else 5) << 30))
    if spare:
        assert object_store_size(100 << 30, 10 << 30) == (8 << 30, (92 << 30) + (256 << 20))
        assert object_store_size(1 << 30, 10 << 30) == ((1 << 30) + (256 << 20), 0)
        assert object_store_size(0, 90 << 20)[0] == 80 << 20
    else:
        with pytest.raises(
            ConfigError, match=rf"/tmp: .* for targets of {100 << 30}; got {5 << 30} bytes free; free some"
        ):
            object_store_size(100 << 30, 10 << 30)
