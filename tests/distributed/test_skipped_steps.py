"""A non-finite value or a spike on one rank: all ranks skip the step and continue alike, on every layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

from distill_rl.parallel.mesh import World, open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import RankBatch
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
"""POISONED: the steps whose targets or gradients are poisoned, on the first rank and on the last."""
LAYOUTS = [(2, 1), (1, 2), (2, 2)]
SPIKES = {"faults__spike_window": 1, "faults__spike_factor": 10.0}
NOT_FINITE = [(float("nan"), "logprobs"), (float("inf"), "logprobs"), (float("nan"), "rest_logprob")]
SPIKING = {"loss": (20.0, "logprobs"), "gradient": (1e6, "gradient")}
CASES = [(*case, {}) for case in NOT_FINITE] + [(*case, SPIKES) for case in SPIKING.values()]
"""(value, where it is put, settings)"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return write_tiny_model(root / "student", hidden=16, seed=1), write_tiny_model(root / "teacher", hidden=32, seed=2)


@dataclass
class Seen:
    """What a rank observed, step by step."""

    skipped: list[float] = field(default_factory=list)
    """Whether the step was skipped; only on the first tensor-parallel ranks."""
    finite: list[bool] = field(default_factory=list)
    """Whether loss and gradient norm were finite; only on the first tensor-parallel ranks."""
    scales: list[float] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)
    """Whether any weight changed."""


def train_all(dp: int, tp: int, student: Path, teacher: Path) -> list[Seen]:
    """Runs on a rank: what it observes in each of the CASES."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    batch = rank_batch(token_rows([[document] for document in random_documents(4, seed=3)], WIDTH), world.dp_rank, dp)
    config = engine_config(student, [teacher])
    targets = engine_targets(TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY), batch)
    return [train(world, batch, targets, *case, student, teacher) for case in CASES]


def train(world: World, batch: RankBatch, targets, value: float, where: str, settings, student, teacher) -> Seen:
    """STEPS steps. In POISONED ones `value` is put into the victim's targets, or multiplies its gradient.

    Args:
        where: the name of a target tensor, or `gradient`.
    """
    config = engine_config(student, [teacher], loss__ce_weight=0.5, loss__dynamic_scale="on", **settings)
    poisoned = {name: tensor.clone() for name, tensor in targets.items()}
    if where != "gradient":
        poisoned[where][1] = value
    good, bad = (fixed_targets([tensors], WIDTH, first_row=batch.first_row) for tensors in (targets, poisoned))
    victims = dict(zip(POISONED, (0, world.world_size - 1)))
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)
    seen, weights = Seen(), whole_parameters(engine.model)
    for step in range(1, STEPS + 1):
        poison = victims.get(step) == world.rank
        metrics = engine.forward_backward(batch, bad if poison else good)
        if poison and where == "gradient":
            multiply_gradient(engine, value)
        metrics |= engine.optim_step()
        seen.scales.append(engine.kd_scale)
        if world.tp_rank == 0:
            seen.skipped.append(metrics["train/skipped"].value)
            numbers = (metrics[name].value for name in ("train/loss", "train/grad_norm"))
            seen.finite.append(all(map(math.isfinite, numbers)))
        before, weights = weights, whole_parameters(engine.model)
        seen.changed.append(any(not torch.equal(weights[name], before[name]) for name in before))
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    return seen


def multiply_gradient(engine: StudentEngine, factor: float) -> None:
    """Multiplies this rank's gradients that no other rank has a copy of; copies must stay equal."""
    for gradient in (parameter.grad for parameter in engine.parameters):
        if all(isinstance(placement, Shard) for placement in gradient.placements):
            gradient.to_local().mul_(factor)


@pytest.fixture(scope="module")
def trained(folders) -> Callable[[int, int], list[list[Seen]]]:
    """What the ranks of a layout observed: per rank, in each of the CASES."""
    return functools.cache(lambda dp, tp: ranks.run_ranks(dp * tp, train_all, dp, tp, *folders))


def assert_skipped_together(of_ranks: list[list[Seen]], value: float, where: str) -> list[Seen]:
    """Returns what the ranks observed."""
    number = [repr(case[:2]) for case in CASES].index(repr((value, where)))
    observed = [of_cases[number] for of_cases in of_ranks]
    expected = [float(step in POISONED) for step in range(1, STEPS + 1)]
    assert observed[0].skipped == expected
    assert all(seen.skipped in ([], expected) for seen in observed)
    assert all(seen.changed == [not skipped for skipped in expected] for seen in observed)
    assert len({tuple(seen.scales) for seen in observed}) == 1
    return observed


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
@pytest.mark.parametrize(("value", "where"), NOT_FINITE)
def test_all_ranks_skip_a_step_poisoned_on_one(trained, dp, tp, value, where):
    assert_skipped_together(trained(dp, tp), value, where)


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
@pytest.mark.parametrize(("value", "where"), SPIKING.values(), ids=SPIKING)
def test_all_ranks_skip_a_spike_on_one_and_continue(trained, dp, tp, value, where):
    observed = assert_skipped_together(trained(dp, tp), value, where)
    assert all(all(seen.finite) for seen in observed)
