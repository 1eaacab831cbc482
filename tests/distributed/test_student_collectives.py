"""Communication and dtype conversions of a training step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distill_rl.models.parallelize import units
from distill_rl.parallel.mesh import World, open_world
from distill_rl.parallel.shards import local_part
from distill_rl.student.engine import StudentEngine
from tests.helpers import ranks
from tests.helpers.engines import engine_config, no_targets, random_documents, rank_batch, token_rows, whole_parameters
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.ranks

VOCABULARY, WIDTH, MICRO_BATCHES = 320, 24, 3
NAMES = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
}


class Work(TorchDispatchMode):
    """Counts collectives by name, and parameters that are converted from fp32 to bf16."""

    def __init__(self, parameters: int):
        super().__init__()
        self.parameters = parameters
        self.sent: Counter[str] = Counter()
        self.converted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.sent[NAMES.get(name, name)] += 1
        # FSDP2 keeps shards as vectors, while activations have at least three dimensions.
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16 and args[0].ndim == 1:
            self.converted += args[0].numel()
        if func is torch.ops.aten._foreach_copy_.default:  # one rank has no FSDP2
            self.converted += sum(copy.numel() for copy in args[0] if copy.dtype == torch.bfloat16)
        return func(*args, **(kwargs or {}))


def all_work(dp: int, replicas: int, student: Path) -> dict[str, tuple]:
    """Runs on a rank. What `work` returns, by gradient_sync."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=1, replicas=replicas)
    return {sync: work(world, sync, student) for sync in ("step", "micro_batch")}


def work(world: World, sync: str, student: Path) -> tuple[dict[str, int], float, int]:
    """Forward and backward of a step: (collectives, converted weights as share of the model, number of FSDP units)."""
    config = engine_config(student, loss__kd_weight=0.0, loss__ce_weight=1.0, train__micro_batch_size=1)
    config.student.dtype, config.student.gradient_sync = "bf16", sync
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
    rows = token_rows([[document] for document in random_documents(MICRO_BATCHES * world.dp)], WIDTH)
    batch = rank_batch(rows, world.dp_rank, world.dp)
    engine.train_step(batch, no_targets)
    with Work(sum(local_part(parameter).numel() for parameter in engine.parameters)) as mode:
        engine.forward_backward(batch, no_targets)
    return dict(mode.sent), mode.converted / mode.parameters, len(units(engine.model))


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "student", "llama", seed=71, vocab_size=VOCABULARY)


def test_one_rank_sends_nothing_and_converts_weights_once_per_step(student):
    (by_sync,) = ranks.run_ranks(1, all_work, 1, 1, student)
    for sent, converted, _ in by_sync.values():
        assert sent == {}
        assert converted == 1.0


REDUCTIONS = {"step": 1, "micro_batch": MICRO_BATCHES}


def test_shards_are_gathered_per_pass_and_gradients_reduced_as_set(student):
    for by_sync in ranks.run_ranks(2, all_work, 2, 1, student):
        for sync, (sent, _, count) in by_sync.items():
            assert sent == {"gather": 2 * MICRO_BATCHES * count, "reduce-scatter": REDUCTIONS[sync] * count}


def test_replicas_exchange_gradients_once_per_step(student):
    for by_sync in ranks.run_ranks(4, all_work, 4, 2, student):
        for sync, (sent, _, count) in by_sync.items():
            assert sent.pop("gather") == 2 * MICRO_BATCHES * count
            assert sent == {"reduce-scatter": REDUCTIONS[sync] * count, "all-reduce": count}
    for by_sync in ranks.run_ranks(2, all_work, 2, 2, student):
        for sent, converted, count in by_sync.values():
            assert (sent, converted) == ({"all-reduce": count}, 1.0), "each replica is a single shard"


def with_evaluation(dp: int, replicas: int, student: Path) -> bool:
    """Whether the weights after two steps are equal bit for bit with and without an evaluation before each step."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=1, replicas=replicas)
    weights = []
    for evaluated in (False, True):
        config = engine_config(student, loss__kd_weight=0.0, loss__ce_weight=1.0, optimizer__lr=1e-2)
        config.train.micro_batch_size = 1
        engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
        for step in range(2):
            rows = token_rows([[document] for document in random_documents(4, seed=step)], WIDTH)
            batch = rank_batch(rows, world.dp_rank, dp)
            if evaluated:
                engine.evaluate(batch, no_targets)
            engine.train_step(batch, no_targets)
        weights.append(whole_parameters(engine.model))
    return all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize(("dp", "replicas"), [(1, 1), (2, 1), (2, 2)])
def test_evaluations_between_steps_change_no_bit_of_the_weights(student, dp: int, replicas: int):
    assert all(ranks.run_ranks(dp, with_evaluation, dp, replicas, student))
