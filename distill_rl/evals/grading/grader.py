"""Grades completions in child processes, because a model's output is hostile input.

One thread per child sends it one completion at a time. If a child exceeds its time or memory, or crashes, only that
item is lost: the thread kills the child and starts another one. Time is processor time, so that a busy machine does not
change outcomes; a child that does nothing at all is killed, too. An item that took too long is graded once more when
nothing else is waiting, alone, since processor time also grows where processes share caches and memory.

Protocol, as JSON lines (see `judge`): the parent sends an item; the child replies `begun` once the suite is loaded,
then `done` with the verdict. Until `begun`, a failure is a problem of starting up and the item is sent again, to a new
child; afterwards, a failure is the outcome of the item.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any, Literal

from distill_rl.errors import WorkerError
from distill_rl.evals.suites.base import Item, Verdict
from distill_rl.system.processes import LEAST_SHARE, REAP_S, Child, ChildEnded, ChildHangs

START_S = 120.0
"""Seconds without computing after which a child that starts or loads a suite hangs."""
MAX_STARTS = 3
"""Attempts to start a child for an item, before the failure counts as permanent."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The outcome of grading one item; it has a `verdict` if the outcome is "judged"."""

    outcome: Literal["judged", "grader_timeout", "grader_failed"]
    verdict: Verdict | None = None
    detail: str = ""
    """Why there is no verdict, in one line."""


@dataclass(frozen=True, slots=True)
class _Task:
    suite: str
    item: Item
    completion: str
    future: Future[Graded]
    is_late: bool = False
    """It took too long before."""


