"""Monitors the workers' processes, to find those that a deadline would find too late or not at all.

A process that was stopped (SIGSTOP) neither answers nor dies, so its peers would wait for it for ever. The monitor
kills it, which turns it into a dead worker, and those can be recovered from.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distill_rl.config.schema import FaultsConfig
from distill_rl.observe.log import printable
from distill_rl.workers.actors.rank import Process, this_node

GONE = "gone"
_UPDATE_EVERY_S = 2.5
"""Most seconds between two updates, which are also at most a quarter of `faults.stopped_s`."""
_STALE_AFTER_S = 10.0
"""After so long without an update this process was stopped itself, so earlier observations do not count."""
_STACKS_WITHIN_S = 3.0
_ANSWER_WITHIN_S = 10.0
_TAIL_BYTES = 16384
_STATE, _STARTED = 0, 19
"""Places in /proc/PID/stat behind the name: a letter, and when the process began."""
_NOISE = re.compile(r"^(:\w+:.*|\s*)$")
"""Empty lines, and those by which Ray marks a log as an actor's."""

log = logging.getLogger(__name__)


class NodeMonitor:
    """Inspects and kills processes of one node. An object in the driver, an actor on every other node."""

    def __init__(self) -> None:
        self._known: dict[tuple[Process, str, str], str] = {}
        """psutil's status of a process, by what the kernel says of it: psutil takes ten times as long to tell."""

    def states(self, processes: Mapping[str, Process]) -> dict[str, str]:
        """Returns psutil's status of each process, such as `running`; `gone` for ended ones and zombies."""
        return {name: self._state_of(process) for name, process in processes.items()}

    def _state_of(self, process: Process) -> str:
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            key = process, fields[_STATE], fields[_STARTED]
        except (OSError, IndexError):
            return _state(process)
        if key not in self._known:
            self._known[key] = _state(process)
        return self._known[key]

    def kill(self, process: Process) -> None:
        """Sends SIGKILL to a process of this node, unless it has ended already."""
        process.kill()

    def stacks(self, processes: Mapping[str, Process]) -> dict[str, str]:
        """Makes each process write its stacks, and returns them as text; without one that cannot write them.

        SIGUSR2 makes a worker append its stacks to its stderr (`Worker.identify`). They are complete once every log has
        grown and none has grown since the last poll; after 3 s they are returned as they are.
        """
        unable = (GONE, psutil.STATUS_STOPPED)
        able = {name: of for name, of in processes.items() if of.logs and _state(of) not in unable}
        starts = {name: _size(process) for name, process in able.items()}
        for process in able.values():
            with suppress(OSError):
                os.kill(process.pid, signal.SIGUSR2)
        deadline, last_sizes = time.monotonic() + _STACKS_WITHIN_S, starts
        while time.monotonic() < deadline:
            time.sleep(0.1)
            sizes = {name: _size(process) for name, process in able.items()}
            if sizes == last_sizes and all(sizes[name] > start for name, start in starts.items()):
                break
            last_sizes = sizes
        return {name: _read(process.logs[-1], starts[name]) for name, process in able.items()}

    def tails(self, processes: Mapping[str, Process]) -> dict[str, str]:
        """Returns the last 16 KiB of each process's stderr, or of its stdout if stderr is empty.

        Empty lines and Ray's marks are left out.
        """
        return {name: _tail(process) for name, process in processes.items()}


