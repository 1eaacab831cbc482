"""What a program says that scores prompts, and the interface of such programs. Imports no torch: `check` asks servers, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

MASS_TOLERANCE = 1e-3
"""How far Σ exp(logprobs) may exceed one: half precision on the way explains this much, a wrong answer more."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a scorer says of a prompt of L tokens. Row p is about the token that follows position p, so there are L − 1."""

    ids: np.ndarray
    """int32 [L − 1, k], distinct within a row, most likely first; −1 at the end of a row for absent entries"""
    logprobs: np.ndarray
    """fp32 [L − 1, k], natural logarithm, over the whole vocabulary at temperature 1; −inf for absent entries"""
    next_logprobs: np.ndarray
    """fp32 [L − 1], of the token that does follow"""


class PromptScorer(Protocol):
    """Gives the log-probabilities of prompts."""

    def score(self, prompts: Sequence[np.ndarray], k: int) -> Iterator[tuple[int, Scores]]:
        """Yields (index of a prompt, its scores), each once, in any order.

        Args:
            prompts: int32 [L] each, at least two tokens.
            k: entries per position.

        Raises:
            DistillError: the scores cannot be had.
        """
        ...

    def close(self) -> None:
        """Ends what the scorer has started."""
        ...
