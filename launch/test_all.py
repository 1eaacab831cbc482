"""Runs test groups one after the other, each by `launch/test.sh GROUP`, and prints one table of their results.

    python launch/test_all.py [--logs FOLDER] GROUP...

A group's output goes to FOLDER/GROUP.log (runs/tests by default). Exit code: 0 if every group passed, otherwise 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich import box
from rich.markup import escape
from rich.table import Table

from distill_rl.observe.log import open_console

ROOT = Path(__file__).parents[1]
MAX_REASONS = 3


@dataclass(frozen=True)
class Result:
    group: str
    code: int
    seconds: float
    counts: Counter[str]
    """Tests by outcome: passed, failed, skipped. Empty if pytest did not start."""
    reasons: Counter[str]
    """Why tests were skipped."""


def run(group: str, logs: Path) -> Result:
    report = logs / f"{group}.xml"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    with (logs / f"{group}.log").open("wb") as log:
        command = ["bash", str(ROOT / "launch" / "test.sh"), group, f"--junitxml={report}"]
        code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
    counts, reasons = read_report(report) if report.exists() else (Counter(), Counter())
    return Result(group, code, time.monotonic() - start, counts, reasons)


def read_report(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Number of tests by outcome, and of skipped tests by reason, from pytest's JUnit XML."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            counts["skipped"] += 1
            reasons[skipped.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        else:
            counts["passed"] += 1
    return counts, reasons


def table(results: list[Result], logs: Path) -> Table:
    rows = Table(box=box.SIMPLE_HEAD)
    for heading in ("test group", "passed", "failed", "skipped", "seconds"):
        rows.add_column(heading, justify="left" if heading == "test group" else "right", no_wrap=True)
    rows.add_column("why skipped, or not run", overflow="fold")
    for result in results:
        why = [f"{count} × {reason}" for reason, count in result.reasons.most_common(MAX_REASONS)]
        if len(result.reasons) > MAX_REASONS:
            why.append(f"{len(result.reasons) - MAX_REASONS} more reasons")
        if not result.counts:
            why = [f"exit code {result.code}: see {logs / result.group}.log"]
        figures = [f"{result.counts[outcome]:,}" for outcome in ("passed", "failed", "skipped")]
        rows.add_row(result.group, *figures, f"{result.seconds:,.0f}", escape("; ".join(why)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="bash launch/test.sh all", description="Run test groups, print one table.")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "tests", help="folder of the groups' output")
    parser.add_argument("groups", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    console = open_console(160)
    results = []
    for group in options.groups:
        with console.status(f"{group} (log: {options.logs / group}.log)"):
            results.append(run(group, options.logs))
        outcome = "ok" if results[-1].code == 0 else f"exit code {results[-1].code}"
        console.print(f"{group}: {outcome}, {results[-1].seconds:,.0f} s")
    console.print(table(results, options.logs))
    return 0 if all(result.code == 0 for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
