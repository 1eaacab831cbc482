"""The process that sends records to a tracker: `python -m distill_rl.observe.sinks.tracker_process wandb | mlflow`.

It reads JSON lines from stdin and reports its progress on stdout (the protocol is described at `TrackerSink`). The
output of the tracker's library goes to stderr. When stdin is closed, which also happens if the driver is killed, it has
CLOSE_S seconds to finish.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from distill_rl.config.save import flat
from distill_rl.system.signals import PREEMPT

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
        """Offline, W&B does not continue a run: it begins a further folder of the same id, and an upload of both may keep
        one only. So this folder gets the records of the earlier ones, which are put aside."""
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
        from mlflow.entities import RunStatus
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
            try:
                self._log_settings(start["config"])
            except Exception:  # the settings are not worth losing the metrics for
                traceback.print_exc()
        else:
            self._id = run_id.stored
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))

    def _log_settings(self, config: Mapping[str, Any]) -> None:
        """Sends the settings as parameters, nested names joined by dots, values cut off after 6000 characters."""
        from mlflow.entities import Param

        settings = [Param(name, str(value)[:6000]) for name, value in flat(config)]
        for first in range(0, len(settings), 100):
            self._client.log_batch(self._id, params=settings[first : first + 100])

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
    start = json.loads(lines.readline())
    tracker = _connect(make, start, reply)
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
    """Thread: waits until stdin is closed, then ends this process with code 1 if it still runs CLOSE_S seconds later.

    Args:
        stdin: its file descriptor, a pipe.
    """
    poll = select.poll()
    poll.register(stdin, 0)  # POLLHUP is always reported
    poll.poll()
    time.sleep(CLOSE_S)
    os._exit(1)


def _one_line(error: Exception) -> str:
    """Type and message of an error on one line of at most 300 characters."""
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


if __name__ == "__main__":
    main()
