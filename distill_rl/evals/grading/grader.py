"""Judging completions in child processes: what a model wrote is hostile.

One thread per child hands it one completion at a time. A child that computes for too long, sleeps, crashes or takes too
much memory costs that one item; the thread ends it and starts another. Nothing is judged twice.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Literal

from distill_rl.errors import WorkerError
from distill_rl.evals.grading.child import GONE_S, Child, ChildEnded, ChildTimeout
from distill_rl.evals.suites.base import Item, Verdict

START_S = 120.0
"""for a child to start and load a suite, whatever else the machine does"""
STARTS = 3
"""children that may end before they begin with an item, until that is no accident"""
CLOCK = 4
"""times the deadline, by the clock: for a judge that waits instead of computing, or a machine that is busy"""


@dataclass(frozen=True, slots=True)
class Graded:
    """What became of one item; `verdict` is there when it was judged."""

    outcome: Literal["judged", "grader_timeout", "grader_failed"]
    verdict: Verdict | None = None
    detail: str = ""
    """one line: why there is no verdict"""


@dataclass(frozen=True, slots=True)
class _Task:
    suite: str
    item: Item
    completion: str
    future: Future[Graded]


class Grader:
    """A pool of children; a context manager, or call `close`. Any thread may submit.

    Args:
        workers: children; where it is None one per processor that this process may use, and 8 at most.
        deadline_s: seconds of processor time for one item, so that a busy machine changes no outcome; `CLOCK` times as
            many by the clock.
        memory_bytes: address space that a child may take beyond what it has once its suite is loaded.
    """

    def __init__(self, workers: int | None = None, deadline_s: float = 15.0, memory_bytes: int = 2 << 30):
        if workers is None:
            workers = min(8, len(os.sched_getaffinity(0)))
        self.deadline_s, self.memory_bytes = deadline_s, memory_bytes
        self.longest_s = 2 * STARTS * START_S + CLOCK * deadline_s + (STARTS + 1) * GONE_S
        """seconds by the clock after which an item that a child has been given has an outcome, come what may"""
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._children: set[Child] = set()
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, name=f"grader-{n}", daemon=True) for n in range(workers)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, suite: str, item: Item, completion: str) -> Future[Graded]:
        """Has a completion judged by the suite that `registry.find` gives for this name or path.

        The future raises `WorkerError` where children do not start or cannot load the suite, and `CancelledError` where
        the pool was closed before.
        """
        future: Future[Graded] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader is closed")
            self._tasks.put(_Task(suite, item, completion, future))
        return future

    def close(self) -> None:
        """Ends the children at once; what has not been judged is cancelled. Again: nothing.

        A child that cannot be killed is waited for `2 * GONE_S` seconds, then left behind.
        """
        until = time.monotonic() + 2 * GONE_S
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return
        for child in tuple(self._children):
            self._end(child)

    def _serve(self) -> None:
        """Waits for tasks, and for the child, which is killed by whoever closes the pool."""
        child: Child | None = None
        while (task := self._tasks.get()) is not None:
            if self._closed:
                task.future.cancel()
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                graded, child = self._graded(task, child)
            except BaseException as error:
                self._end(child)
                child = None
                task.future.set_exception(CancelledError() if self._closed else error)
            else:
                task.future.set_result(graded)
        self._end(child)

    def _graded(self, task: _Task, child: Child | None) -> tuple[Graded, Child | None]:
        """The outcome, and the child for the next item, if it can go on."""
        child = self._begun(task, child)
        try:
            reply = child.read(CLOCK * self.deadline_s)
        except ChildTimeout:
            self._end(child)
            return Graded("grader_timeout", detail=f"no verdict within {CLOCK * self.deadline_s:g} s"), None
        except ChildEnded:
            code = self._end(child)
            if self._closed:
                raise
            if code == -signal.SIGPROF:
                return Graded("grader_timeout", detail=f"more than {self.deadline_s:g} s of processor time"), None
            return Graded("grader_failed", detail=_ending(code)), None
        if reply.get("last", True):
            self._end(child)
            child = None
        return _outcome(reply), child

    def _begun(self, task: _Task, child: Child | None) -> Child:
        """A child that has loaded the suite and begun with the item: the one given, or another in its place.

        Raises:
            WorkerError: the suite cannot be loaded there, or no child starts.
        """
        request = json.dumps({"suite": task.suite, "item": _fields(task.item), "completion": task.completion})
        why = ""
        for _ in range(STARTS):
            child = child or self._start()
            try:
                number = child.ask(request, START_S)
                reply = child.read(START_S)
            except (ChildTimeout, ChildEnded) as error:
                code = self._end(child)
                child = None
                if self._closed:
                    raise
                why = f"not ready within {START_S:g} s" if isinstance(error, ChildTimeout) else _ending(code)
                continue
            if "broken" in reply:
                self._end(child)
                raise WorkerError(
                    "grader", f"its processes must be able to load the suite {task.suite}", reply["broken"]
                )
            if reply.get("begun") == number:
                return child
            self._end(child)
            child, why = None, "no valid reply"
        raise WorkerError(
            "grader", f"its processes must start (python -m distill_rl.evals.grading.judge); tried {STARTS}", why
        )

    def _start(self) -> Child:
        with self._lock:
            if self._closed:
                raise CancelledError
            child = Child(self.deadline_s, self.memory_bytes)
            self._children.add(child)
            return child

    def _end(self, child: Child | None) -> int | None:
        """Kills what is left of a child and of its children; its exit code, None: it is there still."""
        if child is None:
            return 0
        with self._lock:
            self._children.discard(child)  # before its id is free for another process, which `close` must not kill
            child.kill()
        return child.gone()


def _fields(item: Item) -> dict[str, Any]:
    prompt = item.prompt if isinstance(item.prompt, str) else [dict(message) for message in item.prompt]
    fields = {name: getattr(item, name) for name in ("id", "answer", "task", "prefix", "choices")}
    return fields | {"prompt": prompt}


def _outcome(reply: dict[str, Any]) -> Graded:
    if "error" in reply:
        return Graded("grader_failed", detail=" ".join(str(reply["error"]).split()))
    score, extracted = reply.get("score"), reply.get("extracted")
    if not isinstance(score, float) or not math.isfinite(score) or not isinstance(extracted, str | None):
        return Graded("grader_failed", detail="no valid reply")
    return Graded("judged", Verdict(score, extracted))


def _ending(code: int | None) -> str:
    if code is None:
        return "its process was killed, and does not end"
    if code >= 0:
        return f"its process ended with code {code}"
    try:
        return f"its process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was ended by signal {-code}"
