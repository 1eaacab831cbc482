"""distill-rl report: writes one static HTML page about a run, or about evaluated models side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.errors import ConfigError, DataError
from distill_rl.observe.log import open_console, say

if TYPE_CHECKING:
    from rich.table import Table

    from distill_rl.observe.report.scores import Evaluation, Score

COMPARISON = "comparison.html"
_COLUMNS = (
    "steps",
    "KD, validation",
    "CE, validation",
    "top-1 agreement, validation",
    "KD, train",
    "tokens, trained",
    "time spent in steps",
)
"""Figures of a run in the table of several."""
WIDE = 140
"""Minimum terminal width, in columns, for one line per model."""


def report(paths: Sequence[Path], out: Path | None = None, baseline: str | None = None) -> int:
    """Writes one HTML page about a run, or about evaluated models side by side; returns 0.

    Run directories: RUN/report.html for the first run, compared with the others. Folders of evaluation results: prints
    a table and writes comparison.html into the first folder.

    The paths count as run directories if each of them holds a metrics.jsonl.

    Args:
        out: the file to write instead.
        baseline: the model that the others are compared with; None: the first one.

    Raises:
        ConfigError: a folder that holds neither, an unknown baseline, or a file that cannot be written.
        DataError: damaged results, one line each.
    """
    from distill_rl.evals import compare

    write: Callable[[], object]
    paths = [run for path in paths for run in _runs_of(path)]
    if all((path / "metrics.jsonl").is_file() for path in paths):
        from distill_rl.observe.report.report import write_report

        first, *others = paths
        target = out or first / "report.html"
        evaluation = compare.of_run(first, others, baseline)
        if others:
            _print_runs(paths)
        write = partial(write_report, first, comparisons=others, evaluation=evaluation, out=target)
    else:
        from distill_rl.observe.report.report import write_comparison

        evaluation = compare.compare(compare.find(paths), baseline)
        DataError.raise_all(evaluation.problems)
        print_scores(evaluation)
        target = out or paths[0] / COMPARISON
        write = partial(write_comparison, evaluation, target)
    try:
        write()
    except OSError as error:
        rule = "must be a file that can be written"
        raise ConfigError(str(target), rule, error.strerror, "choose another with --out") from error
    say(f"report    {target}")
    return 0


def _runs_of(path: Path) -> list[Path]:
    """The runs of an array of jobs (`array.tsv`) that have begun, by its folder; any other path as it is."""
    if not (path / "array.tsv").is_file() or (path / "metrics.jsonl").exists():
        return [path]
    names = [line.partition("\t")[0] for line in (path / "array.tsv").read_text().splitlines()]
    return [path / name for name in names if (path / name / "metrics.jsonl").is_file()] or [path]


def _print_runs(paths: Sequence[Path]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Column, Table

    from distill_rl.observe.report.report import figures, read_run

    rows = {}
    for path in paths:
        run = read_run(path)
        scores = {name for record in run.records for name in record if name.startswith("eval/")}
        rows[path.name] = figures(run) | {name: f"{run.last(name):.4f}" for name in sorted(scores)}
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns = [name for name in names if name in _COLUMNS or name.startswith("eval/")]
    numbers = (Column(name, justify="right", overflow="fold") for name in columns)
    table = Table(Column("run", overflow="fold"), *numbers, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, row in rows.items():
        table.add_row(escape(name), *(row.get(column, "") for column in columns))
    open_console(WIDE).print(table)


def print_scores(evaluation: Evaluation) -> None:
    """Prints a table per suite with scores, intervals, differences to the baseline and failures, then all notes.

    On a terminal narrower than WIDE the failures follow the table, one line per model.
    """
    from rich.markup import escape

    console = open_console(WIDE)
    is_wide = console.width >= WIDE
    for suite, rows in evaluation.by_suite().items():
        console.print(f"\n[bold]{escape(suite)}[/]  {escape(rows[0].title)}", soft_wrap=True)
        console.print(_table(rows, evaluation, with_failures=is_wide))
        if not is_wide:
            for row in rows:
                console.print(escape(f"{row.model}: {_failures(row, evaluation)}"), soft_wrap=True)
    for note in evaluation.notes:
        console.print(f"note      {escape(note)}", soft_wrap=True)


def _table(rows: Sequence[Score], evaluation: Evaluation, *, with_failures: bool) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Column, Table

    compared = [] if evaluation.baseline is None else [f"to {escape(evaluation.baseline)}", "95 % interval"]
    headings = ("score", "95 % interval", *compared, "items")
    numbers = (Column(name, justify="right", overflow="fold") for name in headings)
    table = Table(Column("model", overflow="fold"), *numbers, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if with_failures:
        table.add_column("not right", overflow="fold")
    for row in rows:
        part, difference = row.whole, row.whole.difference
        cells = [row.model, f"{part.score:.3f}"]
        cells.append(f"{part.interval[0]:.3f} to {part.interval[1]:.3f}" if part.interval else "")
        if evaluation.baseline is not None:
            cells.append(f"{difference.value:+.3f}" if difference else "")
            cells.append(f"{difference.interval[0]:+.3f} to {difference.interval[1]:+.3f}" if difference else "")
        ungraded = f" ({part.ungraded:,} not graded)" if part.ungraded else ""
        cells.append(f"{part.num_items:,}{ungraded}" if part.num_items is not None else ungraded.strip())
        if with_failures:
            cells.append(_failures(row, evaluation))
        table.add_row(*map(escape, cells))
    return table


def _failures(row: Score, evaluation: Evaluation) -> str:
    counts = row.whole.outcomes
    return ", ".join(f"{label} {counts[name]:,}" for name, label in evaluation.outcomes().items() if counts.get(name))
