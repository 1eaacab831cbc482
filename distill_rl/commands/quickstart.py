"""distill-rl quickstart: a whole distillation in miniature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill_rl.demo import quickstart as demo
from distill_rl.demo import real as real_demo
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
        return demo.quickstart(stored=stored, config=config, **options)
    for flag, given in (("--stored", stored), ("--config", config)):
        if given:
            raise ConfigError(flag, "does not go with --real, which chooses its settings as `distill-rl try` does")
    return real_demo.try_real(accepted=accept_terms, **options)
