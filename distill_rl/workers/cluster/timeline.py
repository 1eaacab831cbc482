"""A Chrome trace of a run: when each actor ran which call. Ray records the calls; this adds the actors' names."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from distill_rl.system.files import write_atomic

_MAX_READS = 6
"""Workers report their events about once a second, so events are read until two reads in a row return equally many."""

log = logging.getLogger(__name__)


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
    metadata = [_metadata("process_name", i, 0, {"name": f"node {node}"}) for node, i in processes.items()]
    for process, row in dict.fromkeys((processes[event["pid"]], event["tid"]) for event in kept):
        thread = threads[row]
        metadata.append(_metadata("thread_name", process, thread, {"name": rows[row]}))
        metadata.append(_metadata("thread_sort_index", process, thread, {"sort_index": thread}))
    calls = [
        {**event, "pid": processes[event["pid"]], "tid": threads[event["tid"]], "ts": event["ts"] - start}
        for event in kept
    ]
    return {"traceEvents": [*metadata, *calls], "displayTimeUnit": "ms", "otherData": {"start_s": start / 1e6}}


def _metadata(name: str, process: int, thread: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A metadata event of the trace format: names a process or thread."""
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": dict(arguments)}


def _read(rows: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns Ray's events whose `tid` is in `rows`, once two reads return equally many, or after six reads."""
    events: list[dict[str, Any]] = []
    for _ in range(_MAX_READS):
        previous, events = events, [event for event in ray.timeline() if event["tid"] in rows]
        if events and len(events) == len(previous):
            break
    return events
