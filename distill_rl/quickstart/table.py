"""The quickstart's result, as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROWS = {
    "teacher": "teacher",
    "student_before": "student, untrained",
    "student_after": "student, distilled (KD)",
    "ce_only": "student, same data without teacher (CE)",
}
NOTE = """\
Both students saw the same rows, 30 % of them with a wrong answer, in the same order, for the same number of steps.
That noise is why distillation wins: the teacher knows the tasks and does not repeat the wrong answers.
Without wrong answers the two would tie."""


def print_table(scores: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Prints exact match with its 95 % interval per model, and per task."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    tasks = list(next(iter(scores.values()))["per_task"])
    title = f"Exact match on {summary['num_questions']} held-out questions, seed {summary['seed']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("model", no_wrap=True)
    for heading in ("exact match", "95 % interval", *tasks):
        table.add_column(heading, justify="right")
    for name, label in ROWS.items():
        low, high = scores[name]["interval"]
        by_task = (f"{scores[name]['per_task'][task]['score']:.3f}" for task in tasks)
        style = "bold" if name == "student_after" else None
        table.add_row(label, f"{scores[name]['score']:.3f}", f"{low:.3f} to {high:.3f}", *by_task, style=style)
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 110))
    console.print()
    console.print(table)
    console.print(NOTE, highlight=False)
    console.print(
        f"{summary['seconds']:.0f} s in all; {summary['tokens_per_second']:,.0f} tokens per second while distilling.\n",
        highlight=False,
    )
