import mmap
from pathlib import Path

import psutil
import pytest

from distill_rl.transport.room import MEMBERSHIP, MOUNT, available_bytes

MIB = 1 << 20


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def room(root: Path, lines: str) -> int:
    (root / "membership").write_text(lines)
    return available_bytes(root / "membership", root / "mount")


def test_version_2_leaves_its_limit_less_what_is_used_and_cannot_be_reclaimed(tmp_path):
    stat = f"anon {8 * MIB}\ninactive_file {3 * MIB}\nactive_file {MIB}\nshmem {5 * MIB}\n"
    write(tmp_path / "mount/job", memory__max=f"{20 * MIB}\n", memory__current=f"{17 * MIB}\n", memory__stat=stat)
    assert room(tmp_path, "0::/job\n") == 7 * MIB


def test_version_1_says_it_in_other_files(tmp_path):
    stat = f"cache {9 * MIB}\ninactive_file 0\ntotal_inactive_file {2 * MIB}\ntotal_active_file {MIB}\n"
    files = {"memory__limit_in_bytes": f"{20 * MIB}\n", "memory__usage_in_bytes": f"{17 * MIB}\n"}
    write(tmp_path / "mount/memory/job", **files, memory__stat=stat)
    assert room(tmp_path, "9:name=systemd:/\n4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n") == 6 * MIB


@pytest.mark.parametrize("tightest", ["", "outer", "outer/inner"])
def test_the_tightest_of_the_groups_around_a_process_counts(tmp_path, tightest):
    for group in ("", "outer", "outer/inner"):
        limit = f"{4 * MIB}" if group == tightest else "max"
        write(tmp_path / "mount" / group, memory__max=limit, memory__current=f"{MIB}")
    assert room(tmp_path, "0::/outer/inner\n") == 3 * MIB


@pytest.mark.parametrize("path", ["/docker/0123", "/../../job"])
def test_in_a_container_the_root_of_the_mount_is_its_group(tmp_path, path):
    write(tmp_path / "mount/memory", memory__limit_in_bytes=f"{4 * MIB}", memory__usage_in_bytes=f"{MIB}")
    assert room(tmp_path, f"4:memory:{path}\n") == 3 * MIB


def test_a_group_that_is_over_its_limit_has_no_room(tmp_path):
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
def test_without_a_limit_that_can_be_read_the_machine_s_memory_counts(tmp_path, files):
    for folder in ("mount", "mount/memory"):
        write(tmp_path / folder, **files)
    found, machine = room(tmp_path, "4:memory:/\n0::/\n"), psutil.virtual_memory()
    assert machine.total // 100 < found <= machine.total


def test_without_control_groups_the_machine_s_memory_counts(tmp_path):
    assert available_bytes(tmp_path / "none", tmp_path) > mmap.PAGESIZE


def test_here_it_is_no_more_than_the_machine_has():
    assert 0 < available_bytes(MEMBERSHIP, MOUNT) <= psutil.virtual_memory().total
