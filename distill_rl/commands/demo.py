"""distill-rl quickstart and try: a whole distillation in miniature, and whether a teacher is worth it for a student, on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill_rl.demo import quickstart as miniature
from distill_rl.demo.real import try_real
from distill_rl.demo.trial import try_pair
from distill_rl.demo.trial_setup import TrialRequest, default_out
from distill_rl.errors import ConfigError


def quickstart(*, real: bool, accept_terms: bool, stored: bool, config: Path | None, **options: Any) -> int:
    """Runs the quickstart, or with `real` that of pretrained models; arguments, results and errors are those of
    `demo.quickstart.quickstart` and `demo.real.try_real`.

    Raises:
        ConfigError: also options that do not go together.
    """
    if accept_terms and not (real and options["cross"]):
        raise ConfigError("--accept-terms", "goes with --real --cross alone")
    if not real:
        return miniature.quickstart(stored=stored, config=config, **options)
    for flag, given in (("--stored", stored), ("--config", config)):
        if given:
            raise ConfigError(flag, "does not go with --real, which chooses its settings as `distill-rl try` does")
    return try_real(accepted=accept_terms, **options)


def trial(*, student: str, teacher: str, out: Path | None, **options: Any) -> int:
    """Tries a pair with the fields of `TrialRequest`; its results and errors are those of `demo.trial.try_pair`."""
    return try_pair(TrialRequest(student, teacher, out=out or default_out(student, teacher), **options))