class ProcessMonitor:
    """The driver's view of all nodes.

    Args:
        processes: the workers' processes by name; read anew at every update.
        folder: where `stacks/<worker>.txt` are written.
    """

    def __init__(self, config: FaultsConfig, processes: Mapping[str, Process], folder: Path):
        self._config, self._processes, self.folder = config, processes, folder
        self._local_monitor = NodeMonitor()
        self._remote_monitors: dict[str, Any] = {}
        self._num_monitors = 0
        self._pending: dict[str, tuple[ray.ObjectRef, list[str], float]] = {}
        """By node, the query that it has not answered, the workers whose states were asked for, and when."""
        self._states: dict[str, str] = {}
        self._stopped_since: dict[Process, float] = {}
        self._updated_at = 0.0
        self._fates: dict[Process, str] = {}

    def update(self) -> None:
        """Records the state of every worker's process, and kills those that were stopped (SIGSTOP) too long.

        That is for `faults.stopped_s` seconds, counted from the first update that saw them stopped; a warning is
        logged.

        Does nothing soon after the last update. Never waits for other nodes; their states arrive with a later
        update.
        """
        now = time.monotonic()
        if now - self._updated_at < min(_UPDATE_EVERY_S, self._config.stopped_s / 4):
            return
        if now - self._updated_at > _STALE_AFTER_S:
            self._stopped_since.clear()
        self._updated_at = now
        processes = dict(self._processes)
        remote = _by_node(processes)
        self._states |= self._local_monitor.states(remote.pop(this_node(), {}))
        self._update_remote(remote)
        for name, process in processes.items():
            if self._states.get(name) != psutil.STATUS_STOPPED:
                self._stopped_since.pop(process, None)
            elif now - self._stopped_since.setdefault(process, now) >= self._config.stopped_s:
                self._fates[process] = f"it was stopped (SIGSTOP) for {self._config.stopped_s:g} s, and killed"
                log.warning("%s: %s", self.where(name), self._fates[process])
                self._kill(process)

    def report(self, names: Collection[str], what: str, seconds: float, limit_s: float) -> None:
        """Logs a warning with the workers that are waited for and their last known states.

        Args:
            what: what is waited for.
            seconds: how long it has taken so far; `limit_s` is the deadline.
        """
        states = ", ".join(f"{self.where(name)} is {self._states.get(name, 'state unknown')}" for name in sorted(names))
        log.warning("waiting %.0f s for %s: %s; the limit is %g s", seconds, what, states, limit_s)

    def where(self, name: str) -> str:
        """Returns a worker's name and host, for messages; the name alone while the host is unknown."""
        process = self._processes.get(name)
        return f"{name} on {process.host}" if process and process.host else name

    def fate(self, name: str) -> str:
        """Returns why the monitor killed a worker's present process; empty if it did not."""
        process = self._processes.get(name)
        return self._fates.get(process, "") if process else ""

    def last_words(self, name: str, lines: int = 3) -> str:
        """Returns the last lines that a worker printed, each cut to 200 characters, joined by ` | `.

        They are from stderr, or from stdout if stderr is empty. Empty if the worker is unknown or its node does not
        answer within 10 s.
        """
        process = self._processes.get(name)
        text = self._ask("tails", {name: process}).get(name, "") if process else ""
        return " | ".join(printable(line.strip())[:200] for line in text.splitlines()[-lines:])

    def dump_stacks(self, names: Collection[str] | None = None) -> None:
        """Writes the stacks of all workers that can still report them to `stacks/<worker>.txt` (`/` becomes `-`).

        Takes seconds.

        Args:
            names: of the only workers to ask; None: all.
        """
        processes = {name: of for name, of in self._processes.items() if names is None or name in names}
        for name, text in self._ask("stacks", processes).items():
            if text:
                path = self.folder / "stacks" / f"{name.replace('/', '-')}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
        if processes:
            log.info("stacks of the workers are in %s", self.folder / "stacks")

    def close(self) -> None:
        """Kills the monitors on other nodes, without waiting."""
        for actor in self._remote_monitors.values():
            _end(actor)

    def _update_remote(self, nodes: Mapping[str, Mapping[str, Process]]) -> None:
        """Records answers to earlier queries and sends new ones. Never blocks: each node answers in its own time."""
        # If a node fails to answer within 10 s, its workers' states are forgotten, and a new monitor is started there.
        for node, (ref, names, asked_at) in list(self._pending.items()):
            done, _ = ray.wait([ref], timeout=0, fetch_local=False)
            if not done and time.monotonic() - asked_at < _ANSWER_WITHIN_S:
                continue
            del self._pending[node]
            try:
                self._states |= ray.get(ref, timeout=0)
            except RayError:  # forget what was known of the node's workers, and start a new monitor there
                for name in names:
                    self._states.pop(name, None)
                _end(self._remote_monitors.pop(node, None))
        for node, processes in nodes.items():
            if node not in self._pending:
                self._pending[node] = self._monitor_on(node).states.remote(processes), list(processes), time.monotonic()

    def _monitor_on(self, node: str) -> Any:
        """Returns the NodeMonitor actor on another node, created at its first use."""
        if node not in self._remote_monitors:
            self._num_monitors += 1  # numbered, because Ray frees a dead actor's name only some time later
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            name = f"monitor-{node[:8]}-{self._num_monitors}"
            options = {"num_cpus": 0, "name": name, "scheduling_strategy": strategy, "max_restarts": 0}
            self._remote_monitors[node] = ray.remote(NodeMonitor).options(**options).remote()
        return self._remote_monitors[node]

    def _kill(self, process: Process) -> None:
        """Kills a process on any node; on another node without waiting for it."""
        if process.node_id == this_node():
            process.kill()
        else:
            self._monitor_on(process.node_id).kill.remote(process)

    def _ask(self, method: str, processes: Mapping[str, Process]) -> dict[str, str]:
        """Calls a method of NodeMonitor for processes on any node and waits up to 10 s per node."""
        answers: dict[str, str] = {}
        for node, on_node in _by_node(processes).items():
            try:
                if node == this_node():
                    answers |= getattr(self._local_monitor, method)(on_node)
                else:
                    call = getattr(self._monitor_on(node), method).remote(on_node)
                    answers |= ray.get(call, timeout=_ANSWER_WITHIN_S)
            except (RayError, TimeoutError, OSError) as error:
                log.info("node %s does not report on its workers: %s", node, type(error).__name__)
        return answers


