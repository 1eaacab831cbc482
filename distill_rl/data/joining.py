"""Short texts → longer ones: `data.concatenate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill_rl.config.schema import DataConfig

_CHARACTERS_PER_TOKEN = 4
"""Of English text, about; published settings assume it."""


@dataclass(frozen=True, slots=True)
class Joining:
    """How texts are joined.

    Args:
        separator: written between two texts.
        characters: at this number of characters, separators not counted, a joined text is complete.
    """

    separator: str
    characters: int

    @classmethod
    def of(cls, data: DataConfig) -> Joining | None:
        """As the settings say; None: texts are not joined."""
        if not data.concatenate:
            return None
        return cls(data.separator, data.characters_per_sample or _CHARACTERS_PER_TOKEN * data.max_length)

    def join(self, documents: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Joins consecutive texts; the last joined text may be shorter than the others.

        A joined document has the row number of its first text under `"row"`, and all of them under `"rows"`.
        """
        joined: list[dict[str, Any]] = []
        texts: list[str] = []
        rows: list[int] = []
        characters = 0
        for i, document in enumerate(documents):
            texts.append(document["text"])
            rows.append(document["row"])
            characters += len(document["text"])
            if characters >= self.characters or i == len(documents) - 1:
                joined.append({"row": rows[0], "rows": tuple(rows), "text": self.separator.join(texts)})
                texts, rows, characters = [], [], 0
        return tuple(joined)
