"""The observer, and its sinks for metrics: `metrics.jsonl`, TensorBoard and the terminal."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from distill_rl.config.schema import Config
from distill_rl.observe.log import ProgressBar
from distill_rl.observe.metrics import (
    ALL_TOKENS,
    FAULTS,
    PER_SECOND,
    SECONDS,
    STEPS,
    TOKENS,
    Metric,
    Metrics,
    merge,
    values,
)
from distill_rl.observe.timing import TableSink
from distill_rl.observe.trackers import open_trackers
from distill_rl.system.files import sync, write_atomic
from distill_rl.types import RunPaths

_LOSSES = (("loss", "train/loss"), ("kl", "train/kl_loss"), ("nll", "train/nll_loss"))
MOST_RECORDS = 20_000
"""Most records of steps, unless `observe.every` asks for more: about 30 MB of metrics.jsonl."""
_WORK = ("step", "forward", "align")
"""The parts `timing/<worker>/<part>` that are all of a worker's work: `busy/<worker>` is their share of the step."""

log = logging.getLogger(__name__)


class Sink(Protocol):
    """A destination for records. A record is a step and plain numbers by metric name."""

    def write(self, step: int, record: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Observer:
    """Collects the metrics of every step and writes them to the sinks.

    Args:
        sinks: get one record whenever the step is a multiple of `every`. Each metric is reduced over the steps since
            the last record with its own reduction, so nothing logged in between is lost. `train/steps` is their number;
            what is reduced per step is their sum divided by it, or their sum in a record of no step.
        every: steps per record; None: every step, until `expect` tells of more than `MOST_RECORDS`.
        live: sinks that get every single step, such as the progress bar.
    """

    def __init__(self, sinks: Sequence[Sink], every: int | None, *, live: Sequence[Sink] = ()):
        self._sinks, self._asked, self._live = tuple(sinks), every, tuple(live)
        self._every = every or 1
        self._step = 0
        self._pending: dict[str, Metric] = {}
        self._per_step: set[str] = set()

    def log(self, step: int, *parts: Metrics) -> None:
        """Adds the metrics of a step and writes what is due.

        The live sinks get every step, the others a record of all pending metrics if the step is a multiple of `every`.
        A name that occurs in several parts (of several ranks) is reduced too.

        Derives `train/tokens_per_second` and `align/tokens_per_second` from the tokens that are trained on, and all tokens,
        and `timing/step`; `train/mfu` from the seconds that the step's FLOPs need; `transport/teacher_wait`, the share of the step spent waiting for teachers; and `busy/<worker>`, the
        share in which a worker worked. They are means weighted by seconds, so they stay exact when steps are merged.

        Raises:
            ValueError: a name has two different reductions.
        """
        metrics = merge(parts)
        metrics |= _per_second(metrics)
        for sink in self._live:
            sink.write(step, values(metrics))
        if SECONDS in metrics:
            metrics[STEPS] = Metric(1.0, "sum")
        for name, metric in metrics.items():
            if metric.reduction == "per_step":  # merged over ranks; from here on over steps
                self._per_step.add(name)
                metrics[name] = metric._replace(reduction="sum")
        # A step that is skipped may have no finite loss: the means of a record are those of the other steps.
        for name in [name for name, metric in self._pending.items() if metric.reduction == "mean" and name in metrics]:
            if not math.isfinite(metrics[name].value):
                del metrics[name]
            elif not math.isfinite(self._pending[name].value):
                del self._pending[name]
        self._pending = merge((self._pending, metrics))
        self._step = step
        if step % self._every == 0:
            self.flush()

    def expect(self, total_steps: int) -> None:
        """Takes note of the steps of the whole run, once they are known: for records and for what shows the progress."""
        self._every = self._asked or -(-total_steps // MOST_RECORDS)
        for sink in self._live:
            if isinstance(sink, ProgressSink):
                sink.expect(total_steps)

    def flush(self) -> None:
        """Writes pending metrics, if any, as a record of the last step logged, to all sinks but the live ones."""
        if self._pending:
            record, self._pending = values(self._pending), {}
            steps = record.get(STEPS, 1.0)
            record |= {name: record[name] / steps for name in self._per_step & record.keys()}
            for sink in self._sinks:
                sink.write(self._step, record)

    def sync(self) -> None:
        """As `flush`, and flushes metrics.jsonl to disk. Call it before a checkpoint, which goes on from these records."""
        self.flush()
        for sink in self._sinks:
            if isinstance(sink, JsonlSink):
                sink.sync()

    def record(self, step: int, record: Mapping[str, float]) -> None:
        """Writes a separate record for any step, such as an evaluation of that step's weights that ended later.

        It is not merged with pending metrics, and live sinks do not get it.
        """
        for sink in self._sinks:
            sink.write(step, record)

    def close(self) -> None:
        """Writes pending metrics, then closes every sink, live ones too, even if the writing or a sink fails.

        The error is raised afterwards; of several, the last one.
        """
        with ExitStack() as stack:
            for sink in reversed(self._sinks + self._live):
                stack.callback(sink.close)
            self.flush()


def _per_second(metrics: Metrics) -> dict[str, Metric]:
    """The derived metrics of `PER_SECOND` and `busy/<worker>` whose sources are present; empty without a step time above 0."""
    if SECONDS not in metrics or metrics[SECONDS].value <= 0:
        return {}
    seconds = metrics[SECONDS].value
    workers = [name.split("/") for name in metrics if name.startswith("timing/") and name.count("/") == 2]
    busy = {f"busy/{worker}": f"timing/{worker}/{part}" for _, worker, part in workers if part in _WORK}
    known = {name: metrics[source].value for name, source in (PER_SECOND | busy).items() if source in metrics}
    return {name: Metric(value / seconds, "mean", seconds) for name, value in known.items()}


class JsonlSink:
    """`metrics.jsonl`: one JSON object per record, `{"step": …, "time": …, "<metric>": …}`.

    A record is in the file when `write` returns. JSON has no NaN or infinity, so they are written as null. `time` is
    seconds since the epoch.

    Args:
        path: opened for appending; lines that are no records are removed, such as a half-written last one.
        resume_step: records of later steps are removed, because the resumed run writes them again; None keeps all.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _truncate(self._path, resume_step)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Appends a record with the current time as one line, which is in the file when this returns.

        NaN and infinity become null.
        """
        numbers = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3)} | numbers, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flushes the file, and its name in its folder, to disk."""
        sync(self._path)
        sync(self._path.parent)

    def close(self) -> None:
        self._file.close()


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl in file order; lines that are not records are skipped.

    Raises:
        OSError: the file cannot be read.
    """
    return [record for line in Path(path).read_bytes().split(b"\n") if (record := _parse(line)) is not None]


