"""Prints the quickstart's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill_rl.demo.recipe import RECIPE
from distill_rl.observe.terminal import open_console

ROWS = {
    "teacher": "teacher",
    "student_before": "student, untrained",
    "student_after": "student, distilled",
    "ce_only": "control, no teacher",
    "half_rows": "student, half the rows",
}
CROSS_NOTE = """\
The teacher has another tokenizer. Of the chunks of text that begin and end at
token boundaries of both, {share:.0%} are one token on either side; the others are
longer. They were compared by hybrid and cover {coverage:.0%} of the tokens that the
student is trained on."""
NOTE = """\
Student and control start from the same weights and see the same rows in the
same order, {wrong:.0%} of them with a wrong answer. The control imitates the rows
(CE), the student matches the teacher on them (KD). That noise is why
distillation wins. Without wrong answers the two would tie. The last student
had the teacher, but half of the rows and half of the steps."""


def print_table(scores: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Prints to stdout exact match per model, with 95 % intervals and per task, notes, speed and time; with two
    tokenizers also how well they match.

    Args:
        scores: result of the suite by model, with the names of ROWS.
        summary: as `run.summarise` returns it.
    """
    from rich import box
    from rich.table import Table

    tasks = list(next(iter(scores.values()))["per_task"])
    title = f"Exact match on {summary['num_questions']} held-out questions, seed {summary['seed']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("model", no_wrap=True)
    table.add_column("exact match", justify="right")
    table.add_column("95 % interval", justify="right", no_wrap=True)
    for task in tasks:
        table.add_column(task, justify="right")
    for name, result in scores.items():
        low, high = result["interval"]
        by_task = (f"{result['per_task'][task]['score']:.3f}" for task in tasks)
        style = "bold" if name == "student_after" else None
        table.add_row(ROWS[name], f"{result['score']:.3f}", f"{low:.3f} to {high:.3f}", *by_task, style=style)
    console = open_console(110)
    console.print()
    console.print(table)
    console.print(NOTE.format(wrong=RECIPE.wrong_share))
    if "one_to_one_share" in summary:
        console.print("\n" + CROSS_NOTE.format(share=summary["one_to_one_share"], coverage=summary["coverage"]))
    speed = f"{summary['tokens_per_second']:,.0f} answer tokens per second"
    console.print(f"\n{summary['seconds']:.0f} s in all; {speed} while distilling.\n")
