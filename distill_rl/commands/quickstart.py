"""distill-rl quickstart: a whole distillation in miniature."""

from __future__ import annotations

from typing import Any

from distill_rl.demo import quickstart as demo


def quickstart(**options: Any) -> int:
    """Runs the quickstart with the fields of `demo.quickstart.Options`; its results and errors are those of
    `demo.quickstart.quickstart`.
    """
    return demo.quickstart(demo.Options(**options))