class Grader:
    """A pool of grading processes, which start when items arrive. Use it as a context manager, or call `close`. Any
    thread may submit items.

    Args:
        workers: number of children; None: one per processor that this process may use, at most 8.
        deadline_s: processor time per item in seconds.
        memory_bytes: address space that a child may allocate in addition to what it has after loading its suite.
        hang_s: seconds after which an item is given up whose child does not even compute.
    """

    def __init__(
        self, workers: int | None = None, deadline_s: float = 15.0, memory_bytes: int = 2 << 30, hang_s: float = 60.0
    ):
        if workers is None:
            workers = min(8, len(os.sched_getaffinity(0)))
        self.deadline_s, self.memory_bytes, self.hang_s = deadline_s, memory_bytes, hang_s
        self._waiting: deque[_Task] = deque()
        self._late: deque[_Task] = deque()
        """Tasks to be graded again."""
        self._num_running = 0
        self._runs_alone = False
        self._changed = threading.Condition()
        """Notified when a task arrives or ends, and when the pool is closed."""
        self._children: dict[int, Child] = {}
        """By the thread that started it."""
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, name=f"grader-{n}", daemon=True) for n in range(workers)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def longest_s(self) -> float:
        """Wall-clock seconds after which one of the items submitted has an outcome, where processes get LEAST_SHARE of a
        processor."""
        starting = MAX_STARTS * (2 * START_S + REAP_S)
        num_items = len(self._waiting) + len(self._late) + self._num_running
        return (num_items + 1) * (starting + self.deadline_s / LEAST_SHARE + self.hang_s + REAP_S)

    def submit(self, suite: str, item: Item, completion: str) -> Future[Graded]:
        """Queues a completion, to be judged by the suite that `registry.find` returns for this name or path; returns at
        once.

        The future's result has no verdict if judging failed or took too long. The future raises `WorkerError` if
        children do not start or cannot load the suite, and `CancelledError` if the pool was closed first.

        Raises:
            RuntimeError: the pool is closed.
        """
        future: Future[Graded] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the grader is closed")
            self._waiting.append(_Task(suite, item, completion, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Kills the children at once, cancels the remaining items and waits for the threads. A second call changes
        nothing.

        A child that cannot be killed is abandoned: this returns after `2 * REAP_S` seconds if threads still wait for
        one.
        """
        deadline = time.monotonic() + 2 * REAP_S
        with self._changed:
            self._closed = True
            for child in self._children.values():
                child.kill()
            rest = [*self._waiting, *self._late]
            self._waiting.clear()
            self._late.clear()
            self._changed.notify_all()
        for task in rest:
            if task.is_late:
                task.future.set_exception(CancelledError())
            elif task.future.cancel():
                task.future.set_running_or_notify_cancel()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self) -> None:
        """The loop of one thread: takes tasks and grades them with one child, until the pool is closed; then ends the child."""
        # Every task's future gets a result, an exception or a cancellation. `close` unblocks it in both of its waits: for a task by a
        # notification, for the child by killing it.
        while (task := self._next_task()) is not None:
            again = False
            if task.is_late or task.future.set_running_or_notify_cancel():
                try:
                    graded = self._grade(task)
                except BaseException as error:
                    self._end()
                    task.future.set_exception(CancelledError() if self._closed else error)
                else:
                    again = graded.outcome == "grader_timeout" and not task.is_late
                    if not again:
                        task.future.set_result(graded)
            self._put_back(task, again)
        self._end()

    def _next_task(self) -> _Task | None:
        """Waits for a task that may run now; None once the pool is closed. Late tasks run when nothing else does."""
        with self._changed:
            while not self._closed:
                if self._waiting and not self._runs_alone:
                    self._num_running += 1
                    return self._waiting.popleft()
                if self._late and not self._num_running:
                    self._num_running, self._runs_alone = 1, True
                    return self._late.popleft()
                self._changed.wait()
        return None

    def _put_back(self, task: _Task, again: bool) -> None:
        """Ends a task, or queues it to run alone."""
        with self._changed:
            self._num_running -= 1
            self._runs_alone = False
            if again and self._closed:
                task.future.set_exception(CancelledError())
            elif again:
                self._late.append(replace(task, is_late=True))
            self._changed.notify_all()

    def _grade(self, task: _Task) -> Graded:
        """Has an item judged by this thread's child; returns its outcome."""
        # A child that exceeds its time or memory, crashes, or asks to be replaced is ended; failures after the item has begun are its
        # outcome.
        child = self._child_with_item(task)
        try:
            reply = child.read(self.hang_s)
        except ChildHangs:
            self._end()
            return Graded("grader_timeout", detail=f"no sign of life for {self.hang_s:g} s")
        except ChildEnded:
            code = self._end()
            if self._closed:
                raise
            if code == -signal.SIGPROF:
                return Graded("grader_timeout", detail=f"more than {self.deadline_s:g} s of processor time")
            return Graded("grader_failed", detail=_exit_reason(code))
        if reply.get("last", True):
            self._end()
        return _outcome(reply)

    def _child_with_item(self, task: _Task) -> Child:
        # Sends the item to this thread's child, or to a new one if there is none or it fails, and returns that child once it has loaded
        # the suite and begun with the item. Children that fail are ended.
        item = {name: getattr(task.item, name) for name in Item.__dataclass_fields__}
        request = json.dumps({"suite": task.suite, "item": item, "completion": task.completion}, default=dict)
        reason = ""
        for _ in range(MAX_STARTS):
            child = self._child()
            try:
                request_id = child.send(request, START_S)
                reply = child.read(START_S)
            except (ChildHangs, ChildEnded) as error:
                code = self._end()
                if self._closed:
                    raise
                reason = f"no sign of life for {START_S:g} s" if isinstance(error, ChildHangs) else _exit_reason(code)
                continue
            if "broken" in reply:
                rule = f"its processes must be able to load the suite {task.suite}"
                raise WorkerError("grader", rule, reply["broken"])
            if reply.get("begun") == request_id:
                return child
            self._end()
            reason = "no valid reply"
        rule = f"its processes must start (python -m distill_rl.evals.grading.judge); tried {MAX_STARTS}"
        raise WorkerError("grader", rule, reason)

    def _child(self) -> Child:
        """This thread's child; starts it if there is none, and registers it, so that `close` kills it."""
        thread = threading.get_ident()
        with self._changed:
            if self._closed:
                raise CancelledError
            if thread not in self._children:
                self._children[thread] = Child("distill_rl.evals.grading.judge", self.deadline_s, self.memory_bytes)
            return self._children[thread]

    def _end(self) -> int | None:
        """Kills this thread's child and its own children and waits for it; returns its exit code, None if it still exists, 0 without one."""
        with self._changed:
            # Reaping frees the process id for reuse; once the child is discarded, `close` cannot kill that id any more.
            child = self._children.pop(threading.get_ident(), None)
            if child is None:
                return 0
            child.kill()
        return child.reap()


def _outcome(reply: dict[str, Any]) -> Graded:
    """What a child's last reply says about an item: a verdict, or "grader_failed" if the judge raised or the reply is invalid."""
    if "error" in reply:
        return Graded("grader_failed", detail=" ".join(str(reply["error"]).split()))
    score, extracted = reply.get("score"), reply.get("extracted")
    if not isinstance(score, float) or not math.isfinite(score) or not isinstance(extracted, str | None):
        return Graded("grader_failed", detail="no valid reply")
    return Graded("judged", Verdict(score, extracted))


def _exit_reason(code: int | None) -> str:
    """Says in words how a child has ended."""
    if code is None:
        return "its process was killed and does not end"
    if code >= 0:
        return f"its process ended with code {code}"
    try:
        return f"its process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was ended by signal {-code}"
