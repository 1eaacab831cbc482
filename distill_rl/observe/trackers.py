"""W&B and MLflow, each in a child process: whatever happens to the tracker, training goes on at full speed.

Consumes: records. Waits for: nothing, except in `close`, which has a deadline. Produces: lines on the child's stdin.
Only the child imports the tracker's library (`Tracker`). It is killed with all processes it started.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from distill_rl.config.save import flat
from distill_rl.config.schema import Config
from distill_rl.system.redact import redact
from distill_rl.system.signals import PREEMPT
from distill_rl.types import RunPaths

# The process that sends records to a tracker: `python -m distill_rl.observe.trackers wandb | mlflow`.
#
# It reads JSON lines from stdin and reports its progress on stdout (the protocol is described at `TrackerSink`). The
# output of the tracker's library goes to stderr. When stdin is closed, which also happens if the driver is killed, it has
# CLOSE_S seconds to finish.

PROJECT = "distill_rl"
"""Default project of W&B (WANDB_PROJECT) and experiment of MLflow (MLFLOW_EXPERIMENT_NAME)."""
RETRY_S = 15.0
"""Seconds between attempts to reach the tracker."""
CLOSE_S = 20.0
"""Seconds to send what is left at the end."""

Reply = Callable[[str], None]


class Tracker(Protocol):
    """A run at a tracker, to which records are sent."""

    def log(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """Sends one record; `at` is its time in seconds since the epoch. Whatever it raises costs only this record."""

    def close(self) -> None: ...


class Wandb:
    """A run of Weights & Biases. The step is logged as a metric, so that records of earlier steps are accepted.

    WANDB_API_KEY, WANDB_MODE, WANDB_BASE_URL and the like are read by W&B itself.
    """

    def __init__(self, start: Mapping[str, Any]):
        """Starts a run of W&B and stores its id in a folder, or continues the run whose id is stored there.

        Args:
            start: `name` of the run, `folder` (for the id and W&B's files), `config` (the settings to show) and `metrics`,
                the file whose first `recorded` bytes are the records so far.
        """
        import wandb

        run_id = RunId(Path(start["folder"]), "wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=start["name"],
            id=run_id.store(run_id.stored or secrets.token_hex(4)),
            resume="allow",
            allow_val_change=True,
            dir=start["folder"],
            config=start["config"],
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if self._run.offline and run_id.stored is not None:
            self._take_over(Path(start["folder"]), Path(start["metrics"]), start["recorded"])

    def _take_over(self, folder: Path, metrics: Path, recorded: int) -> None:
        # Offline, W&B does not continue a run: it begins a further folder of the same id, and an upload of both may
        # keep one only. So this folder gets the records of the earlier ones, which are put aside.
        own = Path(self._run.dir).parent.name
        earlier = [found for found in folder.glob(f"wandb/offline-run-*-{self._run.id}") if found.name != own]
        if not earlier:
            return
        for line in metrics.read_bytes()[:recorded].splitlines():
            record = json.loads(line)
            step, at = record.pop("step"), record.pop("time", None)
            self.log(step, at, {name: value for name, value in record.items() if value is not None})
        for found in earlier:
            found.rename(found.with_name(f"earlier-{found.name}"))

    def log(self, step: int, at: float | None, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **({} if at is None else {"_timestamp": at}), **metrics})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow: at MLFLOW_TRACKING_URI, or in files in the run directory if that is not set."""

    def __init__(self, start: Mapping[str, Any]):
        """Creates a run of MLflow and stores its id in a folder, or continues the run whose id is stored there.

        A new run gets the settings, and its experiment is created if necessary. An error while the settings are sent is
        only printed, with its traceback, to stderr.

        Args:
            start: `name` of the run, `folder` (for the id and, without a tracking URI, MLflow's files) and `config`
                (the settings).
        """
        # MLflow only maintains its file store and requires this opt-in; its other store needs database packages.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param, RunStatus
        from mlflow.tracking import MlflowClient

        folder = Path(start["folder"])
        self._ended = RunStatus.to_string(RunStatus.FINISHED)
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").as_uri())
        run_id = RunId(folder, "mlflow")
        if run_id.stored is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
            self._id = run_id.store(self._client.create_run(experiment_id, run_name=start["name"]).info.run_id)
            # Nested names are joined by dots, and values cut off after 6000 characters.
            settings = [Param(name, str(value)[:6000]) for name, value in flat(start["config"])]
            try:
                for first in range(0, len(settings), 100):
                    self._client.log_batch(self._id, params=settings[first : first + 100])
            except Exception:  # the settings are not worth losing the metrics for
                traceback.print_exc()
        else:
            self._id = run_id.stored
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))

    def log(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """Sends one record; slashes after the first in a metric's name become dots (`metric_name`).

        Args:
            at: time of the record, in seconds since the epoch.
        """
        from mlflow.entities import Metric

        numbers = [Metric(metric_name(name), value, int(at * 1000), step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=numbers)

    def close(self) -> None:
        self._client.set_terminated(self._id, self._ended)


TRACKERS: dict[str, Callable[[Mapping[str, Any]], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}
"""By key of `observe`."""


class RunId:
    """The id that a tracker uses for a run, stored as `<tracker>.id` in a folder so that a resumed run continues it."""

    def __init__(self, folder: Path, tracker: str):
        self._file = folder / f"{tracker}.id"

    @property
    def stored(self) -> str | None:
        """The stored id; None if there is none yet."""
        return self._file.read_text("utf-8").strip() if self._file.exists() else None

    def store(self, run_id: str) -> str:
        """Writes the id to the file, replacing an earlier one, and returns it."""
        self._file.write_text(run_id + "\n", "utf-8")
        return run_id


def metric_name(name: str) -> str:
    """The name with its first slash only, further ones as dots.

    MLflow's files cannot hold both `timing/student` and `timing/student/step`.
    """
    first, slash, rest = name.partition("/")
    return first + slash + rest.replace("/", ".")


def run(make: Callable[[Mapping[str, Any]], Tracker], lines: IO[str], reply: Reply) -> None:
    """Sends every record to the tracker until `lines` ends, then closes the tracker.

    Tries without end until the tracker can be reached; reports a record that fails, drops it and goes on.

    Args:
        make: opens the tracker with the first line's object.
        lines: JSON objects, one per line: the start, then records with `step`, `time` and `metrics`.
        reply: called with `ready`, then `took N` after each record that was sent (N in all), or with the text of a
            warning.
    """
    tracker = _connect(make, json.loads(lines.readline()), reply)
    reply("ready")
    num_taken = 0
    for line in lines:
        record = json.loads(line)
        try:
            tracker.log(record["step"], record["time"], record["metrics"])
        except Exception as error:
            reply(f"step {record['step']}: {_one_line(error)}")
        else:
            num_taken += 1
            reply(f"took {num_taken}")
    tracker.close()


def _connect(make: Callable[[Mapping[str, Any]], Tracker], start: Mapping[str, Any], reply: Reply) -> Tracker:
    """Opens the tracker; reports each failure by `reply` and tries again RETRY_S seconds later, without end."""
    while True:
        try:
            return make(start)
        except Exception as error:
            reply(f"cannot be reached: {_one_line(error)}")
            time.sleep(RETRY_S)


def _end_after(stdin: int) -> None:
    """Thread: waits until stdin is closed, then ends this process with code 1 if it still runs CLOSE_S seconds later."""
    poll = select.poll()
    poll.register(stdin, 0)  # POLLHUP is always reported
    poll.poll()
    time.sleep(CLOSE_S)
    os._exit(1)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main() -> None:
    """Sends the records from stdin to the tracker named on the command line, and ends when stdin is closed.

    Ignores the signals that schedulers send to the whole job. What libraries print goes to stderr.
    """
    for signal_number in (signal.SIGINT, *PREEMPT):
        # Schedulers signal the whole job. This process ends when its stdin does.
        signal.signal(signal_number, signal.SIG_IGN)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(text: str) -> None:
        with suppress(OSError):  # the driver is gone
            out.write(text + "\n")

    threading.Thread(target=_end_after, args=(sys.stdin.fileno(),), daemon=True).start()
    run(TRACKERS[sys.argv[1]], sys.stdin, reply)


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
    program = [sys.executable, "-m", "distill_rl.observe.trackers"]
    enabled = [name for name in TRACKERS if getattr(config.observe, name)]
    return [TrackerSink(name, [*program, name], start, log_file=paths.logs / f"{name}.log") for name in enabled]


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
        if missing := self.missing:
            text = "%s did not receive %d of %d records; metrics.jsonl has all of them"
            log.warning(text, self._name, missing, self._num_offered)

    def _end(self, deadline: float) -> None:
        """Closes the child's stdin, waits for its end, then kills what is left of it and the processes it started."""
        # Logs a message (`_warn`) if the child did not end in time.
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
        """Thread: the only writer to the child; passes on queued lines until None, then closes the child's stdin."""
        # Blocks while the child does not read; ends if it is gone.
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


if __name__ == "__main__":
    main()
