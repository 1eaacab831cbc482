"""What the fields of the schema are declared with: the mark of a missing value, and rules for single values."""

from __future__ import annotations

MISSING = "???"
"""OmegaConf's mark of a value that must be given, repeated here because the engines must run without OmegaConf."""

# Metadata of the fields. config/rules.py checks these rules, and those that combine settings.
POSITIVE = {"rule": "positive"}
NOT_NEGATIVE = {"rule": "not negative"}
FRACTION = {"rule": "fraction"}
POSITIVE_FRACTION = {"rule": "positive fraction"}
NOT_EMPTY = {"rule": "not empty"}
