"""distill-rl try: is a teacher worth it for a student, on a text?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill_rl.demo.pair import TrialRequest, default_out
from distill_rl.demo.trial import try_pair


def trial(*, student: str, teacher: str, out: Path | None, **options: Any) -> int:
    """Tries a pair with the fields of `TrialRequest`; its results and errors are those of `demo.trial.try_pair`."""
    return try_pair(TrialRequest(student, teacher, out=out or default_out(student, teacher), **options))
