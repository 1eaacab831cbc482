"""The sizes of the quickstart: what decides how well teacher and student can do, and how long it takes."""

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
    """What the material is made by. Two recipes that differ in anything make different folders."""

    folder: str = "seed"
    """what a folder of material is called, before its seed"""
    teacher: Shape = Shape(hidden=96, intermediate=288, layers=2, heads=4)
    student: Shape = Shape(hidden=48, intermediate=144, layers=2, heads=4)
    teacher_tokenizer: str = "words"
    student_tokenizer: str = "words"
    """kinds of tokenizer.py; two kinds are two vocabularies and two chat templates over the same chats"""
    positions: int = 256
    """longest input of either model, in tokens"""
    initializer_range: float = 0.05
    """standard deviation of fresh weights: the usual 0.02 learns late at these widths"""
    training_rows: int = 2000
    wrong_share: float = 0.3
    """share of the training rows whose answer has the right items in a wrong order"""
    validation_rows: int = 192
    test_rows: int = 600
    teacher_steps: int = 800
    teacher_batch: int = 32
    teacher_lr: float = 3e-3
    teacher_warmup: int = 30

    def fingerprint(self) -> str:
        """sha256, in hex, over the recipe and the programs that follow it: an edit of either asks for new material."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for name in ("tasks.py", "tokenizer.py", "pretrain.py", "material.py"):
            digest.update(Path(__file__).with_name(name).read_bytes())
        return digest.hexdigest()


RECIPE = Recipe()
CROSS = replace(RECIPE, folder="cross-seed", teacher_tokenizer="pieces", student_tokenizer="lines")
"""The same tasks, but the teacher spells most words in two or three tokens of its own."""

TURNS = replace(CROSS, folder="turns-seed", teacher_tokenizer="turns")
"""And a teacher that ends a turn by another token than a text: two stop tokens against one."""

RECIPES: Mapping[str, Recipe] = MappingProxyType({"quickstart": RECIPE, "quickstart-cross": CROSS})
"""By the name of the run, which is that of its configuration."""
