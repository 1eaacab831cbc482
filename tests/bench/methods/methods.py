"""Which method teaches best: every method, target, divergence and temperature on equal terms, and the tables of docs/results.md.

A row is a training on one thread in this process's children: settings, learning rate and seed. Rows are kept in a file per table, and
are not trained again while they are there; `--rows FOLDER` begins anew elsewhere. What a row changes in the configuration of its
task stands in the row, so that `distill-rl train` can repeat it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill_rl.system.environment import ROOT
from tests.bench import harness
from tests.bench.methods.page import write_page
from tests.bench.methods.run import complete, read_rows, rows_file
from tests.bench.methods.settings import TRL_COMMIT, is_trl
from tests.bench.methods.tables import TABLES, Rows, Settings, findings

PAGE, FIGURES = ROOT / "docs" / "results.md", ROOT / "docs" / "results"
COMMITTED = ROOT / "docs" / "benchmarks" / "methods"


def measure(
    folder: Path,
    *,
    table: str | None = None,
    setting: str | None = None,
    rows: Path = COMMITTED,
    material: Path = Path(".cache/methods"),
    processes: int = os.cpu_count() or 1,
    page: bool = False,
) -> dict[str, Any]:
    """Trains what is missing of the tables.

    Args:
        table: the only table to complete; default: all of them, one after another.
        setting: the only setting to train, of the tables that have it.
        rows: folder of the finished rows. Of a table that is not in it, but says which settings another one compares, the committed
            rows are taken.
        material: folder of models and data, made when needed.
        processes: trainings at a time.
        page: train nothing, and write the tables and figures of docs/results.md.
    """
    if table is not None and table not in TABLES:
        raise harness.Refused(f"unknown table {table!r}; the tables are: {' '.join(TABLES)}")
    chosen = (*TABLES,) if table is None else (table,)
    rows.mkdir(parents=True, exist_ok=True)
    found = read_rows(_files(rows, chosen))
    _require_trained_so(found)
    _require_known(setting, [TABLES[name].settings(found) for name in chosen])
    if page:
        write_page(PAGE, FIGURES, found)
        return figures(found)
    for name in chosen:
        for other in TABLES[name].needs:
            if any(found.missing(task, settings) for task, settings in TABLES[other].settings(found).items()):
                raise harness.Refused(
                    f"the table {name} takes the best settings of the table {other}: complete that first"
                )
        tasks = _ours(_only(setting, TABLES[name].settings(found)), found)
        # Speed and memory are compared where each row has a process of its own, so nothing may run beside it.
        at_once = 1 if TABLES[name].fresh else processes
        complete(tasks, found, material.absolute(), rows_file(rows, name), at_once, fresh=TABLES[name].fresh)
    return figures(found)


def _files(rows: Path, chosen: Iterable[str]) -> list[Path]:
    """All files of finished rows: those in `rows`, and the committed ones of tables that the chosen ones need and it has not."""
    needed = {other for name in chosen for other in TABLES[name].needs}
    own = [rows_file(rows, name) for name in TABLES]
    return own + [rows_file(COMMITTED, name) for name in sorted(needed) if not rows_file(rows, name).exists()]


def _require_trained_so(rows: Rows) -> None:
    """Raises Refused if a setting has changed since its rows were trained."""
    now = {
        (task, name): of
        for table in TABLES.values()
        for task, settings in table.settings(rows).items()
        for name, of in settings.items()
    }
    for row, record in rows.by_row.items():
        then = tuple(record["overrides"])
        if then != now.get((row.task, row.setting), then):
            changed = f"{' '.join(then)}; got {' '.join(now[row.task, row.setting])}"
            raise harness.Refused(f"{row.name}: its setting must be that of its row, {changed}; delete its rows")


def _ours(tasks: Mapping[str, Settings], rows: Rows) -> Mapping[str, Settings]:
    """The settings without those of TRL, whose trainers are not run here; prints a line if rows of theirs are missing."""
    by_trl, ours = (
        {task: {name: of for name, of in settings.items() if is_trl(of) == wanted} for task, settings in tasks.items()}
        for wanted in (True, False)
    )
    if missing := [row for task, settings in by_trl.items() for row in rows.missing(task, settings)]:
        print(f"not trained: {len(missing)} rows of TRL's trainers, which the benchmark of commit {TRL_COMMIT} runs")
    return ours


def _require_known(setting: str | None, tables: Iterable[Mapping[str, Settings]]) -> None:
    """Raises Refused for a setting that none of the tables has."""
    known = dict.fromkeys(name for tasks in tables for settings in tasks.values() for name in settings)
    if setting is not None and setting not in known:
        raise harness.Refused(f"unknown setting {setting!r}; there are: {', '.join(map(repr, known))}")


def _only(setting: str | None, tasks: Mapping[str, Settings]) -> Mapping[str, Settings]:
    """One setting of a table, or all of them if none is named."""
    if setting is None:
        return tasks
    return {task: {setting: settings[setting]} for task, settings in tasks.items() if setting in settings}


def figures(rows: Rows) -> dict[str, Any]:
    """Per table and task the findings of the settings that have been trained on all seeds, the best first."""
    found = {
        f"{name}: {task}": [asdict(finding) for finding in findings(rows, task, settings)]
        for name, table in TABLES.items()
        for task, settings in table.settings(rows).items()
    }
    return {title: records for title, records in found.items() if records}


main = harness.program("methods", measure, columns=("setting", "rate", "score", "seeds", "interval", "verdict", "kl"))

if __name__ == "__main__":
    sys.exit(main())
