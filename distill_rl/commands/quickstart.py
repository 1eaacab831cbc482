"""distill-rl quickstart: a whole distillation in miniature."""

from __future__ import annotations

from typing import Any

from distill_rl.quickstart import run


def quickstart(**options: Any) -> int:
    """Runs the quickstart with the fields of `run.Options`; its results and errors are those of `run.quickstart`."""
    return run.quickstart(run.Options(**options))
