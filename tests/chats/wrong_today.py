"""The cells that are wrong today, by what is wrong; `test_corpus` fails for a cell that is missing here, and for one too many.

tokenizer → reason → template → kinds, separated by commas.
"""

from __future__ import annotations

_REFUSED = {
    "answers that the template joins to one turn cannot be told apart, and are refused": {
        "merged-answers": "two answers",
    },
}
WRONG_TODAY: dict[str, dict[str, dict[str, str]]] = {"special": _REFUSED, "plain": _REFUSED}
