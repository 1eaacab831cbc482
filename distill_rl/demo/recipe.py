"""The sizes of the quickstart, which determine how good teacher and student become and how long it takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-style model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters of the material. Recipes that differ in any of them make different folders."""

    folder: str = "seed"
    """Name of the folder of the material, before the seed."""
    teacher: Shape = Shape(hidden=96, intermediate=288, layers=2, heads=4)
    student: Shape = Shape(hidden=48, intermediate=144, layers=2, heads=4)
    teacher_tokenizer: str = "words"
    student_tokenizer: str = "words"
    """Kinds of `tokenizer.KINDS`. Two kinds have different vocabularies and chat templates."""
    positions: int = 256
    """Maximum input length of both models, in tokens."""
    initializer_range: float = 0.05
    """Standard deviation of initial weights. Models of this width learn slowly with the usual 0.02."""
    training_rows: int = 2000
    wrong_share: float = 0.3
    """Fraction of the training rows whose answer has the right items in a wrong order."""
    validation_rows: int = 192
    test_rows: int = 600
    teacher_steps: int = 800
    teacher_batch: int = 32
    teacher_lr: float = 3e-3
    teacher_warmup: int = 30

    def fingerprint(self) -> str:
        """sha256 (hex) over the recipe and the programs that use it, so that a change of either makes new material."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for name in ("tasks.py", "tokenizer.py", "pretrain.py", "material.py"):
            digest.update(Path(__file__).with_name(name).read_bytes())
        return digest.hexdigest()


RECIPE = Recipe()
CROSS = replace(RECIPE, folder="cross-seed", teacher_tokenizer="pieces", student_tokenizer="lines")
"""The same tasks with another tokenizer for the teacher, which splits most words into two or three tokens."""

TURNS = replace(CROSS, folder="turns-seed", teacher_tokenizer="turns")
"""The same, but the teacher ends a turn and a text with different tokens: it has two stop tokens, the student one."""

RECIPES: Mapping[str, Recipe] = MappingProxyType({"quickstart": RECIPE, "quickstart-cross": CROSS})
"""Name of the run and of its configuration → recipe."""
