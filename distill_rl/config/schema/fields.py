"""What the fields of the schema are declared with: the mark of a missing value, and rules for single values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MISSING = "???"
"""OmegaConf's mark of a value that must be given, repeated here because the engines must run without OmegaConf."""

# Metadata of the fields. config/rules/validate.py checks these rules, and those that combine settings.
POSITIVE = {"rule": "positive"}
NOT_NEGATIVE = {"rule": "not negative"}
FRACTION = {"rule": "fraction"}
POSITIVE_FRACTION = {"rule": "positive fraction"}
NOT_EMPTY = {"rule": "not empty"}


@dataclass(frozen=True)
class NoEffect:
    """Settings that have no effect under a condition."""

    settings: tuple[str, ...]
    """Dotted keys; `teachers[].x` is a setting of each teacher."""
    when: Callable[[Any], bool]
    """Of an `effects.Run`."""
    reason: str
    """What the condition means, as the end of the sentence."""
