"""Who of the workers lives, stands still or is waited for: what a deadline alone would tell too late, or not at all.

A process that was stopped (SIGSTOP) answers nobody and dies of nothing, so everyone who waits for it waits for ever: the
watch sees it and kills it, and it is from then on what others know how to deal with, a dead worker.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distill_rl.config.schema import FaultsConfig
from distill_rl.observe.log import printable
from distill_rl.workers.actors.rank import Process

GONE = "gone"
_LOOK_EVERY_S = 1.0
_LOST_SIGHT_S = 10.0
"""after so long without a look this process was stopped itself, and what it saw before counts for nothing"""
_STACKS_WITHIN_S = 3.0
_ANSWER_WITHIN_S = 10.0
_TAIL_BYTES = 16384
_NOISE = re.compile(r"^(:\w+:.*|\s*)$")
"""lines by which Ray marks a log as an actor's"""

log = logging.getLogger(__name__)


class NodeMonitor:
    """Eyes and hands on one node: an object in the driver for its own, an actor on every other."""

    def states(self, processes: Sequence[Process]) -> list[str]:
        """psutil's word for each (`running`, `sleeping`, `stopped`, …), or `gone`."""
        return [_state(process) for process in processes]

    def kill(self, process: Process) -> None:
        process.kill()

    def stacks(self, processes: Sequence[Process]) -> list[str]:
        """What each was doing, thread by thread; empty for one that cannot tell."""
        starts = [_size(process) for process in processes]
        asked = []
        for process in processes:
            able = bool(process.logs) and _state(process) not in (GONE, psutil.STATUS_STOPPED)
            asked.append(able)
            if able:
                with suppress(OSError):
                    os.kill(process.pid, signal.SIGUSR2)
        deadline, seen = time.monotonic() + _STACKS_WITHIN_S, list(starts)
        while time.monotonic() < deadline:
            time.sleep(0.1)  # the time that writing a stack takes; grown and not growing any more is done
            sizes = [_size(process) for process in processes]
            if sizes == seen and all(size > start for size, start, able in zip(sizes, starts, asked) if able):
                break
            seen = sizes
        return [_read(process, start) if able else "" for process, start, able in zip(processes, starts, asked)]

    def tails(self, processes: Sequence[Process]) -> list[str]:
        """The end of what each wrote to stderr, or to stdout where that is nothing."""
        return [next((text for path in reversed(process.logs) if (text := _tail(path))), "") for process in processes]


class _Question(NamedTuple):
    """What a node was asked and has not answered."""

    answer: ray.ObjectRef
    names: list[str]
    asked: float


