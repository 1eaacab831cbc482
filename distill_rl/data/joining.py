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

    def groups(self, characters: Sequence[int]) -> list[slice]:
        """Which consecutive texts are joined, given the length of each; the last joined text may be shorter than the others."""
        groups, start, joined = [], 0, 0
        for i, count in enumerate(characters):
            joined += count
            if joined >= self.characters or i == len(characters) - 1:
                groups.append(slice(start, i + 1))
                start, joined = i + 1, 0
        return groups

    def join(self, documents: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Joins consecutive texts.

        A joined document has the row number of its first text under `"row"`, and all of them under `"rows"`.
        """
        groups = (documents[group] for group in self.groups([len(document["text"]) for document in documents]))
        return tuple(
            {
                "row": group[0]["row"],
                "rows": tuple(document["row"] for document in group),
                "text": self.separator.join(document["text"] for document in group),
            }
            for group in groups
        )
