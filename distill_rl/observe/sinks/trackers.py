"""W&B and MLflow, in a process of their own: whatever becomes of the tracker, training goes on at full speed.

Consumes: records. Waits for: nothing, but for `close`, which has a deadline. Produces: lines on the child's stdin.
A tracker's library is imported in the child only (`tracker_process`), which is ended with all that it started.
"""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from distill_rl.config.schema import Config
from distill_rl.observe.sinks import tracker_process
from distill_rl.observe.sinks.tracker_process import CLOSE_S
from distill_rl.system.redact import redact
from distill_rl.types import RunPaths

TRACKERS = ("wandb", "mlflow")
"""keys of `observe`"""
QUEUE = 1000
"""records that wait for a slow tracker; what comes while they wait is dropped"""
UNREACHED_S = 5.0
"""seconds that a tracker gets at the end that was never reached"""

log = logging.getLogger(__name__)


def open_trackers(config: Config, paths: RunPaths) -> list[TrackerSink]:
    """Those that `observe` asks for, started; a run that is resumed goes on in the tracker's same run."""
    start = {
        "name": config.run.name,
        "folder": str(paths.root / "logs"),
        "config": redact(asdict(config)),
    }
    return [
        TrackerSink(
            name, [sys.executable, "-m", tracker_process.__name__, name], start, log_file=paths.logs / f"{name}.log"
        )
        for name in TRACKERS
        if getattr(config.observe, name)
    ]


class TrackerSink:
    """Hands records to a child process without ever waiting for it.

    The child reads JSON from stdin, one object per line: `start`, then `{"step": …, "time": …, "metrics": {…}}` per
    record. It ends when stdin does. Its stdout is read line by line: `ready` once the tracker was reached, `took N` when
    it has handed N records to the tracker in all, and anything else is a warning, of which the console sees the first.

    Args:
        name: for messages.
        command: the child's.
        log_file: gets the child's stderr.
        size: records that may wait.
        close_s: seconds that `close` leaves the child at most.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        start: Mapping[str, Any],
        *,
        log_file: Path,
        size: int = QUEUE,
        close_s: float = CLOSE_S,
    ):
        self._name, self._close_s, self._log_file = name, close_s, log_file
        self._waiting: queue.Queue[str | None] = queue.Queue(size)
        """None: nothing more comes"""
        self._ending, self._ready = threading.Event(), threading.Event()
        self._offered = self._taken = 0
        self._full = self._warned = False
        self._lock = threading.Lock()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as errors:
            # A session of its own: Ctrl-C and a scheduler's signals are for the driver.
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        self._waiting.put_nowait(_line(start))
        self._threads = [
            threading.Thread(target=target, name=f"{name}{target.__name__}", daemon=True)
            for target in (self._feed, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def missing(self) -> int:
        """Records that the tracker does not have, as far as is known."""
        return self._offered - self._taken

    @property
    def pid(self) -> int:
        return self._child.pid

    def write(self, step: int, record: Mapping[str, float]) -> None:
        self._offered += 1
        try:
            self._waiting.put_nowait(_line({"step": step, "time": time.time(), "metrics": dict(record)}))
        except queue.Full:
            if not self._full:
                self._full = True
                self._complain(f"is too slow: {self._waiting.maxsize} records wait, and those that come are dropped")

    def close(self) -> None:
        """Gives the child what time it has for the rest, then ends it with everything that it started."""
        self._ending.set()
        deadline = time.monotonic() + (self._close_s if self._ready.is_set() else min(self._close_s, UNREACHED_S))
        if self._child.poll() is None:
            self._end(deadline)
        else:
            with suppress(queue.Full):  # nobody takes anything out any more
                self._waiting.put_nowait(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
        if self.missing:
            log.warning(
                "%s did not get %d of %d records; metrics.jsonl has them all", self._name, self.missing, self._offered
            )

    def _end(self, deadline: float) -> None:
        """Waits for the child until `deadline`, of `time.monotonic()`, then kills what is left of it."""
        family = _family(self._child.pid)
        try:
            self._waiting.put(None, timeout=max(0.0, deadline - time.monotonic()))
            self._child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except (queue.Full, subprocess.TimeoutExpired):
            self._complain("did not end in time")
            family = _family(self._child.pid)
        finally:
            _kill(family)
            self._child.wait()

    def _feed(self) -> None:
        """The only writer to the child; stuck where the child is, until that is killed."""
        stdin = self._child.stdin
        assert stdin is not None
        with suppress(OSError), stdin:
            while (line := self._waiting.get()) is not None:
                stdin.write(line.encode())
                stdin.flush()

    def _listen(self) -> None:
        stdout = self._child.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                self._hear(line.decode(errors="replace").strip())
        if not self._ending.is_set():
            self._complain("has ended")

    def _hear(self, text: str) -> None:
        word, _, number = text.partition(" ")
        if text == "ready":
            self._ready.set()
            log.info("%s is reached", self._name)
        elif word == "took" and number.isdecimal():
            self._taken = int(number)
        elif text:
            self._complain(text)

    def _complain(self, text: str) -> None:
        with self._lock:
            level, self._warned = logging.INFO if self._warned else logging.WARNING, True
        log.log(level, "%s: %s; the run goes on without it (see %s)", self._name, text, self._log_file)


def _line(message: Mapping[str, Any]) -> str:
    return json.dumps(message) + "\n"


def _family(pid: int) -> list[psutil.Process]:
    """A process with all below it."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=2.0)
