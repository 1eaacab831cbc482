"""Models of an offline evaluation in Ray actors: as many copies as there are shards, each on its share of a GPU."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import ray

from distill_rl.config.schema import RayConfig
from distill_rl.errors import ConfigError, DistillError
from distill_rl.evals.backends.base import BackendName, Output, Settings
from distill_rl.evals.executor import Task, chunks
from distill_rl.evals.suites.base import Item
from distill_rl.workers.actors.evaluator import EvalWorker
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup, stop
from distill_rl.workers.cluster.placement import ActorPlacement, PlacementPlan, reserve
from distill_rl.workers.cluster.process_monitor import keep_logs
from distill_rl.workers.cluster.session import ray_session

CALLS_PER_WORKER = 2
"""handed to an actor before the first is done, so that it never waits for the driver"""
_POLL_S = 0.25
_FETCH_S = 60.0
"""for results that are there, if only on another node"""


@dataclass(frozen=True, slots=True)
class Shards:
    """How an evaluation is spread."""

    count: int = 1
    gpus_each: float | None = None
    """GPUs of one actor; None: what there is, shared out evenly, at most one each (with tensor parallelism as many as that)"""
    ray: RayConfig = field(default_factory=RayConfig)
    deadline_s: float = 3600.0
    """in which a model must be loaded, and one call of up to a few batches be done"""


class RayExecutor:
    """Starts (or joins) Ray when the first model is loaded; ends all that it started when the block ends.

    Args:
        started: called as soon as Ray runs: it has put signal handlers of its own in place.
        interrupted: asked while waiting; may raise.
        logs: gets what the actors printed, if one fails.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        started: Callable[[], None] = lambda: None,
        interrupted: Callable[[], None] = lambda: None,
        logs: Path | None = None,
    ):
        self.device = ""
        self._shards, self._started, self._logs = shards, started, logs
        self._calls = Calls(
            interrupted,
            after_death="give the same command again: it goes on where it stopped",
            when_late="raise --deadline, or lower --batch-size",
        )
        self._open = ExitStack()
        self._group: WorkerGroup | None = None
        self._names = [f"evaluator-{rank}" for rank in range(shards.count)]
        self._backend: BackendName = "hf"
        self._batch_size = 1

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._group is not None and kind is None:
            self._calls.interrupted = lambda: None
            stop([self._group])  # an engine ends its own processes
        elif self._group is not None and self._logs is not None and issubclass(kind or Exception, DistillError):
            keep_logs(self._group.processes, self._logs)
        self._open.close()

    def load(self, folder: Path, backend: BackendName, settings: Settings) -> None:
        if self._group is None:
            self._group = self._hire(settings.tensor_parallel)
        self._backend, self._batch_size = backend, settings.batch_size
        started = self._group.submit("load", folder.absolute(), backend, settings)
        self.device = self._calls.gather(started, what=f"loading {folder}", timeout_s=self._shards.deadline_s)[0]

    def run(self, task: Task, items: Sequence[Item]) -> Iterator[list[tuple[int, Output]]]:
        assert self._group is not None
        waiting = deque(chunks(items, task, self._backend, self._batch_size))
        free = deque([rank for _ in range(CALLS_PER_WORKER) for rank in range(self._shards.count)])
        running: dict[ray.ObjectRef, tuple[int, list[int], float]] = {}
        while waiting or running:
            while waiting and free:
                rank, chunk = free.popleft(), waiting.popleft()
                (ref,) = self._group.submit("outputs", task, [items[index] for index in chunk], ranks=[rank])
                running[ref] = (rank, chunk, time.monotonic() + CALLS_PER_WORKER * self._shards.deadline_s)
            done, _ = ray.wait(list(running), timeout=_POLL_S)
            self._calls.interrupted()
            self._require_in_time([call for ref, call in running.items() if ref not in done])
            for ref in done:
                rank, chunk, _ = running.pop(ref)
                outputs = self._calls.gather({ref: self._names[rank]}, what="running the model", timeout_s=_FETCH_S)[0]
                free.append(rank)
                yield [(chunk[index], output) for index, output in outputs]

    def _require_in_time(self, running: Sequence[tuple[int, list[int], float]]) -> None:
        """
        Raises:
            WorkerError: a call is not done by its deadline; one that waited behind another has had that one's time, too.
        """
        late = {self._names[rank] for rank, _, deadline in running if deadline < time.monotonic()}
        if late:
            raise self._calls.late(late, "running the model", CALLS_PER_WORKER * self._shards.deadline_s)

    def _hire(self, tensor_parallel: int) -> WorkerGroup:
        """Actors in placements of their own."""
        settings, count = self._shards.ray, self._shards.count
        self._open.enter_context(ray_session(settings, num_cpus=count, started=self._started))
        gpus = ray.cluster_resources().get("GPU", 0.0)
        each = self._gpus_each(gpus, tensor_parallel)
        names = self._names
        bundle = {"CPU": 1.0} | ({"GPU": each} if each else {})
        placements = {name: ActorPlacement(name, index, 1.0, each) for index, name in enumerate(names)}
        plan = PlacementPlan(tuple(bundle for _ in names), placements)
        timeout_s = settings.placement_timeout_s
        placement = self._open.enter_context(reserve(plan, timeout_s=timeout_s, interrupted=self._calls.interrupted))
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        group = WorkerGroup(EvalWorker, names, plan, placement, self._calls, threads)
        self._open.callback(group.kill)
        group.identify(settings.start_timeout_s)
        return group

    def _gpus_each(self, gpus: float, tensor_parallel: int) -> float:
        """
        Raises:
            ConfigError: tensor parallelism needs GPUs of its own.
        """
        count, asked = self._shards.count, self._shards.gpus_each
        if tensor_parallel > 1:
            if gpus < tensor_parallel * count:
                rule = f"{count} shards x {tensor_parallel} GPUs are asked, the cluster has {gpus:g}"
                raise ConfigError("tensor_parallel", rule, None, "lower --tensor-parallel or --shards")
            return float(tensor_parallel)
        if asked is not None:
            return asked
        return 1 / math.ceil(count / gpus) if gpus else 0.0
