"""The tables and figures of docs/results.md, from the finished rows.

The page is written by hand, but for what stands between `<!-- table: NAME -->` and `<!-- end -->`, which is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from distill_rl.observe.report.report import Chart, Curve, Dots, dots_svg, lines_svg
from distill_rl.system.files import write_atomic
from tests.bench import harness
from tests.bench.methods.settings import ROWS
from tests.bench.methods.tables import BASELINE, TABLES, Finding, Rows, Settings, findings

BY_ROWS = "few_rows"
"""The table whose tasks differ in the number of rows alone."""


def write_page(page: Path, figures: Path, rows: Rows) -> None:
    """Replaces the tables of the page, and writes a figure of every task below the folder `figures`.

    Raises:
        KeyError: the page has a place for a table that does not exist.
    """
    figures.mkdir(parents=True, exist_ok=True)

    def tables(name: str) -> str:
        parts = [*(_by_rows(rows) if name == BY_ROWS else _by_task(name, rows))]
        for part in parts:
            write_atomic(figures / part.file, part.svg)
        text = "\n\n".join(part.markdown(figures.relative_to(page.parent)) for part in parts)
        return text or "No rows yet."

    write_atomic(page, harness.with_tables(page.read_text("utf-8"), tables))


class Part:
    """A table of the page with its figure.

    Args:
        file: name of the figure.
        notes: lines below the table.
    """

    def __init__(
        self,
        title: str,
        file: str,
        svg: str,
        heading: Sequence[str],
        body: Sequence[Sequence[str]],
        notes: Sequence[str] = (),
    ):
        self.title, self.file, self.svg, self.heading, self.body, self.notes = title, file, svg, heading, body, notes

    def markdown(self, figures: Path) -> str:
        """The figure, the table, and the notes."""
        table = harness.markdown_table(self.heading, self.body)
        return "\n\n".join(
            [f"**{self.title}**", f"![{self.title}]({(figures / self.file).as_posix()})", table, *self.notes]
        )


def _by_task(name: str, rows: Rows) -> Iterator[Part]:
    """A part for every task of a table."""
    table = TABLES[name]
    tasks = table.settings(rows)
    for task, settings in tasks.items():
        if not (found := findings(rows, task, settings)):
            continue
        measure, title = rows.measure(task), table.title if len(tasks) == 1 else f"{table.title}: {task}"
        dots = [Dots(one.setting, one.seeds, one.score, one.setting == BASELINE) for one in found]
        columns = _columns(measure, found, with_cost=table.fresh)
        file = f"{name}-{re.sub(r'[^a-z]+', '-', task.lower())}.svg"
        heading, body = list(columns), [[cell(one) for cell in columns.values()] for one in found]
        notes = [*_failures(rows, task, settings), _effort(rows, {task: settings})]
        yield Part(
            title, file, dots_svg(title, dots, f"{measure} (dots: seeds, bar: mean; orange: CE)"), heading, body, notes
        )


def _failures(rows: Rows, task: str, settings: Settings) -> list[str]:
    """A line per training of a task that ended without a student."""
    failed = [
        f"{row.setting}, rate {row.rate:g}, seed {row.seed}: {record['failed']}"
        for row, record in rows.by_row.items()
        if row.task == task and row.setting in settings and "failed" in record
    ]
    return [f"No student: {line}." for line in failed]


def _effort(rows: Rows, tasks: Mapping[str, Settings]) -> str:
    """The number of trainings of a table's tasks, and how long their steps took."""
    trained = [record for row, record in rows.by_row.items() if row.setting in tasks.get(row.task, ())]
    seconds = sum(record["seconds"] for record in trained if "failed" not in record)
    return f"{len(trained)} trainings; their steps took {seconds / 3600:.1f} hours of a core."


def _columns(measure: str, found: Sequence[Finding], *, with_cost: bool) -> dict[str, Callable[[Finding], str]]:
    """The columns of a task's table: heading → cell.

    Args:
        with_cost: with speed and memory, which can be compared.
    """
    columns: dict[str, Callable[[Finding], str]] = {
        "setting": lambda one: one.setting,
        measure: lambda one: f"**{one.score:.3f}**",
        **{f"seed {i}": _of_seed(i) for i in range(len(found[0].seeds))},
        "difference to CE": lambda one: "" if one.setting == BASELINE else "{:+.3f} to {:+.3f}".format(*one.interval),
        "to CE": lambda one: one.verdict,
        "to the best": lambda one: one.against_best,
    }
    if measure != "bits per byte":
        columns["bits per byte"] = lambda one: f"{one.bits_per_byte:.3f}"
    if any(one.kl is not None for one in found):
        columns["KL to the teacher"] = lambda one: "–" if one.kl is None else f"{one.kl:.3f}"
    if any(one.elsewhere is not None for one in found):
        columns["elsewhere"] = lambda one: "–" if one.elsewhere is None else f"{one.elsewhere:.3f}"
        columns["CPU minutes"] = lambda one: "–" if one.cpu_minutes is None else f"{one.cpu_minutes:.1f}"
    columns["rate"] = lambda one: f"{one.rate:g}"
    if with_cost:
        columns["tokens/s"] = lambda one: f"{one.tokens_per_second:,.0f}"
        columns["peak MiB"] = lambda one: f"{one.peak_mib:,.0f}"
    return columns


def _of_seed(i: int) -> Callable[[Finding], str]:
    return lambda one: f"{one.seeds[i]:.3f}"


def _by_rows(rows: Rows) -> Iterator[Part]:
    """One part in which a column is a number of rows."""
    table = TABLES[BY_ROWS]
    tasks = table.settings(rows)
    by_task = {task: {one.setting: one for one in findings(rows, task, of)} for task, of in tasks.items()}
    complete = [
        setting for setting in next(iter(by_task.values())) if all(setting in found for found in by_task.values())
    ]
    if not complete:
        return
    columns: Mapping[str, list[Finding]] = {name: [found[name] for found in by_task.values()] for name in complete}
    curves = [Curve(name, [(count, one.score) for count, one in zip(ROWS, found)]) for name, found in columns.items()]
    svg = lines_svg(
        Chart(table.title, curves), x_name="training rows, logarithmic", y_name="exact match, mean of the seeds"
    )
    body = [[name, *(f"{one.score:.3f}{_MARKS[one.verdict]}" for one in found)] for name, found in columns.items()]
    heading = ["setting", *(f"{count} rows" for count in ROWS)]
    yield Part(table.title, f"{BY_ROWS}.svg", svg, heading, body, [_effort(rows, tasks)])


_MARKS = {"": "", "tie": " =", "better": " +", "worse": " −"}
"""Verdicts against CE."""
