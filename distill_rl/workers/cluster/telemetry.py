"""Gauges and counters of every actor and of the driver, for Ray's metrics agent, from which Prometheus reads them.

Each carries the tags `run`, `actor`, `node` and `of`. The last names the part that a value belongs to (a teacher, a
suite) and is often empty. Ray prefixes the names with `ray_`. If Ray was installed without its agent (no `dashboard`
extra), nothing is recorded or sent.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from distill_rl.observe.metrics import FAULTS
from distill_rl.system.files import write_atomic

PREFIX = "distill_rl_"
TAGS = ("run", "actor", "node", "of")

log = logging.getLogger(__name__)


def has_agent() -> bool:
    """Whether Ray can start its metrics agent."""
    return find_spec("aiohttp_cors") is not None


class Gauges:
    """The gauges and counters of one process. Create it in that process, after Ray has been joined.

    Args:
        run: the run's name.
    """

    def __init__(self, run: str):
        self._run = run
        self._metrics: dict[str, Any] = {}
        self.enabled = has_agent() and ray.is_initialized()

    def set(self, name: str, value: float, of: str = "") -> None:
        """Sets the gauge `distill_rl_<name>` with the tag `of`; does nothing without Ray or its metrics agent.

        Values that are not finite are ignored.
        """
        if self.enabled and math.isfinite(value):
            self._metric("Gauge", name).set(value, tags={"of": of})

    def add(self, name: str, value: float, of: str = "") -> None:
        """Adds to the counter `distill_rl_<name>_total`, which starts at 0 with this process.

        Values that are not finite and positive are ignored, and all are without Ray or its metrics agent.
        """
        if self.enabled and math.isfinite(value) and value > 0:
            self._metric("Counter", f"{name}_total").inc(value, tags={"of": of})

    def _metric(self, kind: str, name: str) -> Any:
        """Returns the metric `distill_rl_<name>` of Ray's class `kind` (`Gauge` or `Counter`), made if needed."""
        from ray.util import metrics

        if name not in self._metrics:
            description = f"{name.replace('_', ' ')} (distill_rl)"
            self._metrics[name] = getattr(metrics, kind)(PREFIX + name, description=description, tag_keys=TAGS)
            context = ray.get_runtime_context()
            actor = (context.get_actor_id() and context.get_actor_name()) or "driver"
            tags = {"run": self._run, "actor": actor, "node": ray.util.get_node_ip_address(), "of": ""}
            self._metrics[name].set_default_tags(tags)
        return self._metrics[name]


