"""A Chrome trace of a run: who called whom, when, and what overlapped. Ray records every call; this gives it names."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from distill_rl.system.files import write_atomic

_MOST_READS = 6
"""Workers hand in their events about once a second: they are read until a second look finds no more, but not for ever."""

DRIVER = "driver"

log = logging.getLogger(__name__)


def write_timeline(path: Path, names: Mapping[str, str]) -> bool:
    """Writes what this driver and some workers did, for chrome://tracing or ui.perfetto.dev; to be called while Ray runs.

    A row per worker in the order given, below the driver's; a box per call, and in it Ray's own phases: fetching the
    arguments, running, storing the results. Ray keeps the newest 100,000 calls of a cluster, so a long run has its end.

    Args:
        path: appears whole or not at all.
        names: of rows, by worker id (`ray.get_runtime_context().get_worker_id()`); what others did is left out.

    Returns:
        Whether it was written. It is never a reason to end a run: what went wrong is a warning in the log.
    """
    try:
        own = ray.get_runtime_context().get_worker_id()
        rows = {f"driver:{own}": DRIVER} | {f"worker:{worker}": name for worker, name in names.items()}
        write_atomic(path, json.dumps(trace(_read(rows), rows), allow_nan=False))
    except (OSError, RuntimeError, ValueError, RayError) as error:
        log.warning("%s could not be written: %s: %s", path, type(error).__name__, error)
        return False
    return True


def trace(events: Iterable[Mapping[str, Any]], rows: Mapping[str, str]) -> dict[str, Any]:
    """Ray's events as a trace in Chrome's format: of `rows` only (Ray's `tid` → name), from time 0 on.

    Perfetto wants processes and threads to be numbers with names. A process is a node, by address.
    """
    kept = sorted((event for event in events if event["tid"] in rows), key=lambda event: event["ts"])
    start = kept[0]["ts"] if kept else 0.0
    nodes = {node: number for number, node in enumerate(dict.fromkeys(event["pid"] for event in kept))}
    threads = {row: number for number, row in enumerate(rows)}
    placed = dict.fromkeys((nodes[event["pid"]], event["tid"]) for event in kept)
    named = [_name("process_name", number, 0, f"node {node}") for node, number in nodes.items()]
    for node, row in placed:
        named.append(_name("thread_name", node, threads[row], rows[row]))
        order = {"name": "thread_sort_index", "ph": "M", "pid": node, "tid": threads[row]}
        named.append({**order, "args": {"sort_index": threads[row]}})
    boxes = [
        {**event, "pid": nodes[event["pid"]], "tid": threads[event["tid"]], "ts": event["ts"] - start} for event in kept
    ]
    return {"traceEvents": [*named, *boxes], "displayTimeUnit": "ms", "otherData": {"start_s": start / 1e6}}


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _read(rows: Mapping[str, str]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for found in _reads(rows):
        if found and len(found) == len(events):
            break
        events = found
    return events


def _reads(rows: Mapping[str, str]) -> Iterator[list[dict[str, Any]]]:
    """This run's events again and again; each look takes a second."""
    for _ in range(_MOST_READS):
        yield [event for event in ray.timeline() if event["tid"] in rows]
