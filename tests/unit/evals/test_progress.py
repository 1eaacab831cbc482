"""Progress on a terminal and in a log."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from distill_rl.evals.run import ConsoleProgress, Counts, FileProgress, read_counts


def rows(count: int, score: float) -> list[dict[str, object]]:
    return [{"score": score, "num_tokens": 3, "completion": "x"}] * count


def printed(*, terminal: bool, seconds: list[float]) -> tuple[ConsoleProgress, io.StringIO]:
    file = io.StringIO()
    clock = iter(seconds)
    now = [0.0]

    def read() -> float:
        now[0] = next(clock, now[0])
        return now[0]

    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    return ConsoleProgress(console=console, interval_s=10.0, clock=read), file


def test_log_gets_a_first_line_one_per_interval_and_a_last_one() -> None:
    progress, file = printed(terminal=False, seconds=[0.0, 1.0, 1.0, 5.0, 5.0, 12.0, 12.0, 20.0])
    with progress.suite("student", "math", 8, []) as shown:
        shown.add(rows(2, 1.0))
        shown.add(rows(2, 1.0))
        shown.add(rows(2, 0.0))
        shown.add(rows(2, 0.5))
    assert file.getvalue().splitlines() == [
        "math  student: 2/8  score 1.000  6 tokens/s",
        "math  student: 6/8  score 0.667  2 tokens/s  0:06 left",
        "math  student: 8/8  score 0.625  1 tokens/s  0:00 left",
    ]


def test_finished_items_are_reported_and_counted() -> None:
    progress, file = printed(terminal=False, seconds=[0.0])
    with progress.suite("student", "math", 4, rows(3, 1.0)) as shown:
        shown.add(rows(1, 0.0))
    first, last = file.getvalue().splitlines()
    assert first == "math  student: 3 of 4 items are already done"
    assert last.startswith("math  student: 4/4  score 0.750")


def test_a_terminal_gets_a_bar() -> None:
    progress, file = printed(terminal=True, seconds=[0.0])
    with progress.suite("student", "math", 4, []) as shown:
        shown.add(rows(4, 1.0))
    assert "4/4" in file.getvalue()
    assert "score 1.000" in file.getvalue()


def test_names_cannot_forge_lines_or_control_the_terminal() -> None:
    progress, file = printed(terminal=False, seconds=[0.0])
    with progress.suite("a\nb\x1b[2J", "math", 1, []) as shown:
        shown.add(rows(1, 1.0))
    progress.warn("odd\x1b[31m data\nnext")
    assert "\x1b" not in file.getvalue()
    assert len(file.getvalue().splitlines()) == 2


def test_counts_are_in_a_file_while_the_suite_runs(tmp_path: Path) -> None:
    path, now = tmp_path / "counts.json", [0.0]
    with (
        FileProgress(path, clock=lambda: now[0]) as progress,
        progress.suite("student", "math", 2000, rows(4, 1.0)) as shown,
    ):
        now[0] = 2.0
        shown.add(rows(6, 0.0))
        counts = read_counts(path)
        assert counts == Counts("math", 10, 2000, 0.4, 3.0)
        assert str(counts) == "math: 10 of 2,000 items, 3.0 items/s, score 0.400"
        assert str(replace(counts, done=0)) == "math: 0 of 2,000 items, 3.0 items/s"
        now[0] = 2.5  # too soon for the next one
        shown.add(rows(1, 0.0))
        assert read_counts(path) == counts
    assert read_counts(path) is None
