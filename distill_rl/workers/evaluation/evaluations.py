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
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.options import Options
from distill_rl.evals.run import Model
from distill_rl.observe.log import say
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup

Result = Mapping[str, Any]
_WEIGHTS = ".weights-"
_POLL_S = 0.25
_FETCH_S = 60.0
"""Deadline to fetch results that exist, if only on another node."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    step: int
    call: dict[ray.ObjectRef, str]
    deadline: float


class Evaluations:
    """Runs the suites of `evaluate.suites`; does nothing if there are none.

    All ranks together export the weights to `evals/.weights-<step>` between two steps. The evaluator works on that
    folder while training continues; the next evaluation waits for it. No random number is drawn and no weight is
    changed, so training does not depend on evaluations. A folder that an earlier start of the run has left is
    evaluated on resume.

    Args:
        group: the one evaluator; None if there are no suites.
        folder: `evals` of the run directory.
        copy: writes the student's weights to a folder; returns the problem if it fails.
        record: receives a step and its metrics.
        stopping: whether the run will stop after this step; then `start` does not wait.
    """

    def __init__(
        self,
        group: WorkerGroup | None,
        config: Config,
        calls: Calls,
        folder: Path,
        *,
        copy: Callable[[Path], str | None],
        record: Callable[[int, Mapping[str, float]], None],
        stopping: Callable[[], bool],
    ):
        self._group, self._config, self._calls, self._folder = group, config, calls, folder
        self._copy, self._record, self._stopping = copy, record, stopping
        self._waiting: deque[int] = deque()
        self._running: _Running | None = None

    def recover(self, step: int) -> None:
        """Takes over from an earlier start of the run, which now resumes from `step`; call it before the first `start`.

        Weights and results of later steps are deleted, because those steps are trained again. Weights that were not
        evaluated are queued, and the first evaluation is started; without suites they are deleted.
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
        self._waiting += sorted(unevaluated)
        self.collect()

    def start(self, step: int) -> None:
        """Copies the current weights and queues their evaluation, then waits until no other one is unfinished.

        Does not wait while the run is stopping. If the copy fails, logs why and returns. Does nothing without suites.
        Collective over the student's ranks, so call it between two steps.
        """
        if self._group is None:
            return
        problem = self._copy(self._weights(step))
        if problem is not None:
            log.warning("no evaluation of step %d, training goes on: %s", step, problem)
            return
        self._waiting.append(step)
        while len(self._waiting) + bool(self._running) > 1 and not self._stopping():
            self.collect(wait_s=_POLL_S)
        self.collect()

    def collect(self, *, wait_s: float = 0.0) -> None:
        """Records the running evaluation if it has ended or is overdue, and then starts the next one in the queue.

        A failure is only logged. Returns at once, or after `wait_s` seconds if the running one has not finished by
        then.
        """
        if self._running:
            overdue = time.monotonic() > self._running.deadline
            if not overdue and not ray.wait(list(self._running.call), timeout=wait_s, fetch_local=False)[0]:
                self._calls.poll()
                return
            self._end(self._running)
        if self._waiting:
            step = self._waiting.popleft()
            model = Model(f"step-{step}", self._weights(step), self._folder / f"step-{step}")
            deadline = time.monotonic() + self._config.evaluate.timeout_s
            self._running = _Running(step, self._submit(model, self._config.evaluate.limit), deadline)

    def wait(self) -> None:
        """Waits for all evaluations that were started."""
        while self._running or self._waiting:
            self.collect(wait_s=_POLL_S)

    def score(self, model: Path, step: int) -> Mapping[str, Result]:
        """Evaluates an exported student on all items, after all earlier evaluations, and waits for the result.

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
        call = self._submit(Model("student", model, self._folder / "student"), limit=None)
        timeout_s = self._config.evaluate.timeout_s
        results = self._calls.gather(call, what="evaluating the export", timeout_s=timeout_s)[0]
        self._record(step, scores(results))
        report("the student", results)
        return results

    def _end(self, running: _Running) -> None:
        """Records and prints the scores of an evaluation that has ended, and deletes its copy of the weights.

        If it failed or is overdue, there are no scores: that is logged, and the evaluator is replaced.
        """
        self._running = None
        try:
            if not ray.wait(list(running.call), timeout=0, fetch_local=False)[0]:
                limit_s = self._config.evaluate.timeout_s
                raise WorkerError("evaluator", f"must be done within evaluate.timeout_s={limit_s:g}", "no answer")
            results = self._calls.gather(running.call, what=f"evaluating step {running.step}", timeout_s=_FETCH_S)[0]
        except DistillError as error:
            log.warning("the evaluation of step %d failed, training goes on: %s", running.step, error)
            self._replace()
        else:
            self._record(running.step, scores(results))
            report(f"step {running.step}", results)
        shutil.rmtree(self._weights(running.step), ignore_errors=True)

    def _submit(self, model: Model, limit: int | None) -> dict[ray.ObjectRef, str]:
        """Calls the evaluator on `model` without waiting. Returns the call, whose result maps suites to results.

        Args:
            limit: most items per suite; None: all items.
        """
        assert self._group is not None
        evaluate = self._config.evaluate
        model = replace(model, folder=model.folder.absolute(), out=model.out and model.out.absolute())
        data = Path(evaluate.data or "").expanduser().absolute()
        suites = [str(Path(name).expanduser().absolute()) if name.endswith(".py") else name for name in evaluate.suites]
        options = Options(
            limit=limit,
            seed=self._config.run.seed,
            replace_others=True,
            backend=evaluate.backend,
            settings=Settings(batch_size=evaluate.batch_size),
        )
        return self._group.submit("evaluate", model, suites, data, options)

    def _replace(self) -> None:
        """Replaces the evaluator, which may be dead or hang, and waits for the new one. A failure is only logged."""
        assert self._group is not None
        try:
            self._group.renew([0], self._config.ray.start_timeout_s)
        except DistillError as error:
            log.warning("%s", error)

    def _weights(self, step: int) -> Path:
        """Where the weights of a step are exported for evaluation."""
        return self._folder / f"{_WEIGHTS}{step}"


def scores(results: Mapping[str, Result]) -> dict[str, float]:
    """Returns the suites' scores as metrics, by `eval/SUITE`."""
    return {f"eval/{suite}": result["score"] for suite, result in results.items()}


def report(what: str, results: Mapping[str, Result]) -> None:
    """Prints one line per suite: score, its interval, and the number of items; `what` names the model."""
    for suite, result in results.items():
        low, high = result["interval"]
        say(f"evaluated {what} on {suite}: {result['score']:.3f} [{low:.3f}, {high:.3f}], {result['num_items']} items")
