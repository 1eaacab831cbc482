"""How much memory this process has held, and how much is available."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from distill_rl.errors import ConfigError

# How much memory this process has held at most.


def reset_peak(device: str = "cpu") -> None:
    """Lets `peak_gib` begin again with what this process holds now; elsewhere than on Linux and CUDA it does nothing."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform.startswith("linux"):
        with suppress(OSError):  # a container may forbid it; the peak is then that of the whole process
            Path("/proc/self/clear_refs").write_text("5")


def peak_gib(device: str = "cpu") -> float:
    """Returns the most GiB that this process has held at once so far, or since `reset_peak`; does not wait for a device.

    Args:
        device: of a CUDA device, such as "cuda:0": what torch has allocated on it. Otherwise the resident memory (VmHWM,
            on Linux; 0 elsewhere), which includes pages shared with other processes.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    if not sys.platform.startswith("linux"):
        return 0.0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM:")), 0.0)


# How much memory is available: what the machine has, within the limits of a container or a batch job.

MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
_GROUP_FILES = ("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
"""Limit and usage of a control group of version 2 and of version 1, and how its fields in memory.stat begin."""
SHM = Path("/dev/shm")
LEAST_OBJECT_STORE = 80 * 2**20
"""Bytes. Ray does not start with less."""
SPARE_OBJECT_STORE = 256 * 2**20
"""Bytes for batches and results, besides the targets."""
ENLARGE_SHM = "enlarge it (mount -o remount,size=2G /dev/shm; for a container --shm-size=2g)"


def object_store_room() -> int:
    """Bytes of /dev/shm that are free now, and so available to the object store of a Ray instance started here.

    Raises:
        ConfigError: fewer than `LEAST_OBJECT_STORE`.
    """
    free = shutil.disk_usage(SHM).free
    if free < LEAST_OBJECT_STORE:
        rule = f"Ray's object store needs {LEAST_OBJECT_STORE >> 20} MiB of it"
        raise ConfigError(str(SHM), rule, f"{free >> 20} MiB free", f"free some, or {ENLARGE_SHM}")
    return free


def object_store_size(target_bytes: int, free: int) -> tuple[int, int]:
    """Returns the size of the object store for a Ray started here, and what Ray will spill to /tmp, in bytes.

    The size is `target_bytes` and 256 MiB to spare, but at most 80 % of /dev/shm, and at least `LEAST_OBJECT_STORE`.

    Args:
        target_bytes: size of the targets that exist at once.
        free: bytes of /dev/shm, as `object_store_room` returns them.

    Raises:
        ConfigError: /tmp has too little room for what does not fit.
    """
    wanted, most = SPARE_OBJECT_STORE + target_bytes, int(0.8 * free)
    size = max(LEAST_OBJECT_STORE, min(wanted, most))
    spilled = max(0, wanted - most)
    room = shutil.disk_usage("/tmp").free
    if spilled > room:
        rule = f"what Ray spills to /tmp needs {spilled} bytes: /dev/shm has {free} for targets of {target_bytes}"
        raise ConfigError("/tmp", rule, f"{room} bytes free", "free some space, or lower prefetch.depth or loss.top_k")
    return size, spilled


def available_bytes(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> int:
    """Returns how many bytes of memory this process may use now, within the limits of its control groups.

    That is the smallest of what the machine has free or can reclaim, and what each group leaves (limit − usage + pages
    of files); never below 0.

    Args:
        membership: file in which the kernel lists the groups of this process.
        mount: where control groups are mounted, version 1 or 2. Limits that cannot be read are ignored.
    """
    remaining = [_remaining(folder) for folder in _groups(membership, mount)]
    return max(0, min([_machine_bytes(), *(size for size in remaining if size is not None)]))


def total_bytes(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> int:
    """Returns how many bytes of memory there are for this process, used or not: the machine's, or the limit of a group or Slurm job.

    Arguments as for `available_bytes`.
    """
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_of_a_job()]
    limits = [_number(group / name) for group in _groups(membership, mount) for name, _, _ in _GROUP_FILES]
    return min([*sizes, *(size for size in limits if size is not None)])


def _of_a_job() -> Iterator[int]:
    """Yields the memory that Slurm gives this job on a node, if it limits that; not every site enforces it by a group."""
    cpus = os.environ.get("SLURM_CPUS_ON_NODE", "")
    for variable, count in ("SLURM_MEM_PER_NODE", "1"), ("SLURM_MEM_PER_CPU", cpus):
        mebibytes = os.environ.get(variable, "")
        if mebibytes.isdecimal() and count.isdecimal() and int(mebibytes):  # 0: all of the node
            yield int(mebibytes) * int(count) << 20


def _machine_bytes() -> int:
    """Bytes that programs can use before the machine swaps, by the kernel's estimate or, without Linux, by psutil's."""
    try:
        (line,) = (line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):  # no Linux
        import psutil  # not at the top: the GPU check runs without it

        return psutil.virtual_memory().available


def _groups(membership: Path, mount: Path) -> Iterator[Path]:
    """Yields the folders of this process's memory control groups and of all their parents; each may have a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mount / "memory" if controllers else mount
        parts = PurePosixPath(path).parts[1:]
        for depth in range(len(parts) + 1):
            yield root.joinpath(*parts[:depth])


def _remaining(group: Path) -> int | None:
    """Bytes that a control group may still use, of version 1 or 2; None if it has no limit or cannot be read."""
    # Pages of files count as free, because the kernel reclaims them first. Negative if the group is above its limit.
    for limit_name, usage_name, prefix in _GROUP_FILES:
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and usage is not None:
            return limit - usage + _file_pages(group, prefix)
    return None


def _number(file: Path) -> int | None:
    """The number in a file; None if it cannot be read or holds a word, such as `max`: no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _file_pages(group: Path, prefix: str) -> int:
    """Bytes of cached files in a control group; 0 if unreadable."""
    # Shared memory does not count, because it has no file to be written to.
    try:
        entries = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        return sum(int(value) for name, value in entries if name in (f"{prefix}active_file", f"{prefix}inactive_file"))
    except (OSError, ValueError):
        return 0
