"""The process that speaks to a tracker: `python -m distill_rl.observe.sinks.tracker_process wandb | mlflow`.

It takes JSON lines from stdin and says on stdout how far it is (see `TrackerSink`); what the tracker's library prints goes
to stderr. When stdin ends, also because the driver was killed, it has CLOSE_S seconds to finish.
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

PROJECT = "distill_rl"
"""of W&B and experiment of MLflow, where WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says nothing else"""
RETRY_S = 15.0
CLOSE_S = 20.0
"""in which everything must have reached the tracker at the end"""

Say = Callable[[str], None]


class Tracker(Protocol):
    def log(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """`at`: seconds since the epoch."""

    def close(self) -> None: ...


class Wandb:
    """A run of Weights & Biases. The step is a metric of its own, so that a record of an earlier step is no error.

    WANDB_API_KEY, WANDB_MODE, WANDB_BASE_URL and the like are W&B's own.
    """

    def __init__(self, start: Mapping[str, Any]):
        import wandb

        ids = Ids(Path(start["folder"]), "wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=start["name"],
            id=ids.keep(ids.known or secrets.token_hex(4)),
            resume="allow",
            allow_val_change=True,
            dir=start["folder"],
            config=start["config"],
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow: at MLFLOW_TRACKING_URI, or in files in the run directory."""

    def __init__(self, start: Mapping[str, Any]):
        # MLflow's files are in maintenance and have to be allowed; its other store would need a database's packages.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import RunStatus
        from mlflow.tracking import MlflowClient

        folder = Path(start["folder"])
        self._ended = RunStatus.to_string(RunStatus.FINISHED)
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").as_uri())
        ids = Ids(folder, "mlflow")
        if ids.known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            self._id = ids.keep(self._client.create_run(experiment, run_name=start["name"]).info.run_id)
            try:
                self._log_settings(start["config"])
            except Exception:  # what a run was started with is worth less than its metrics
                traceback.print_exc()
        else:
            self._id = ids.known
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))

    def _log_settings(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        settings = [Param(name, str(value)[:6000]) for name, value in flat(config)]
        for first in range(0, len(settings), 100):
            self._client.log_batch(self._id, params=settings[first : first + 100])

    def log(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        numbers = [Metric(metric_name(name), value, int(at * 1000), step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=numbers)

    def close(self) -> None:
        self._client.set_terminated(self._id, self._ended)


TRACKERS: dict[str, Callable[[Mapping[str, Any]], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}


class Ids:
    """The tracker's own name of a run, kept in the run directory, so that a resumed run goes on in the same one."""

    def __init__(self, folder: Path, tracker: str):
        self._file = folder / f"{tracker}.id"

    @property
    def known(self) -> str | None:
        return self._file.read_text("utf-8").strip() if self._file.exists() else None

    def keep(self, name: str) -> str:
        self._file.write_text(name + "\n", "utf-8")
        return name


def metric_name(name: str) -> str:
    """One slash at most: `timing/student` is a metric and `timing/student/step` another, and in files both cannot be."""
    first, slash, rest = name.partition("/")
    return first + slash + rest.replace("/", ".")


def run(make: Callable[[Mapping[str, Any]], Tracker], lines: IO[str], say: Say) -> None:
    """Hands every record to the tracker; one that cannot be reached is tried again, one that fails a record goes on."""
    start = json.loads(lines.readline())
    tracker = _reach(make, start, say)
    say("ready")
    taken = 0
    for line in lines:
        record = json.loads(line)
        try:
            tracker.log(record["step"], record["time"], record["metrics"])
        except Exception as error:
            say(f"step {record['step']}: {_one_line(error)}")
        else:
            taken += 1
            say(f"took {taken}")
    tracker.close()


def _reach(make: Callable[[Mapping[str, Any]], Tracker], start: Mapping[str, Any], say: Say) -> Tracker:
    while True:
        try:
            return make(start)
        except Exception as error:
            say(f"cannot be reached: {_one_line(error)}")
            time.sleep(RETRY_S)


def _end_after(stdin: int) -> None:
    """Ends this process some seconds after nobody writes to its stdin any more, whatever it is doing then."""
    poll = select.poll()
    poll.register(stdin, 0)  # a hang-up is always told
    poll.poll()
    time.sleep(CLOSE_S)
    os._exit(1)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # A scheduler's, for the whole job; here, the end of stdin says when to end.
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(text: str) -> None:
        with suppress(OSError):  # nobody listens any more
            out.write(text + "\n")

    threading.Thread(target=_end_after, args=(sys.stdin.fileno(),), daemon=True).start()
    run(TRACKERS[sys.argv[1]], sys.stdin, say)


if __name__ == "__main__":
    main()
