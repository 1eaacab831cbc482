"""distill-rl report: one static HTML of a run."""

from __future__ import annotations

from pathlib import Path

from distill_rl.errors import ConfigError
from distill_rl.observe.log import say


def report(run: Path) -> int:
    """Writes RUN/report.html.

    Raises:
        ConfigError: not a run directory.
    """
    from distill_rl.observe.report import write_report

    if not (run / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run}",
            "must be a run directory with a metrics.jsonl",
            remedy="give the folder that distill-rl train wrote",
        )
    say(f"report    {write_report(run)}")
    return 0
