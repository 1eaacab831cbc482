"""Offline evaluation in Ray actors: one copy of the model per shard, on a share of a GPU or split over several."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import ray

from distill_rl.config.layout import evaluator_ranks
from distill_rl.config.schema import RayConfig
from distill_rl.errors import ConfigError, DistillError
from distill_rl.evals.backends.base import BackendName, Output, Settings
from distill_rl.evals.executor import SuiteTask, chunks
from distill_rl.evals.suites.base import Item
from distill_rl.workers.actors.evaluator import EvalWorker
from distill_rl.workers.cluster.calls import Calls, Refs
from distill_rl.workers.cluster.group import WorkerGroup, stop
from distill_rl.workers.cluster.places.placement import (
    EVALUATOR,
    ActorPlacement,
    PlacementPlan,
    evaluator_names,
)
from distill_rl.workers.cluster.places.reservation import reserve, tell
from distill_rl.workers.cluster.process_monitor import keep_logs
from distill_rl.workers.cluster.session import ray_session

CALLS_PER_WORKER = 2
"""Calls submitted to an actor at a time, so that it always has one in its queue and never waits for the driver."""
_POLL_S = 0.25
_FETCH_S = 60.0
"""Deadline to fetch results that exist, if only on another node."""


@dataclass(frozen=True, slots=True)
class Shards:
    """How an evaluation is distributed."""

    count: int = 1
    gpus_each: float | None = None
    """GPUs per copy. None: divided evenly, at most one each; with tensor parallelism, as many as that needs."""
    ray: RayConfig = field(default_factory=RayConfig)
    deadline_s: float = 3600.0
    """For loading a model, and for one call of up to a few batches."""


class _Running(NamedTuple):
    """A call that has been submitted."""

    copy: int
    chunk: list[int]
    """Indices of its items."""
    calls: Refs
    """The calls of all ranks of the copy; the first one returns the outputs."""
    deadline: float


class RayExecutor:
    """Starts (or joins) Ray when the first model is loaded, and ends everything that it started when the block ends.

    Args:
        started: called as soon as Ray runs, because Ray replaces signal handlers.
        interrupted: called at every poll of a wait; may raise.
        logs: folder for the actors' output if the evaluation fails.
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
            after_death="give the same command again" + (": it goes on where it stopped" if logs else ""),
            when_late="raise --deadline, or lower --batch-size",
        )
        self._open = ExitStack()
        self._group: WorkerGroup | None = None
        self._ranks = 1
        """Actors of one copy."""
        self._backend: BackendName = "hf"
        self._batch_size = 1

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """Ends the actors and Ray, in an orderly way if the block succeeded.

        After a DistillError the actors' output is kept in `logs`.
        """
        if self._group is not None and kind is None:
            self._calls.interrupted = lambda: None
            stop([self._group])  # gives an engine the chance to end its processes
        elif self._group is not None and self._logs is not None and issubclass(kind or Exception, DistillError):
            keep_logs(self._group.processes, self._logs)
        self._open.close()

    def load(self, folder: Path, backend: BackendName, settings: Settings) -> None:
        """Makes every actor load the model in `folder`, in place of an earlier one, and waits for it. Sets `device`.

        The first call starts (or joins) Ray and the actors.

        Raises:
            ConfigError: Ray or the resources are not available.
            DistillError: an actor failed, or took longer than `Shards.deadline_s` to load the model.
        """
        if self._group is None:
            self._group = self._start_actors(backend, settings.tensor_parallel)
        self._backend, self._batch_size = backend, settings.batch_size
        started = self._group.submit("load", folder.absolute(), backend, settings)
        self.device = self._calls.gather(started, what=f"loading {folder}", timeout_s=self._shards.deadline_s)[0]

    def run(self, task: SuiteTask, items: Sequence[Item]) -> Iterator[list[tuple[int, Output]]]:
        """Distributes the items over the actors in chunks, and yields each chunk's outputs as it finishes.

        They are pairs (index into `items`, output).

        The order of the chunks is not that of the items. A model must have been loaded.

        Raises:
            Overdue: a call is not done within twice `Shards.deadline_s`, because one before it may be queued.
            DistillError: an actor failed or died.
        """
        assert self._group is not None
        waiting = deque(chunks(items, task, self._backend, self._batch_size))
        # Every copy once per call that it may have queued: taken when a call is submitted, returned when it is done.
        free = deque([copy for _ in range(CALLS_PER_WORKER) for copy in range(self._shards.count)])
        limit_s = CALLS_PER_WORKER * self._shards.deadline_s  # a call may have to wait for those before it
        running: dict[ray.ObjectRef, _Running] = {}
        """By each of its calls."""
        while waiting or running:
            while waiting and free:
                copy, chunk = free.popleft(), waiting.popleft()
                ranks = range(copy * self._ranks, (copy + 1) * self._ranks)
                calls = self._group.submit("outputs", task, [items[index] for index in chunk], ranks=ranks)
                running |= dict.fromkeys(calls, _Running(copy, chunk, calls, time.monotonic() + limit_s))
            done, pending = ray.wait(list(running), timeout=_POLL_S)
            self._calls.interrupted()
            now = time.monotonic()
            if late := {running[ref].calls[ref] for ref in pending if running[ref].deadline < now}:
                raise self._calls.late(late, "running the model", limit_s)
            for ref in done:
                copy, chunk, calls, _ = running[ref]
                # The ranks of a copy end together. If one has failed, the others may wait for it.
                outputs = self._calls.gather(calls, what="running the model", timeout_s=_FETCH_S)[0]
                for call in calls:
                    del running[call]
                free.append(copy)
                yield [(chunk[index], output) for index, output in outputs]

    def _start_actors(self, backend: BackendName, tensor_parallel: int) -> WorkerGroup:
        """Starts (or joins) Ray and the actors of every shard, on reserved resources, and waits until they run."""
        # A shard is one actor, or with tensor parallelism of hf one per rank, which then have joined their process group. All of it ends
        # when the executor's block ends.
        self._ranks = evaluator_ranks(backend, tensor_parallel)
        settings, count = self._shards.ray, self._shards.count * self._ranks
        self._calls.hosts = hosts = self._open.enter_context(
            ray_session(settings, num_cpus=count, started=self._started)
        )
        gpus = ray.cluster_resources().get("GPU", 0.0)
        gpus_each = self._gpus_each(gpus, backend, tensor_parallel) / self._ranks
        names = [name for i in range(self._shards.count) for name in evaluator_names(f"{EVALUATOR}-{i}", self._ranks)]
        bundle = {"CPU": 1.0} | ({"GPU": gpus_each} if gpus_each else {})
        placements = {name: ActorPlacement(i, gpus_each) for i, name in enumerate(names)}
        fixed = PlacementPlan(tuple(bundle for _ in names), placements)
        plan, placement = self._open.enter_context(
            reserve(
                lambda: fixed,
                settings,
                "eval",
                interrupted=self._calls.interrupted,
                waiting=tell,
                lost=lambda: hosts.lost,
            )
        )
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        arguments = (self._ranks, threads, self._shards.deadline_s)
        group = WorkerGroup(EvalWorker, names, plan, placement, self._calls, *arguments)
        self._open.callback(group.kill)
        group.identify(settings.start_timeout_s)
        join(group, self._ranks, self._calls, settings.start_timeout_s)
        return group

    def _gpus_each(self, gpus: float, backend: BackendName, tensor_parallel: int) -> float:
        """Returns the number of GPUs per copy, a fraction if copies share one; 0 in a cluster without GPUs."""
        # It is `tensor_parallel` if that exceeds 1, else `Shards.gpus_each` if set, else an even share of one GPU.
        count = self._shards.count
        if tensor_parallel > 1:
            if backend == "hf" and not gpus:
                return 0.0
            if gpus < tensor_parallel * count:
                rule = f"{count} shards x {tensor_parallel} GPUs are asked, the cluster has {gpus:g}"
                raise ConfigError("--tp", rule, None, "lower --tp or --shards")
            return float(tensor_parallel)
        if self._shards.gpus_each is not None:
            return self._shards.gpus_each
        return 1 / math.ceil(count / gpus) if gpus else 0.0


def join(group: WorkerGroup, ranks: int, calls: Calls, timeout_s: float) -> None:
    """Makes every `ranks` consecutive evaluators one process group, and waits for it; does nothing for one rank.

    Raises:
        DistillError: an actor fails, or is not done within `timeout_s` seconds.
    """
    if ranks > 1:
        calls.gather(group.start(size=ranks, timeout_s=timeout_s), what="joining the evaluators", timeout_s=timeout_s)
