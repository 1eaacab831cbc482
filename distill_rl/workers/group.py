"""A group of ranks of one role: made together, started together, called together, ended together."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from distill_rl.errors import DistillError
from distill_rl.workers.calls import Calls
from distill_rl.workers.placement import SeatingPlan, options
from distill_rl.workers.rank import Process

_STOP_TIMEOUT_S = 15.0

log = logging.getLogger(__name__)


class WorkerGroup:
    """`dp × tp` actors of one class, in rank order: rank = dp_rank · tp + tp_rank."""

    def __init__(
        self,
        worker: type,
        names: Sequence[str],
        plan: SeatingPlan,
        placement: PlacementGroup,
        calls: Calls,
        *arguments: Any,
    ):
        self._remote: Any = ray.remote(worker)
        self._plan, self._placement, self._arguments = plan, placement, arguments
        self.names = list(names)
        self._calls = calls
        self._processes: list[Process] = []
        self._replacements = 0
        self.actors: list[Any] = [self._make(rank) for rank in range(len(self.names))]

    def _make(self, rank: int, suffix: str = "") -> Any:
        name = self.names[rank]
        placed = options(self._plan.seats[name], self._placement)
        actor = self._remote.options(**{**placed, "name": name + suffix}).remote(rank, *self._arguments)
        self._calls.know(name, actor)
        return actor

    def submit(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> dict[ray.ObjectRef, str]:
        """Calls a method with the same arguments on all ranks (or these); references with actor names, in rank order."""
        return {
            getattr(self.actors[rank], method).remote(*arguments): self.names[rank]
            for rank in (range(len(self.actors)) if ranks is None else ranks)
        }

    def call(self, method: str, *arguments: Any, what: str, timeout_s: float) -> list[Any]:
        """Calls a method on all ranks and waits for all."""
        return self._calls.gather(self.submit(method, *arguments), what=what, timeout_s=timeout_s)

    def identify(self, timeout_s: float) -> None:
        """Learns the ranks' processes, so that `kill` can end a stopped one."""
        self._processes = self.call("identify", what=f"starting {self.names[0]} and its peers", timeout_s=timeout_s)

    def replace(self, rank: int, timeout_s: float) -> None:
        """Ends one rank and starts another in its seat, which has run `start`. For ranks without a process group.

        What was submitted to the old one and is not done fails.
        """
        self._calls.forget(self.actors[rank])
        self._end(rank)
        self._replacements += 1
        # Ray frees a dead actor's name some time later.
        self.actors[rank] = self._make(rank, suffix=f".{self._replacements}")
        what = f"starting {self.names[rank]} again"
        self._processes[rank] = self._calls.gather(
            self.submit("identify", ranks=[rank]), what=what, timeout_s=timeout_s
        )[0]
        self._calls.gather(self.submit("start", ranks=[rank]), what=what, timeout_s=timeout_s)

    @property
    def pids(self) -> dict[int, str]:
        """Process id → actor name."""
        return {process.pid: name for process, name in zip(self._processes, self.names)}

    @property
    def worker_ids(self) -> dict[str, str]:
        """Ray's worker id → actor name."""
        return {process.worker_id: name for process, name in zip(self._processes, self.names)}

    def rendezvous(self, *, dp: int, tp: int, replicas: bool, timeout_s: float) -> list[tuple[str, int]]:
        """A store for each process group: one of all ranks, or one per data-parallel replica. One address per rank."""
        size = tp if replicas else dp * tp
        leaders = range(0, dp * tp, size)
        calls: dict[ray.ObjectRef, str] = {}
        for leader in leaders:
            calls |= self.submit("serve_store", size, ranks=[leader])
        addresses = self._calls.gather(calls, what="rendezvous", timeout_s=timeout_s)
        return [address for address in addresses for _ in range(size)]

    def kill(self) -> None:
        """Ends every rank at once."""
        for rank in range(len(self.actors)):
            self._end(rank)

    def _end(self, rank: int) -> None:
        """SIGKILL by pid where the process is on this node: ray.kill alone waits 5 s for a stopped one."""
        with contextlib.suppress(Exception):  # what cannot be ended here Ray ends below
            process = self._processes[rank]
            if process.node_id == ray.get_runtime_context().get_node_id():
                process.kill()
        with contextlib.suppress(Exception):
            ray.kill(self.actors[rank], no_restart=True)


def stop(groups: Sequence[WorkerGroup]) -> None:
    """Lets workers end in order what they hold, process groups first of all; one that will not is killed by the caller."""
    for group in groups:
        try:
            group.call("stop", what="stopping", timeout_s=_STOP_TIMEOUT_S)
        except DistillError as error:
            log.info("%s", error)


def keep_logs(ray_logs: Path | None, groups: Sequence[WorkerGroup], folder: Path) -> None:
    """Copies what the workers printed into the run's logs, by actor; Ray's own copy goes away with the session."""
    folder.mkdir(parents=True, exist_ok=True)
    for pid, name in (entry for group in groups for entry in group.pids.items()):
        for file in ray_logs.glob(f"worker-*-{pid}.*") if ray_logs else ():
            if file.stat().st_size:
                shutil.copyfile(file, folder / f"{name.replace('/', '-')}{file.suffix}")
