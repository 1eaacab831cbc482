"""distill-rl report: one static HTML of a run, or of evaluated models side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.errors import ConfigError, DataError
from distill_rl.observe.log import say

if TYPE_CHECKING:
    from rich.table import Table

    from distill_rl.observe.report.scores import Evaluation, Score

COMPARISON = "comparison.html"
WIDE = 140
"""columns of a terminal on which everything stands in one line per model"""


def report(*paths: Path, out: Path | None = None, baseline: str | None = None) -> int:
    """Writes RUN/report.html for run directories (curves of the first, the others beside), or a table and FOLDER/comparison.html
    for folders of evaluation results.

    Args:
        out: the file that is written instead.
        baseline: the model that differences are to; None: the first one.

    Raises:
        ConfigError: a folder that holds neither, no such baseline, or a file that cannot be written.
        DataError: damaged results, one line each.
    """
    from distill_rl.evals.results import compare

    if all((path / "metrics.jsonl").is_file() for path in paths):
        from distill_rl.observe.report.report import write_report

        first, *others = paths
        target = out or first / "report.html"
        with _writing(target):
            write_report(first, comparisons=others, evaluation=compare.of_run(first, others, baseline), out=target)
    else:
        from distill_rl.observe.report.comparison import write_comparison

        evaluation = compare.compare(compare.find(paths), baseline)
        if evaluation.problems:
            raise DataError.many(evaluation.problems)
        print_scores(evaluation)
        target = out or paths[0] / COMPARISON
        with _writing(target):
            write_comparison(evaluation, target)
    say(f"report    {target}")
    return 0


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            str(target), "must be a file that can be written", error.strerror, "choose another with --out"
        ) from error


def print_scores(evaluation: Evaluation) -> None:
    """A table per suite on the terminal, and what a reader must know before comparing."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDE)  # a file or a pipe has no width to keep to
    for suite, rows in evaluation.by_suite().items():
        console.print(f"\n[bold]{escape(suite)}[/]  {escape(rows[0].title)}", soft_wrap=True)
        console.print(_table(rows, evaluation, with_rest=console.width >= WIDE))
        if console.width < WIDE:
            for row in rows:
                console.print(escape(f"{row.model}: {_rest(row, evaluation)}"), soft_wrap=True)
    for note in evaluation.notes:
        console.print(f"note      {escape(note)}", soft_wrap=True)


def _table(rows: Sequence[Score], evaluation: Evaluation, *, with_rest: bool) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    headings = ["score", "95 % interval"]
    if evaluation.baseline is not None:
        headings += [f"to {escape(evaluation.baseline)}", "95 % interval"]
    for heading in [*headings, "items"]:
        table.add_column(heading, justify="right", overflow="fold")
    if with_rest:
        table.add_column("not right", overflow="fold")
    for row in rows:
        part, found = row.whole, row.whole.difference
        cells = [row.model, f"{part.score:.3f}"]
        cells.append(f"{part.interval[0]:.3f} to {part.interval[1]:.3f}" if part.interval else "")
        if evaluation.baseline is not None:
            cells.append(f"{found.value:+.3f}" if found else "")
            cells.append(f"{found.interval[0]:+.3f} to {found.interval[1]:+.3f}" if found else "")
        cells.append(f"{part.num_items:,}" if part.num_items is not None else "")
        table.add_row(*map(escape, [*cells, _rest(row, evaluation)] if with_rest else cells))
    return table


def _rest(row: Score, evaluation: Evaluation) -> str:
    """What became of the items that were not answered rightly."""
    counted = row.whole.outcomes
    return ", ".join(f"{words} {counted[name]:,}" for name, words in evaluation.outcomes().items() if counted.get(name))
