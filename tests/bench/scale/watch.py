"""What a run's processes hold and send while it goes on, seen from outside: resident memory, and bytes through Ray's head."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psutil

HEAD = "gcs_server"
ROLES = ("driver", "head", "workers")
_WORKER, _IDLE = "ray::", "IDLE"
"""Parts of the names of Ray's worker processes."""
_TRACKER = "resource_tracker"
"""Part of the command line of a child that Python starts before another one."""
_SOCKETS = ("ss", "--tcp", "--info", "--numeric", "--processes", "--no-header", "--oneline")
_BYTES = re.compile(r"\bbytes_(?:sent|received):(\d+)")


@dataclass
class Watch:
    """Samples of a run."""

    times: list[float] = field(default_factory=list)
    """Unix time."""
    resident: dict[str, list[float]] = field(default_factory=dict)
    """MiB by role, without what processes share, a value per sample."""
    head_bytes: list[float] = field(default_factory=list)
    """All that the head has sent and received so far; empty where the system has no `ss`."""
    _by_socket: dict[str, int] = field(default_factory=dict)
    _others: set[psutil.Process] = field(default_factory=lambda: set(psutil.Process().children()))
    """Children of this process that are not the driver."""

    def sample(self) -> None:
        """Adds a sample, if the run has a driver and a head already."""
        found = _processes(self._others)
        if not {"driver", "head"} <= set(found):
            return
        with suppress(psutil.NoSuchProcess):
            # What processes share is not theirs: the pages of libraries come and go.
            memory = {role: sum(map(_own_mib, processes)) for role, processes in found.items()}
            self._count(found["head"][0].pid)
            self.times.append(time.time())
            for role in ROLES:
                self.resident.setdefault(role, []).append(memory.get(role, 0.0))

    def _count(self, pid: int) -> None:
        """Adds up the bytes of the head's sockets, those that are closed included."""
        try:
            lines = subprocess.run(_SOCKETS, capture_output=True, text=True, check=True).stdout.splitlines()
        except (OSError, subprocess.CalledProcessError):
            return
        for line in lines:
            if f"pid={pid}," in line:
                # Local and peer address are the name of a connection.
                name = " ".join(line.split()[3:5])
                self._by_socket[name] = sum(map(int, _BYTES.findall(line)))
        self.head_bytes.append(float(sum(self._by_socket.values())))

    def per_step(self, steps: Mapping[float, int], first: int = 0) -> dict[str, float | None]:
        """What grows with each step: the slope of a line through the samples.

        Args:
            steps: finished steps by Unix time.
            first: step from which on the samples count.

        Returns:
            KiB of resident memory by role, and of the head's traffic; None where too little is known.
        """
        series = {f"{role}_resident": [mib * 1024 for mib in values] for role, values in self.resident.items()}
        series["head_traffic"] = [count / 1024 for count in self.head_bytes]
        late = {when: step for when, step in steps.items() if step >= first}
        return {f"{name}_kib_per_step": _slope(self.times, values, late) for name, values in series.items()}


@contextmanager
def watching(every_s: float = 1.0) -> Iterator[Watch]:
    """Watches the run that a child process of this one drives, while the block runs, with a sample every `every_s` seconds."""
    watch, done = Watch(), threading.Event()

    def go_on() -> None:
        while not done.wait(every_s):
            watch.sample()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        done.set()
        thread.join()


def _processes(others: set[psutil.Process]) -> dict[str, list[psutil.Process]]:
    """The processes of a run among the descendants of this one, by role.

    Args:
        others: children that were there before the driver.
    """
    found: dict[str, list[psutil.Process]] = {}
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process().children():
            if process not in others and _TRACKER not in " ".join(process.cmdline()):
                found["driver"] = [process]
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                name = process.name()
                if name == HEAD:
                    found["head"] = [process]
                elif name.startswith(_WORKER) and _IDLE not in name:
                    found.setdefault("workers", []).append(process)
    return found


def _own_mib(process: psutil.Process) -> float:
    """MiB of a process without what it shares."""
    memory = process.memory_info()
    return float(memory.rss - memory.shared) / 2**20


def _slope(times: list[float], values: list[float], steps: Mapping[float, int]) -> float | None:
    """The slope of values against steps; None with fewer than three samples during the steps."""
    import numpy as np

    if len(values) != len(times) or not steps:
        return None
    at, counts = np.array(list(steps)), np.array(list(steps.values()))
    inside = [i for i, when in enumerate(times) if at[0] <= when <= at[-1]]
    if len(inside) < 3:
        return None
    done = np.interp([times[i] for i in inside], at, counts)
    return float(np.polyfit(done, [values[i] for i in inside], 1)[0])
