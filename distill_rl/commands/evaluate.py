"""distill-rl eval: suites on a model folder, offline."""

from __future__ import annotations

import os
from collections.abc import Sequence


def evaluate(model: str, suites: Sequence[str], *, data: str, out: str | None, limit: int | None) -> int:
    """Prints a table; with `out`, results and items are written there.

    Raises:
        ConfigError: unknown suite, or no model at that folder.
        DataError: bad rows in the suites' data.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from distill_rl.evals.run import evaluate as run_suites
    from distill_rl.observe.log import printable

    results = run_suites(model, [suite.strip() for suite in suites if suite.strip()], data, out_dir=out, limit=limit)
    table = Table(title=escape(printable(model)), title_justify="left")
    for heading in ("suite", "task"):
        table.add_column(heading)
    for heading in ("score", "95 % interval", "items", "cut off"):
        table.add_column(heading, justify="right")
    for suite, result in results.items():
        for task, part in {"all": result, **result["per_task"]}.items():
            low, high = part["interval"]
            table.add_row(
                suite,
                task,
                f"{part['score']:.3f}",
                f"{low:.3f} to {high:.3f}",
                str(part["num_items"]),
                str(part["truncated"]),
            )
    Console().print(table)
    return 0
