"""Loads a model with single settings instead of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill_rl.config.schema import StudentConfig, TeacherConfig
from distill_rl.models import load
from distill_rl.parallel.mesh import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(
    path: Path,
    world: World,
    *,
    role: Literal["student", "teacher"],
    packing: bool = True,
    longest: int | None = 128,
    **settings: Any,
) -> PreTrainedModel:
    config = StudentConfig if role == "student" else TeacherConfig
    return load.load_model(config(model=str(path), **settings), world, packing=packing, longest=longest)