def broken_lines(content: bytes) -> int:
    """How many lines of a metrics.jsonl are no records; a last one that a killed process left half-written is none."""
    return sum(bool(line.strip()) and _parse(line) is None for line in content.split(b"\n")[:-1])


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line of metrics.jsonl; None if the line is no JSON object with an integer `step`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _truncate(path: Path, resume_step: int | None) -> None:
    """Rewrites a metrics.jsonl with only its complete records, of steps up to `resume_step` (None: of all steps)."""
    # Does nothing if there is no file, and does not touch one that is in order.
    if not path.exists():
        return
    content = path.read_bytes()
    kept = []
    for line in content.split(b"\n"):
        record = _parse(line)
        if record is not None and (resume_step is None or record["step"] <= resume_step):
            kept.append(line + b"\n")
    if broken := broken_lines(content):
        log.warning("%s: %d lines are no records, and are dropped", path, broken)
    if b"".join(kept) != content:
        write_atomic(path, b"".join(kept))


class TensorBoardSink:
    """TensorBoard scalars, through tensorboard's own event writer (importing it needs no torch).

    Args:
        folder: gets one event file per attempt of the run.
        resume_step: makes TensorBoard drop what earlier attempts wrote for later steps.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resume_step: int | None = None):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if resume_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))
            self._writer.flush()

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Queues a record's scalars with the current time; on disk within about ten seconds, or after `close`."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in record.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()


class ProgressSink:
    """Step, losses, tokens per second and time left.

    Args:
        total_steps: steps of the whole run; None: not known yet.
        start_step: steps done before this attempt.
        options: further keywords of `ProgressBar`.
    """

    def __init__(self, total_steps: int | None, *, start_step: int = 0, **options: Any):
        self._bar = ProgressBar("step", total_steps, done=start_step, **options)
        self._since: dict[str, float] = {}

    def expect(self, total_steps: int) -> None:
        """Sets the steps of the whole run, from the next step on."""
        self._bar.total = total_steps

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Shows a step's figures (`ProgressBar.update`); ignores a record without any `train/` metric.

        On a terminal it updates the bar; elsewhere it prints a line at the first and last step and at intervals. Tokens per
        second are those of all steps since the last line, or on a terminal since the last interval began.
        """
        if any(name.startswith("train/") for name in record):
            for name in (TOKENS, ALL_TOKENS, SECONDS):
                self._since[name] = self._since.get(name, 0.0) + record.get(name, 0.0)
            if self._bar.update(step, self._figures(record)):
                self._since = {}

    def close(self) -> None:
        """Stops the bar and leaves its last state on the screen; does nothing if stdout is no terminal."""
        self._bar.close()

    def _figures(self, record: Mapping[str, float]) -> Iterator[str]:
        """Yields the texts beside a step: losses, tokens per second and, if above 0, the number of faults."""
        for label, name in _LOSSES if self._bar.is_wide else _LOSSES[:1]:
            if name in record:
                yield f"{label} {record[name]:.4f}"
        if seconds := self._since[SECONDS]:
            trained, read = (self._since[name] / seconds for name in (TOKENS, ALL_TOKENS))
            yield f"{trained:,.0f} trained of {read:,.0f} tokens/s" if read else f"{trained:,.0f} tokens/s"
        faults = sum(int(record.get(name, 0)) for name in FAULTS)  # each was printed when it happened
        if faults:
            yield f"faults {faults}"


def open_observer(
    config: Config,
    paths: RunPaths,
    *,
    total_steps: int | None,
    resume_step: int | None = None,
    others: Sequence[Sink] = (),
) -> Observer:
    """Opens the observer of a run: metrics.jsonl, the sinks that `observe.*` enables, and the progress on stdout.

    Files are in the run directory. Trackers start child processes; `close` ends them.

    Args:
        total_steps: steps of the whole run, for the progress bar; None: `Observer.expect` will tell.
        resume_step: step that the run goes on from; records of later steps, written by an earlier attempt, are
            dropped, at -1 all. None: a new run, and nothing is dropped.
        others: further sinks, which get the same records and are closed too.
    """
    sinks: list[Sink] = [JsonlSink(paths.metrics, resume_step=resume_step)]
    if config.observe.tensorboard:
        sinks.append(TensorBoardSink(paths.tensorboard, resume_step=resume_step))
    sinks += [*open_trackers(config, paths), *others]
    live: list[Sink] = [ProgressSink(total_steps, start_step=max(resume_step or 0, 0))]
    if config.observe.table_every:
        live.append(TableSink(config.observe.table_every))
    observer = Observer(sinks, config.observe.every, live=live)
    if total_steps is not None:
        observer.expect(total_steps)
    return observer
