"""distill-rl try: is a teacher worth it for a student, on a text?"""

from __future__ import annotations

from typing import Any

from distill_rl.trial import run


def trial(**options: Any) -> int:
    """Tries a pair with the fields of `run.Options`; its results and errors are those of `run.try_pair`."""
    return run.try_pair(run.Options(**options))
