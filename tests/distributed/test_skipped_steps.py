"""A value that is not finite on one rank: all ranks skip the step together, in every layout, and go on alike."""

from __future__ import annotations

import pytest
import torch

from distill_rl.parallel.mesh import open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from tests.helpers import ranks
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    fixed_targets,
    random_documents,
    rank_batch,
    token_rows,
    whole_parameters,
)
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.ranks

VOCABULARY, WIDTH, STEPS, POISONED = 320, 32, 4, (2, 3)
"""steps whose targets are poisoned"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return write_tiny_model(root / "student", hidden=16, seed=1), write_tiny_model(root / "teacher", hidden=32, seed=2)


def train(dp: int, tp: int, victim: int, value: float, where: str, student, teacher):
    """On a rank: STEPS steps, in some of which the victim's targets hold `value`; what was skipped, and the weights."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    batch = rank_batch(token_rows([[each] for each in random_documents(4, seed=3)], WIDTH), world.dp_rank, dp)
    config = engine_config(student, [teacher], loss__ce_weight=0.5, loss__dynamic_scale="on")
    targets = engine_targets(TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY), batch)
    poisoned = {name: tensor.clone() for name, tensor in targets.items()}
    poisoned[where][1] = value
    good, bad = (fixed_targets([each], WIDTH, first_row=batch.first_row) for each in (targets, poisoned))
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)
    skipped, scales = [], []
    for step in range(1, STEPS + 1):
        source = bad if step in POISONED and world.rank == victim else good
        found = engine.train_step(batch, source)
        scales.append(engine.kd_scale)
        if world.tp_rank == 0:
            skipped.append(found["train/skipped"].value)
    return skipped, scales, whole_parameters(engine.model)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("value", "where"), [(float("nan"), "logprobs"), (float("inf"), "logprobs"), (float("nan"), "rest_logprob")]
)
def test_all_ranks_skip_together_what_is_poisoned_on_one(folders, dp, tp, value, where):
    for victim in {0, dp * tp - 1}:
        found = ranks.run_ranks(dp * tp, train, dp, tp, victim, value, where, *folders)
        expected = [float(step in POISONED) for step in range(1, STEPS + 1)]
        assert all(skipped in ([], expected) for skipped, _, _ in found)
        assert found[0][0] == expected
        assert len({tuple(scales) for _, scales, _ in found}) == 1
        assert all(torch.isfinite(tensor).all() for tensor in found[0][2].values())