def keep_logs(processes: Iterable[tuple[str, Process]], folder: Path) -> None:
    """Copies what this node's workers wrote to stdout and stderr to `folder`, as `<worker>.out` and `.err`.

    Empty and unreadable files are skipped, and so are those of other nodes, which do not exist here. Ray deletes its
    own copy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, process in processes:
        for path in map(Path, process.logs):
            with suppress(OSError):
                if path.stat().st_size:
                    (folder / f"{name.replace('/', '-')}{path.suffix}").write_bytes(path.read_bytes())


def _end(actor: Any) -> None:
    """Kills an actor; never raises. None is allowed."""
    with suppress(Exception):
        ray.kill(actor)


def _by_node(processes: Mapping[str, Process]) -> dict[str, dict[str, Process]]:
    """Returns the processes grouped by the id of their node, by name within a node."""
    nodes: dict[str, dict[str, Process]] = {}
    for name, process in processes.items():
        nodes.setdefault(process.node_id, {})[name] = process
    return nodes


def _state(process: Process) -> str:
    """Returns psutil's status of a process; `gone` if it has ended, is a zombie, or a later process has its pid."""
    try:
        present = psutil.Process(process.pid)
        status = present.status()
        return GONE if present.create_time() != process.created or status == psutil.STATUS_ZOMBIE else status
    except psutil.NoSuchProcess:
        return GONE


def _size(process: Process) -> int:
    """Returns the size in bytes of the file that a process writes its stderr to; 0 if there is none."""
    with suppress(OSError, IndexError):
        return Path(process.logs[-1]).stat().st_size
    return 0


def _read(path: str, start: int) -> str:
    """Returns the text of a file from byte `start` on; empty if it cannot be read."""
    # A negative `start` counts from the end. Invalid UTF-8 is replaced.
    with suppress(OSError), Path(path).open("rb") as file:
        file.seek(start if start >= 0 else max(0, file.seek(0, os.SEEK_END) + start))
        return file.read().decode("utf-8", "replace")
    return ""


def _tail(process: Process) -> str:
    """Returns the end of a process's stderr, or of its stdout if stderr is empty."""
    for path in reversed(process.logs):
        if lines := [line for line in _read(path, -_TAIL_BYTES).splitlines() if not _NOISE.match(line)]:
            return "\n".join(lines)
    return ""
