"""Evaluation in Ray actors: offline, one copy of the model per shard; and beside a training run, on a copy of the student's weights."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray

from distill_rl.config.layout import evaluator_ranks
from distill_rl.config.schema import Config, RayConfig
from distill_rl.errors import ConfigError, DistillError, WorkerError
from distill_rl.evals.backends.base import BackendName, Output, Settings
from distill_rl.evals.executor import SuiteTask, chunks
from distill_rl.evals.options import evaluation_options
from distill_rl.evals.results import SampleFile, num_ungraded
from distill_rl.evals.run import Model, progress_file, read_counts
from distill_rl.evals.suites.base import Item
from distill_rl.models.files import resolve
from distill_rl.observe.log import say
from distill_rl.types import RunPaths
from distill_rl.workers.actors.evaluator import Evaluated, EvalWorker
from distill_rl.workers.cluster import placement
from distill_rl.workers.cluster.calls import Calls, Refs
from distill_rl.workers.cluster.group import WorkerGroup, stop
from distill_rl.workers.cluster.placement import EVALUATOR, ActorPlacement, PlacementPlan
from distill_rl.workers.cluster.process_monitor import keep_logs
from distill_rl.workers.cluster.session import capacity, ray_session

log = logging.getLogger(__name__)

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


class _ChunkCall(NamedTuple):
    """A call that has been submitted."""

    copy: int
    chunk: list[int]
    """Indices of its items."""
    calls: Refs
    """The calls of all ranks of the copy; the first one returns the outputs."""
    deadline: float


@dataclass
class RayExecutor:
    """Starts (or joins) Ray when the first model is loaded, and ends everything that it started when the block ends.

    Args:
        started: called as soon as Ray runs, because Ray replaces signal handlers.
        interrupted: called at every poll of a wait; may raise.
        logs: folder for the actors' output if the evaluation fails.
    """

    shards: Shards
    started: Callable[[], None] = lambda: None
    interrupted: Callable[[], None] = lambda: None
    logs: Path | None = None
    device: str = ""

    def __post_init__(self) -> None:
        again = "give the same command again" + (": it goes on where it stopped" if self.logs else "")
        self._calls = Calls(self.interrupted, after_death=again, when_late="raise --deadline, or lower --batch-size")
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
        elif self._group is not None and self.logs is not None and issubclass(kind or Exception, DistillError):
            keep_logs(self._group.processes, self.logs)
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
        self.device = self._calls.gather(started, what=f"loading {folder}", timeout_s=self.shards.deadline_s)[0]

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
        free = deque([copy for _ in range(CALLS_PER_WORKER) for copy in range(self.shards.count)])
        limit_s = CALLS_PER_WORKER * self.shards.deadline_s  # a call may have to wait for those before it
        running: dict[ray.ObjectRef, _ChunkCall] = {}
        """By each of its calls."""
        while waiting or running:
            while waiting and free:
                copy, chunk = free.popleft(), waiting.popleft()
                ranks = range(copy * self._ranks, (copy + 1) * self._ranks)
                calls = self._group.submit("outputs", task, [items[index] for index in chunk], ranks=ranks)
                running |= dict.fromkeys(calls, _ChunkCall(copy, chunk, calls, time.monotonic() + limit_s))
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
        settings, count = self.shards.ray, self.shards.count * self._ranks
        session = ray_session(settings, num_cpus=count, started=self.started)
        self._calls.hosts = hosts = self._open.enter_context(session)
        gpus_each = self._gpus_each(capacity()[0], backend, tensor_parallel) / self._ranks
        copies = (f"{EVALUATOR}-{i}" for i in range(self.shards.count))
        names = [name for copy in copies for name in placement.evaluator_names(copy, self._ranks)]
        bundle = {"CPU": 1.0} | ({"GPU": gpus_each} if gpus_each else {})
        placements = {name: ActorPlacement(i, gpus_each) for i, name in enumerate(names)}
        fixed = PlacementPlan(tuple(bundle for _ in names), placements)
        polled: Any = {"interrupted": self._calls.interrupted, "waiting": placement.tell, "lost": lambda: hosts.lost}
        places = placement.reserve(lambda: fixed, settings, "eval", **polled)
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        reserved = *self._open.enter_context(places), self._calls
        group = WorkerGroup(EvalWorker, names, *reserved, self._ranks, threads, self.shards.deadline_s)
        self._open.callback(group.kill)
        group.identify(settings.start_timeout_s)
        join(group, self._ranks, self._calls, settings.start_timeout_s)
        return group

    def _gpus_each(self, gpus: float, backend: BackendName, tensor_parallel: int) -> float:
        """Returns the number of GPUs per copy, a fraction if copies share one; 0 in a cluster without GPUs."""
        # It is `tensor_parallel` if that exceeds 1, else `Shards.gpus_each` if set, else an even share of one GPU.
        count = self.shards.count
        if tensor_parallel > 1:
            if backend == "hf" and not gpus:
                return 0.0
            if gpus < tensor_parallel * count:
                rule = f"{count} shards x {tensor_parallel} GPUs are asked, the cluster has {gpus:g}"
                raise ConfigError("--tp", rule, None, "lower --tp or --shards")
            return float(tensor_parallel)
        if self.shards.gpus_each is not None:
            return self.shards.gpus_each
        return 1 / math.ceil(count / gpus) if gpus else 0.0


def join(group: WorkerGroup, ranks: int, calls: Calls, timeout_s: float) -> None:
    """Makes every `ranks` consecutive evaluators one process group, and waits for it; does nothing for one rank.

    Raises:
        DistillError: an actor fails, or is not done within `timeout_s` seconds.
    """
    if ranks > 1:
        calls.gather(group.start(size=ranks, timeout_s=timeout_s), what="joining the evaluators", timeout_s=timeout_s)


# Beside training: one evaluation at a time.


Result = Mapping[str, Any]
_WEIGHTS = ".weights-"
_SHOW_S = 10.0
"""Seconds between two lines about a running evaluation."""


@dataclass(frozen=True, slots=True)
class _Due:
    """An evaluation that waits or runs: of the student at a step, or of a teacher."""

    step: int
    teacher: str | None = None

    @property
    def name(self) -> str:
        """Name of the model, and of the folder of its results."""
        return f"step-{self.step}" if self.teacher is None else f"teacher-{self.teacher}"

    @property
    def title(self) -> str:
        """The model, for messages."""
        return f"step {self.step}" if self.teacher is None else f"teacher {self.teacher}"


@dataclass(frozen=True, slots=True)
class _Running:
    due: _Due
    call: Refs
    deadline: float


@dataclass
class Evaluations:
    """Runs the suites of `evaluate.suites`; does nothing if there are none.

    All ranks together export the weights to `evals/.weights-<step>` between two steps. The evaluator works on that
    folder while training continues; the next evaluation waits for it. No random number is drawn and no weight is
    changed, so training does not depend on evaluations. A folder that an earlier start of the run has left is
    evaluated on resume. A teacher is evaluated in its own folder, and `evals/.teacher-<name>` marks that it is due.

    Args:
        group: the evaluator, with a rank per part of the model; None if there are no suites.
        paths: of the run, whose folder `evals` gets the results.
        copy: writes the student's weights to a folder; returns the problem if it fails.
        record: receives a step and its metrics.
        compare: receives them, too, but for scores of the export, which may be of other items.
        stopping: whether the run will stop after this step; then `start` does not wait.
    """

    _group: WorkerGroup | None
    _config: Config
    _calls: Calls
    paths: InitVar[RunPaths]
    copy: Callable[[Path], str | None]
    record: Callable[[int, Mapping[str, float]], None]
    compare: Callable[[int, Mapping[str, float]], None]
    stopping: Callable[[], bool]
    _waiting: deque[_Due] = field(default_factory=deque)
    _running: _Running | None = None
    _shown: float = 0.0
    """When counts were shown last."""

    def __post_init__(self, paths: RunPaths) -> None:
        self._folder, self._samples = paths.evals, SampleFile(paths.samples)
        self._teachers = {teacher.name: teacher for teacher in self._config.running_teachers}

    def abandon(self) -> None:
        """Stops the evaluation that is running, if any; its folder is left for `recover`."""
        if self._running:
            self._running = None
            self._replace()
        self._waiting.clear()

    def recover(self, step: int) -> None:
        """Takes over from an earlier start of the run, which now resumes from `step`; call it before the first `start`.

        Weights, results and samples of later steps are deleted, because those steps are trained again. Weights and
        teachers that were not evaluated are queued, and the first evaluation is started; without suites the weights are
        deleted.
        """
        pattern = re.compile(rf"({re.escape(_WEIGHTS)}|step-)(\d+)")
        unevaluated = []
        for path in self._folder.glob("*"):
            match = pattern.fullmatch(path.name)
            if not match:
                continue
            is_weights, path_step = match[1] == _WEIGHTS, int(match[2])
            if path_step > step or (is_weights and self._group is None):
                shutil.rmtree(path, ignore_errors=True)
            elif is_weights:
                unevaluated.append(path_step)
        self._samples.drop_after(step)
        self._waiting += [_Due(path_step) for path_step in sorted(unevaluated)]
        if self._group is not None:
            self._waiting += [_Due(0, name) for name in self._teachers if self._source(_Due(0, name)).exists()]
        self.collect()

    def start(self, step: int) -> None:
        """Copies the current weights and queues their evaluation, then waits until no other one is unfinished.

        Does not wait while the run is stopping. If the copy fails, logs why and returns. Does nothing without suites.
        Collective over the student's ranks, so call it between two steps.
        """
        if self._group is None:
            return
        due = _Due(step)
        if (problem := self.copy(self._source(due))) is not None:
            log.warning("no evaluation of step %d, training goes on: %s", step, problem)
            return
        self._waiting.append(due)
        while len(self._unfinished) > 1 and not self.stopping():
            self.collect(wait_s=_POLL_S)
        self.collect()

    def start_teachers(self) -> None:
        """Queues an evaluation of every teacher, without waiting. Does nothing without suites."""
        if self._group is None:
            return
        for due in [_Due(0, name) for name in self._teachers]:
            if due not in self._unfinished:  # others are left over from before a restart
                self._source(due).mkdir(parents=True, exist_ok=True)
                self._waiting.append(due)
        self.collect()

    @property
    def unfinished(self) -> frozenset[int]:
        """Steps of the student whose scores are still to come."""
        return frozenset(due.step for due in self._unfinished if due.teacher is None)

    @property
    def _unfinished(self) -> list[_Due]:
        return [*([self._running.due] if self._running else []), *self._waiting]

    def collect(self, *, wait_s: float = 0.0) -> None:
        """Records the running evaluation if it has ended or is overdue, and then starts the next one in the queue.

        A failure is only logged. Returns at once, or after `wait_s` seconds if the running one has not finished by
        then.
        """
        if self._running:
            overdue = time.monotonic() > self._running.deadline
            if not overdue and not ray.wait(list(self._running.call), timeout=wait_s, fetch_local=False)[0]:
                self._show_counts(self._running.due.title, self._folder / self._running.due.name)
                self._calls.poll()
                return
            self._end(self._running)
        if self._waiting:
            due = self._waiting[0]
            folder = self._source(due)
            if due.teacher is not None:
                teacher = self._teachers[due.teacher]
                folder = resolve(teacher.model, teacher.revision, weights=True)
            model = Model(due.name, folder, self._folder / due.name)
            self._running = _Running(due, self._submit(model), time.monotonic() + self._config.evaluate.timeout_s)
            self._waiting.popleft()  # only now, so that it is `unfinished` at every moment

    def wait(self) -> None:
        """Waits for all evaluations that were started."""
        while self._unfinished:
            self.collect(wait_s=_POLL_S)

    def score(self, model: Path, step: int) -> Mapping[str, Result]:
        """Evaluates an exported student, after all earlier evaluations, and waits for the result.

        Records the scores under `step`, prints them, and writes the results to `evals/student`.

        Args:
            model: its folder.

        Returns:
            The result of each suite; empty without suites.

        Raises:
            DistillError: the evaluation failed or took longer than `evaluate.timeout_s`.
        """
        if self._group is None:
            return {}
        self.wait()
        out = self._folder / "student"
        evaluated: Evaluated = self._calls.gather(
            self._submit(Model("student", model, out), final=True),
            what="evaluating the export",
            timeout_s=self._config.evaluate.timeout_s,
            meanwhile=lambda: self._show_counts("the student", out),
        )[0]
        self.record(step, scores(evaluated.results))
        self._samples.add(step, evaluated.samples)
        report("the student", evaluated.results)
        return evaluated.results

    def _end(self, running: _Running) -> None:
        """Records and prints the scores of an evaluation that has ended, and deletes its copy of the weights."""
        # If it failed or is overdue, there are no scores: that is logged, and the evaluator is replaced.
        due = running.due
        try:
            if not ray.wait(list(running.call), timeout=0, fetch_local=False)[0]:
                limit_s = self._config.evaluate.timeout_s
                raise WorkerError("evaluator", f"must be done within evaluate.timeout_s={limit_s:g}", "no answer")
            what = f"evaluating {due.title}"
            evaluated: Evaluated = self._calls.gather(running.call, what=what, timeout_s=_FETCH_S)[0]
        except DistillError as error:
            log.warning("the evaluation of %s failed, training goes on: %s", due.title, error)
            self._running = None
            self._replace()
        else:
            if due.teacher is None:
                self.record(due.step, scores(evaluated.results))
                self.compare(due.step, scores(evaluated.results))
            self._samples.add(due.step, evaluated.samples, teacher=due.teacher)
            report(due.title, evaluated.results)
            self._running = None
        shutil.rmtree(self._source(due), ignore_errors=True)

    def _show_counts(self, title: str, folder: Path) -> None:
        """Prints how many items are done, at most once per `_SHOW_S` seconds."""
        now = time.monotonic()
        if now - self._shown >= _SHOW_S and (counts := read_counts(progress_file(folder))) is not None:
            self._shown = now
            say(f"evaluating {title} on {counts}")

    def _submit(self, model: Model, *, final: bool = False) -> Refs:
        """Calls the evaluator on `model` without waiting."""
        # Returns the calls of its ranks, whose first result is an `Evaluated`.
        assert self._group is not None
        evaluate = self._config.evaluate
        model = replace(model, folder=model.folder.absolute(), out=model.out and model.out.absolute())
        data = Path(evaluate.data or "").expanduser().absolute()
        suites = [str(Path(name).expanduser().absolute()) if name.endswith(".py") else name for name in evaluate.suites]
        options = evaluation_options(self._config, final=final)
        calls = self._group.submit("evaluate", model, suites, data, options, evaluate.samples, ranks=[0])
        return calls | self._group.submit("follow", ranks=range(1, len(self._group.actors)))

    def _replace(self) -> None:
        """Replaces the evaluator, all ranks of it, which may be dead or hang, and waits for the new one."""
        # A failure is only logged.
        assert self._group is not None
        ranks, timeout_s = range(len(self._group.actors)), self._config.ray.start_timeout_s
        try:
            self._group.renew(ranks, timeout_s)
            join(self._group, len(ranks), self._calls, timeout_s)
        except DistillError as error:
            log.warning("%s", error)

    def _source(self, due: _Due) -> Path:
        """What says that an evaluation is due: the exported weights of a step, or the mark of a teacher."""
        return self._folder / (f"{_WEIGHTS}{due.step}" if due.teacher is None else f".teacher-{due.teacher}")


def scores(results: Mapping[str, Result]) -> dict[str, float]:
    """Returns the suites' scores as metrics, by `eval/SUITE`."""
    return {f"eval/{suite}": result["score"] for suite, result in results.items()}


def report(what: str, results: Mapping[str, Result]) -> None:
    """Prints one line per suite: score, its interval, the items, how many of them have no grade, and their rate; `what`
    names the model."""
    for suite, result in results.items():
        low, high = result["interval"]
        score, items = f"{result['score']:.3f} [{low:.3f}, {high:.3f}]", f"{result['num_items']:,} items"
        if ungraded := num_ungraded(result.get("outcomes", {})):
            items += f" ({ungraded:,} not graded)"
        rate = f"{(result['num_items'] - result['resumed_items']) / max(result['seconds'], 1e-9):,.1f} items/s"
        say(f"evaluated {what} on {suite}: {score}, {items}, {rate}")
