"""W&B and MLflow, each in a child process: whatever happens to the tracker, training goes on at full speed.

Consumes: records. Waits for: nothing, except in `close`, which has a deadline. Produces: lines on the child's stdin.
Only the child imports the tracker's library (`tracker_process`). It is killed with all processes it started.
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

QUEUE = 1000
"""Records that may wait for a slow tracker; further ones are dropped."""
UNREACHED_S = 5.0
"""Seconds that `close` waits for a tracker that was never reached."""

log = logging.getLogger(__name__)


def open_trackers(config: Config, paths: RunPaths) -> list[TrackerSink]:
    """Starts a child process for each tracker that `observe` enables and returns their sinks; empty if none is enabled.

    Does not wait until the trackers are reached. The settings are sent without secrets. A resumed run continues in the
    same run of the tracker.
    """
    start = {
        "name": config.run.name,
        "folder": str(paths.root / "logs"),
        "metrics": str(paths.metrics),
        "recorded": paths.metrics.stat().st_size if paths.metrics.exists() else 0,
        "config": redact(asdict(config)),
    }
    return [
        TrackerSink(
            name, [sys.executable, "-m", tracker_process.__name__, name], start, log_file=paths.logs / f"{name}.log"
        )
        for name in tracker_process.TRACKERS
        if getattr(config.observe, name)
    ]


class TrackerSink:
    """Hands records to a child process without ever waiting for it.

    The protocol: the child reads one JSON object per line from stdin, first `start`, then one
    `{"step": …, "time": …, "metrics": {…}}` per record, and ends when stdin is closed. It writes lines to stdout:
    `ready` when it has reached the tracker, `took N` when it has sent N records in total; any other line is a warning.
    Only the first warning is shown on the console.

    Args:
        name: of the tracker, for messages.
        command: starts the child.
        start: the first object for the child.
        log_file: gets the child's stderr.
        size: records that may wait.
        close_s: most seconds that `close` waits for the child.
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
        """Lines for the child; None ends them."""
        self._closing, self._ready = threading.Event(), threading.Event()
        self._num_offered = self._num_taken = 0
        self._full = self._has_warned = False
        self._lock = threading.Lock()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as errors:
            # In a new session, so that Ctrl-C and a scheduler's signals reach only the driver.
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
        """Records given to `write` that the child has not confirmed as sent, including dropped ones."""
        return self._num_offered - self._num_taken

    @property
    def pid(self) -> int:
        return self._child.pid

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Queues a record with the current time for the child and returns at once.

        If too many are waiting, the record is dropped; the first time, that is logged (`_warn`).
        """
        self._num_offered += 1
        try:
            self._waiting.put_nowait(_line({"step": step, "time": time.time(), "metrics": dict(record)}))
        except queue.Full:
            if not self._full:
                self._full = True
                self._warn(f"is too slow: {self._waiting.maxsize} records are waiting, and new ones are dropped")

    def close(self) -> None:
        """Waits, up to a deadline, for the child to send the rest and end; kills it and its processes if it does not.

        The deadline is `close_s` seconds, but at most UNREACHED_S if the tracker was never reached. Logs a warning if
        records are missing in the tracker.
        """
        self._closing.set()
        deadline = time.monotonic() + (self._close_s if self._ready.is_set() else min(self._close_s, UNREACHED_S))
        if self._child.poll() is None:
            self._end(deadline)
        else:
            with suppress(queue.Full):  # the feeding thread has ended already
                self._waiting.put_nowait(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
        if self.missing:
            log.warning(
                "%s did not receive %d of %d records; metrics.jsonl has all of them",
                self._name,
                self.missing,
                self._num_offered,
            )

    def _end(self, deadline: float) -> None:
        """Closes the child's stdin, waits for its end, then kills what is left of it and the processes it started.

        Logs a message (`_warn`) if the child did not end in time.

        Args:
            deadline: of the wait, by `time.monotonic()`.
        """
        tree = _process_tree(self._child.pid)
        try:
            self._waiting.put(None, timeout=max(0.0, deadline - time.monotonic()))
            self._child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except (queue.Full, subprocess.TimeoutExpired):
            self._warn("did not finish in time")
            tree = _process_tree(self._child.pid)
        finally:
            _kill(tree)
            self._child.wait()

    def _feed(self) -> None:
        """Thread: the only writer to the child; passes on queued lines until None, then closes the child's stdin.

        Blocks while the child does not read; ends if it is gone.
        """
        stdin = self._child.stdin
        assert stdin is not None
        with suppress(OSError), stdin:
            while (line := self._waiting.get()) is not None:
                stdin.write(line.encode())
                stdin.flush()

    def _listen(self) -> None:
        """Thread: takes in the child's lines until its stdout is closed; logs a message if that is before `close`."""
        stdout = self._child.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                self._read(line.decode(errors="replace").strip())
        if not self._closing.is_set():
            self._warn("its process has ended")

    def _read(self, text: str) -> None:
        """Takes in one line from the child: `ready`, `took N`, or a warning, which is logged; ignores an empty line."""
        word, _, count = text.partition(" ")
        if text == "ready":
            self._ready.set()
            log.info("%s: connected", self._name)
        elif word == "took" and count.isdecimal():
            self._num_taken = int(count)
        elif text:
            self._warn(text)

    def _warn(self, text: str) -> None:
        """Logs a message about the tracker: the first one as a warning, later ones at level info."""
        with self._lock:
            level, self._has_warned = logging.INFO if self._has_warned else logging.WARNING, True
        log.log(level, "%s: %s; the run continues without it (see %s)", self._name, text, self._log_file)


def _line(message: Mapping[str, Any]) -> str:
    """A message to the child as one line of JSON, with its newline."""
    return json.dumps(message) + "\n"


def _process_tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants; empty if there is no such process."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kills processes, as far as they still exist, and waits up to two seconds for their end."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=2.0)
