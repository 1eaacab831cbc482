"""The interface of what gives a teacher's targets, and of programs that score prompts. Imports no torch: `check` asks servers, too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.transport.base import Layout
from distill_rl.types import RankBatch

if TYPE_CHECKING:
    from torch import Tensor

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

    def close(self) -> None:
        """Ends what the scorer has started."""


class TeacherBackend(Protocol):
    """Turns rows into targets: `TeacherEngine` runs a model, and the classes of this folder ask somebody else."""

    micro_batch_size: int
    """Rows that `forward` covers at a time."""
    score: float
    """Of the last complete `forward`: sum over labelled positions of −log p(label), or of the entropy
    (`teachers[].score`); 0 if that is `static`."""

    bytes_per_token: int
    """The most bytes per position of the tensors that `forward` yields."""

    def forward(self, batch: RankBatch) -> Iterator[tuple[Layout, dict[str, Tensor]]]:
        """Yields the targets of this rank's part of a global batch, micro-batch by micro-batch, in order.

        The same rows always give the same targets. Positions without a label have some valid target. Micro-batches are
        those of `models.forward.micro_batches`: rows that the teacher is not asked for are not among them, and the
        layout counts those that are (`RoutedTeacher` adds the others).

        Yields:
            The rows covered, and their targets in the wire form of `losses.targets`, on any device.

        Raises:
            DistillError: the targets cannot be had.
        """

    def unused_targets(self, positions: int) -> dict[str, Tensor]:
        """A valid target for each of some positions, which nothing reads, in the form in which `forward` yields targets."""

    def close(self) -> None:
        """Ends what the backend has started; does nothing the second time."""


def token_of(teacher: TeacherConfig) -> str | None:
    """The token of a teacher's servers from the environment; None if there is none.

    Raises:
        ConfigError: the variable that `token_env` names is not set, or holds what cannot be sent.
    """
    token_env = teacher.endpoint.token_env
    if token_env is None:
        return None
    token = os.environ.get(token_env, "").strip()
    what = f"teacher {teacher.name}"
    if not token:
        raise ConfigError(what, f"needs its server's token in {token_env} (token_env)", "nothing", "export it")
    if not (token.isascii() and token.isprintable() and " " not in token):
        rule = f"the token in {token_env} must be printable characters without spaces"
        raise ConfigError(what, rule, "others", "export it again")
    return token
