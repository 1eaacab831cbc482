"""A task: models, data, a base configuration and what is held out, all made here from a seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tests.bench.methods.scores import HeldOut


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task of one seed, on disk."""

    config: Path
    """The base configuration."""
    overrides: tuple[str, ...]
    """The seed, and the paths of models and data."""
    student: Path
    """The untrained student."""
    teacher: Path
    """The first one."""
    same_tokenizer: bool
    """Whether it is the only teacher and has the student's tokenizer."""
    selection: HeldOut | None
    """By which the learning rate is chosen; None: there is one rate."""
    test: HeldOut
    fingerprint: str
    """Of models and data: the figures of another fingerprint are those of another task."""
    elsewhere: HeldOut | None = None
    """Text of another kind than the student is trained on."""


@dataclass(frozen=True, slots=True)
class Task:
    name: str

    def prepare(self, root: Path, seed: int) -> Prepared:
        """Makes what is missing of models and data below `root`. Other processes may do the same."""
        raise NotImplementedError


def fingerprint(*parts: str) -> str:
    """sha256 (hex) of texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
