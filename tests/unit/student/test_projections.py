"""Projections on the student's device."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distill_rl.align.projection import build_projection, save_projection
from distill_rl.parallel.mesh import World
from distill_rl.student.compared import open_projection
from distill_rl.types import CrossTokenizerSpec
from tests.helpers.tokenizers import tiny_tokenizer


@pytest.mark.parametrize("known", [True, False])
def test_projection_without_stop_tokens_warns(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    path = tmp_path / "projection.safetensors"
    made = build_projection(tiny_tokenizer(320), tiny_tokenizer(330, seed=1), student_columns=320, teacher_columns=330)
    nothing = np.zeros(0, np.int32)
    save_projection(made if known else replace(made, student_stops=nothing, teacher_stops=nothing), path)
    with caplog.at_level(logging.WARNING):
        cross = open_projection(CrossTokenizerSpec("hybrid", str(path)), world, learnable=False)
    assert (cross.method, len(cross.projection.student_stops)) == ("hybrid", 2 if known else 0)
    assert ("holds no stop tokens" in caplog.text) != known