class GaugeSink:
    """A sink of the observer that sends the newest record as gauges, and the tokens as a counter.

    The counts of faults, which records lack while they are 0, start as gauges of 0.
    """

    def __init__(self, run: str):
        self._gauges = Gauges(run)
        for name in FAULTS:
            self._gauges.set(*gauge_of(name, 0.0))

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Sets a gauge for every metric of the record of `step`, and adds its tokens to the counter."""
        if not self._gauges.enabled:
            return
        self._gauges.set("step", step)
        for name, value in record.items():
            self._gauges.set(*gauge_of(name, value))
        self._gauges.add("tokens", record.get("train/tokens", 0.0))

    def close(self) -> None:
        pass


def gauge_of(name: str, value: float) -> tuple[str, float, str]:
    """Converts a metric of a record to a gauge's name, its unchanged value and its tag `of`.

    The first two levels of the metric's name (separated by `/`) become the gauge's name, joined by `_`; the rest
    becomes `of`. All times are `timing_seconds` and all scores `eval_score`, with everything after the first level in
    `of`.
    """
    first, *rest = name.split("/")
    if gauge := {"timing": "timing_seconds", "eval": "eval_score"}.get(first):
        return gauge, value, "/".join(rest)
    return re.sub(r"[^A-Za-z0-9_]", "_", "_".join([first, *rest[:1]])), value, "/".join(rest[1:])


def write_targets(path: Path) -> None:
    """Writes the addresses of the metrics agents of this cluster's live nodes to `path`, for Prometheus.

    The file has the format of `file_sd_configs`.

    Does nothing if Ray has no metrics agent. A failure to write is only logged. Ray must have been joined.
    """
    if not has_agent():
        return
    alive = [node for node in ray.nodes() if node["Alive"]]
    targets = sorted({f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in alive})
    try:
        write_atomic(path, json.dumps([{"targets": targets, "labels": {"job": "distill_rl"}}]) + "\n")
    except OSError as error:
        log.warning("%s could not be written: %s", path, error)


# A Chrome trace of a run: when each actor ran which call. Ray records the calls; this adds the actors' names.

_MAX_READS = 6
"""Workers report their events about once a second, so events are read until two reads in a row return equally many."""


def write_timeline(path: Path, names: Mapping[str, str]) -> None:
    """Writes a trace of the run's calls for chrome://tracing or ui.perfetto.dev.

    Ray must still run. Takes a few seconds.

    The trace has one row for the driver, then one per worker in the order of `names`. Every call is a box that contains
    Ray's phases: fetching the arguments, running, storing the results. Ray keeps the newest 10,000 calls of a cluster
    (`RAY_task_events_max_num_task_in_gcs`), so the trace of a long run covers its end. A failure is only logged; it does
    not end the run.

    Args:
        path: written atomically.
        names: of the rows, by worker id (`ray.get_runtime_context().get_worker_id()`); other workers are left out.
    """
    try:
        driver_id = ray.get_runtime_context().get_worker_id()
        rows = {f"driver:{driver_id}": "driver"} | {f"worker:{worker}": name for worker, name in names.items()}
        write_atomic(path, json.dumps(trace(_read(rows), rows), allow_nan=False))
    except (OSError, RuntimeError, ValueError, RayError) as error:
        log.warning("%s could not be written: %s: %s", path, type(error).__name__, error)


def trace(events: Iterable[Mapping[str, Any]], rows: Mapping[str, str]) -> dict[str, Any]:
    """Converts Ray's events to a trace in Chrome's format (for JSON) whose first event is at time 0.

    Perfetto needs numbers for processes and threads, with their names in separate events. A process of the trace is a
    node, named by its address; a thread is a row.

    Args:
        events: as `ray.timeline()` returns them, times in microseconds, in any order.
        rows: names by Ray's `tid`, in the order in which they are shown; events of other threads are left out.
    """
    kept = sorted((event for event in events if event["tid"] in rows), key=lambda event: event["ts"])
    start = kept[0]["ts"] if kept else 0.0
    processes = {node: i for i, node in enumerate(dict.fromkeys(event["pid"] for event in kept))}
    threads = {row: i for i, row in enumerate(rows)}
    metadata = [_metadata("process_name", i, 0, name=f"node {node}") for node, i in processes.items()]
    for process, row in dict.fromkeys((processes[event["pid"]], event["tid"]) for event in kept):
        thread = threads[row]
        metadata.append(_metadata("thread_name", process, thread, name=rows[row]))
        metadata.append(_metadata("thread_sort_index", process, thread, sort_index=thread))
    calls = [
        {**event, "pid": processes[event["pid"]], "tid": threads[event["tid"]], "ts": event["ts"] - start}
        for event in kept
    ]
    return {"traceEvents": [*metadata, *calls], "displayTimeUnit": "ms", "otherData": {"start_s": start / 1e6}}


def _metadata(kind: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    """A metadata event of the trace format: names a process or thread."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _read(rows: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns Ray's events whose `tid` is in `rows`, once two reads return equally many, or after six reads."""
    events: list[dict[str, Any]] = []
    for _ in range(_MAX_READS):
        previous, events = events, [event for event in ray.timeline() if event["tid"] in rows]
        if events and len(events) == len(previous):
            break
    return events