class ProcessMonitor:
    """The driver's view of all nodes.

    Args:
        processes: of the workers, by name; read at every look.
        folder: gets `stacks/<worker>.txt`.
    """

    def __init__(self, config: FaultsConfig, processes: Mapping[str, Process], folder: Path):
        self._config, self._processes, self._folder = config, processes, folder
        self._here = NodeMonitor()
        self._there: dict[str, Any] = {}
        self._sent = 0
        self._asked: dict[str, _Question] = {}
        self._states: dict[str, str] = {}
        self._stopped_since: dict[Process, float] = {}
        self._looked = 0.0
        self._fates: dict[Process, str] = {}

    def look(self) -> None:
        """Takes note of what every worker's process is doing, at most once a second; kills those that stand still."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return
        if now - self._looked > _LOST_SIGHT_S:
            self._stopped_since.clear()
        self._looked = now
        processes = dict(self._processes)
        elsewhere = _by_node(processes)
        own = elsewhere.pop(_this_node(), {})
        self._states.update(zip(own, self._here.states(list(own.values()))))
        self._look_elsewhere(elsewhere)
        for name, process in processes.items():
            if self._states.get(name) != psutil.STATUS_STOPPED:
                self._stopped_since.pop(process, None)
            elif now - self._stopped_since.setdefault(process, now) >= self._config.stopped_s:
                self._fates[process] = f"it was stopped (SIGSTOP) for {self._config.stopped_s:g} s, and killed"
                log.warning("%s: %s", self.where(name), self._fates[process])
                self._kill(process)

    def report(self, names: Collection[str], what: str, seconds: float, limit_s: float) -> None:
        """Says who is waited for, and what each is doing."""
        known = {name: self._states.get(name, "state unknown") for name in sorted(names)}
        each = ", ".join(f"{self.where(name)} is {state}" for name, state in known.items())
        log.warning("waiting %.0f s for %s: %s; the limit is %g s", seconds, what, each, limit_s)

    def where(self, name: str) -> str:
        """A worker and its node, for messages."""
        process = self._processes.get(name)
        return f"{name} on {process.host}" if process and process.host else name

    def fate(self, name: str) -> str:
        """Why the watch killed a worker; empty if it did not."""
        process = self._processes.get(name)
        return self._fates.get(process, "") if process else ""

    def last_words(self, name: str, lines: int = 3) -> str:
        """The last lines that a worker printed, on one line."""
        process = self._processes.get(name)
        text = self._ask("tails", {name: process}).get(name, "") if process else ""
        kept = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
        return " | ".join(printable(line)[:200] for line in kept[-lines:])

    def dump_stacks(self) -> None:
        """Has every worker that can write its stacks, and keeps them in `stacks/`."""
        processes = dict(self._processes)
        for name, text in self._ask("stacks", processes).items():
            if text:
                path = self._folder / "stacks" / f"{name.replace('/', '-')}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
        if processes:
            log.info("stacks of the workers are in %s", self._folder / "stacks")

    def close(self) -> None:
        for actor in self._there.values():
            _end(actor)

    def _look_elsewhere(self, nodes: Mapping[str, Mapping[str, Process]]) -> None:
        """Never waits: takes the answers of an earlier look, and asks again, each node for itself."""
        for node, (ref, names, asked) in list(self._asked.items()):
            done, _ = ray.wait([ref], timeout=0, fetch_local=False)
            if not done and time.monotonic() - asked < _ANSWER_WITHIN_S:
                continue
            del self._asked[node]
            try:
                self._states.update(zip(names, ray.get(ref, timeout=0)))
            except RayError:  # what was seen there before says nothing of now, and another watch is sent
                for name in names:
                    self._states.pop(name, None)
                _end(self._there.pop(node, None))
        for node, processes in nodes.items():
            if node not in self._asked:
                ref = self._on(node).states.remote(list(processes.values()))
                self._asked[node] = _Question(ref, list(processes), time.monotonic())

    def _on(self, node: str) -> Any:
        if node not in self._there:
            self._sent += 1  # a name is free again only some time after its actor's death
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            name = f"watch-{node[:8]}-{self._sent}"
            options = {"num_cpus": 0, "name": name, "scheduling_strategy": strategy, "max_restarts": 0}
            self._there[node] = ray.remote(NodeMonitor).options(**options).remote()
        return self._there[node]

    def _kill(self, process: Process) -> None:
        if process.node_id == _this_node():
            process.kill()
        else:
            self._on(process.node_id).kill.remote(process)

    def _ask(self, method: str, processes: Mapping[str, Process]) -> dict[str, str]:
        """A method's answers for processes on any node, by name; none of a node that does not answer."""
        here = _this_node()
        answers: dict[str, str] = {}
        for node, asked in _by_node(processes).items():
            chosen = list(asked.values())
            try:
                if node == here:
                    found = getattr(self._here, method)(chosen)
                else:
                    found = ray.get(getattr(self._on(node), method).remote(chosen), timeout=_ANSWER_WITHIN_S)
            except (RayError, TimeoutError, OSError) as error:
                log.info("node %s does not tell of its workers: %s", node, type(error).__name__)
            else:
                answers.update(zip(asked, found))
        return answers


def keep_logs(processes: Iterable[tuple[str, Process]], folder: Path) -> None:
    """Copies what the workers of this node printed into the run's logs, by name; Ray's own copy goes with its session."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, process in processes:
        for path in map(Path, process.logs):
            with suppress(OSError):
                if path.stat().st_size:
                    (folder / f"{name.replace('/', '-')}{path.suffix}").write_bytes(path.read_bytes())


def _end(actor: Any) -> None:
    with suppress(Exception):
        ray.kill(actor)


def _this_node() -> str:
    return ray.get_runtime_context().get_node_id()


def _by_node(processes: Mapping[str, Process]) -> dict[str, dict[str, Process]]:
    nodes: dict[str, dict[str, Process]] = {}
    for name, process in processes.items():
        nodes.setdefault(process.node_id, {})[name] = process
    return nodes


def _state(process: Process) -> str:
    try:
        found = psutil.Process(process.pid)
        status = found.status()
        return GONE if found.create_time() != process.created or status == psutil.STATUS_ZOMBIE else status
    except psutil.NoSuchProcess:
        return GONE


def _size(process: Process) -> int:
    with suppress(OSError, IndexError):
        return Path(process.logs[-1]).stat().st_size
    return 0


def _read(process: Process, start: int) -> str:
    with suppress(OSError), Path(process.logs[-1]).open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", "replace")
    return ""


def _tail(path: str) -> str:
    with suppress(OSError), Path(path).open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
        return "\n".join(line for line in text.splitlines() if not _NOISE.match(line))
    return ""
