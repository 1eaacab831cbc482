"""Evaluates a student while it is trained: on a copy of its weights, one evaluation at a time."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from distill_rl.config.schema import Config
from distill_rl.errors import DistillError, WorkerError
from distill_rl.evals.options import evaluation_options
from distill_rl.evals.results import SampleFile, num_ungraded
from distill_rl.evals.run import Model, progress_file, read_counts
from distill_rl.models.files import resolve
from distill_rl.observe.log import say
from distill_rl.types import RunPaths
from distill_rl.workers.actors.evaluator import Evaluated
from distill_rl.workers.cluster.calls import Calls, Refs
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.evaluation.executor import join

Result = Mapping[str, Any]
_WEIGHTS = ".weights-"
_POLL_S = 0.25
_SHOW_S = 10.0
"""Seconds between two lines about a running evaluation."""
_FETCH_S = 60.0
"""Deadline to fetch results that exist, if only on another node."""

log = logging.getLogger(__name__)


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

    def __init__(
        self,
        group: WorkerGroup | None,
        config: Config,
        calls: Calls,
        paths: RunPaths,
        *,
        copy: Callable[[Path], str | None],
        record: Callable[[int, Mapping[str, float]], None],
        compare: Callable[[int, Mapping[str, float]], None],
        stopping: Callable[[], bool],
    ):
        self._group, self._config, self._calls, self._folder = group, config, calls, paths.evals
        self._copy, self._record, self._compare, self._stopping = copy, record, compare, stopping
        self._samples = SampleFile(paths.samples)
        self._teachers = {teacher.name: teacher for teacher in config.running_teachers}
        self._waiting: deque[_Due] = deque()
        self._running: _Running | None = None
        self._shown = 0.0
        """When counts were shown last."""

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
        self._waiting += [_Due(unevaluated_step) for unevaluated_step in sorted(unevaluated)]
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
        problem = self._copy(self._source(due))
        if problem is not None:
            log.warning("no evaluation of step %d, training goes on: %s", step, problem)
            return
        self._waiting.append(due)
        while len(self._waiting) + bool(self._running) > 1 and not self._stopping():
            self.collect(wait_s=_POLL_S)
        self.collect()

    def start_teachers(self) -> None:
        """Queues an evaluation of every teacher, without waiting. Does nothing without suites."""
        if self._group is None:
            return
        known = {*self._waiting, self._running.due if self._running else None}
        for due in (_Due(0, name) for name in self._teachers):
            if due in known:  # left over from before a restart
                continue
            self._source(due).mkdir(parents=True, exist_ok=True)
            self._waiting.append(due)
        self.collect()

    @property
    def unfinished(self) -> frozenset[int]:
        """Steps of the student whose scores are still to come."""
        running = [self._running.due] if self._running else []
        return frozenset(due.step for due in [*running, *self._waiting] if due.teacher is None)

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
            model = Model(due.name, self._model(due), self._folder / due.name)
            deadline = time.monotonic() + self._config.evaluate.timeout_s
            self._running = _Running(due, self._submit(model), deadline)
            self._waiting.popleft()  # only now, so that it is `unfinished` at every moment

    def wait(self) -> None:
        """Waits for all evaluations that were started."""
        while self._running or self._waiting:
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
        self._record(step, scores(evaluated.results))
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
            evaluated: Evaluated = self._calls.gather(running.call, what=f"evaluating {due.title}", timeout_s=_FETCH_S)[
                0
            ]
        except DistillError as error:
            log.warning("the evaluation of %s failed, training goes on: %s", due.title, error)
            self._running = None
            self._replace()
        else:
            if due.teacher is None:
                self._record(due.step, scores(evaluated.results))
                self._compare(due.step, scores(evaluated.results))
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

    def _model(self, due: _Due) -> Path:
        """The folder of the model that is evaluated."""
        if due.teacher is None:
            return self._source(due)
        teacher = self._teachers[due.teacher]
        return resolve(teacher.model, teacher.revision, weights=True)


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
