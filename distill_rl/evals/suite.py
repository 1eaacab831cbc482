"""What a suite is. To add one: write a class like `exact_match.ExactMatch`, name it in `run.SUITES`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Prompt = str | tuple[Mapping[str, str], ...]
"""Plain text that the model goes on from, or chat messages ({role, content}) that end with the user's turn."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a suite."""

    id: str
    """unique in its suite; the file's name and row, so that a reader can find it"""
    prompt: Prompt
    answer: str
    task: str = ""
    """for a break-down of the score; empty: none"""


class Suite(Protocol):
    """Questions, and how an answer is judged."""

    name: str

    def file(self, data: Path) -> Path:
        """The suite's file where `data` is that file or a folder of the suites' data."""
        ...

    def load(self, file: Path) -> Sequence[Item]:
        """Raises: DataError: with one line per bad row."""
        ...

    def score(self, item: Item, completion: str) -> float:
        """0 to 1 for what the model wrote after the prompt (special tokens left out). Never raises for hostile text."""
        ...
