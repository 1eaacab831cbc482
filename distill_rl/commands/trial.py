"""distill-rl try: is a teacher worth it for a student, on a text?"""

from __future__ import annotations

from typing import Any

from distill_rl.demo import trial as demo


def trial(**options: Any) -> int:
    """Tries a pair with the fields of `demo.trial.Options`; its results and errors are those of `demo.trial.try_pair`."""
    return demo.try_pair(demo.Options(**options))
