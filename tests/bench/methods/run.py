"""Trains the rows of tables that are missing, in several processes, and appends each to its table's file when it is done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from distill_rl.errors import NumericsError, first_line
from distill_rl.system.files import append_json_lines, read_json_lines
from distill_rl.system.processes import end_with
from tests.bench import harness, record
from tests.bench.methods.rows import Row, run_row
from tests.bench.methods.settings import Overrides
from tests.bench.methods.tables import Record, Rows, Settings

ENVIRONMENT = ("commit", "dirty", "cpu", "python", "torch", "transformers")
"""What a row says of where it was trained."""


def rows_file(folder: Path, table: str) -> Path:
    return folder / f"{table}.jsonl"


def read_rows(files: Iterable[Path]) -> Rows:
    """The finished rows of files; a file may be absent."""
    rows = Rows()
    for file in files:
        for found in read_json_lines(file):
            rows.add(found)
    return rows


def attempt_row(row: Row, overrides: Overrides, root: Path) -> Record:
    """As `run_row`; the record of a training that diverges says so."""
    try:
        return run_row(row, overrides, root)
    except NumericsError as error:
        return {**asdict(row), "overrides": list(overrides), "failed": first_line(error)}


def complete(
    tasks: Mapping[str, Settings],
    rows: Rows,
    root: Path,
    file: Path,
    processes: int,
    *,
    fresh: bool = False,
    attempt: Callable[[Row, Overrides, Path], Record] = attempt_row,
) -> None:
    """Trains the missing rows of a table; those that depend on a rate follow when it is known.

    Args:
        tasks: what the table compares on each task.
        rows: gets the new ones.
        root: folder of models and data.
        file: gets them too, a line for each.
        processes: number of processes, of one thread each.
        fresh: whether every row has a process of its own.
        attempt: trains a row in another process, and returns its record.
    """
    environment = record.environment()
    began = time.monotonic()
    with _pool(processes, fresh=fresh) as pool:
        running: dict[Future[Record], Row] = {}
        while True:
            for task, settings in tasks.items():
                for row in rows.missing(task, settings):
                    if row not in running.values():
                        running[pool.submit(attempt, row, settings[row.setting], root)] = row
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                found = {**future.result(), **{name: environment[name] for name in ENVIRONMENT}}
                append_json_lines(file, [found])
                rows.add(found)
                _say(found, len(running), time.monotonic() - began)


def _say(found: Record, left: int, seconds: float) -> None:
    """Prints a line on a finished row.

    Args:
        left: rows that are to be trained, as far as is known.
        seconds: since the table was begun.
    """
    name = Row(found["task"], found["setting"], found["rate"], found["seed"]).name
    result = found["failed"] if "failed" in found else f"{found['measure']} {found['test']['score']:.4f}"
    print(f"{seconds / 60:.0f} min, at least {left} more rows: {name}: {result}", flush=True)


@contextmanager
def _pool(processes: int, *, fresh: bool) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this one, and at once if the block raises."""
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), _begin, (os.getpid(),), max_tasks_per_child=1 if fresh else None
    )
    try:
        yield pool
    except BaseException:
        for process in pool._processes.values():
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    """Of a new process: it trains on one thread, reads nothing from a hub, and ends with its parent."""
    os.environ |= harness.ONE_THREAD
    end_with(parent)
