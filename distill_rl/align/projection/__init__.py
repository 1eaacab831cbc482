"""The sparse projection from the student's vocabulary to the teacher's: how it is built, and its file."""

from distill_rl.align.projection.build import build_projection, cached_projection
from distill_rl.align.projection.file import Projection, load_projection, save_projection

__all__ = ["Projection", "build_projection", "cached_projection", "load_projection", "save_projection"]
