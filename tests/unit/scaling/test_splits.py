"""Splits of a cluster: which are tried, what is expected of them, and which is best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distill_rl.config.facts import StepFacts
from distill_rl.scaling.model import CARDS, Cluster, Step, student_time, teacher_time
from distill_rl.scaling.splits import MEMORY_SHARE, Split, candidates, predict, rank, work_of
from tests.unit.scaling.conftest import FACTS, LARGE, SMALL

WORK = Step(rows=64, length=2048, micro_batch=2, top_k=64)


@pytest.mark.parametrize("gpus", [1, 2, 8, 64])
def test_every_candidate_uses_all_gpus_and_divides_the_batch(config, gpus):
    found = list(candidates(config, FACTS, Cluster(gpus)))
    assert len(found) == len(set(found)) > 0
    for split in found:
        if split.shared:
            assert split.student_gpus == split.teacher_gpus == gpus
        else:
            assert split.student_gpus + split.teacher_gpus == gpus
            assert gpus <= 8 or split.teacher_gpus % 8 == 0
        assert 512 % (split.student_dp * split.micro_batch) == 0 == 512 % split.teacher_dp


def test_the_best_comes_first_and_all_fit(config):
    found = rank(config, FACTS, Cluster(64))
    kept = [one.kept for one in found]
    assert kept == sorted(kept, reverse=True)
    assert all(0 < one.memory <= MEMORY_SHARE for one in found)
    assert all(0.9 < one.goodput < 1 for one in found)


def test_more_gpus_and_more_memory_do_not_make_it_worse(config):
    best = {gpus: rank(config, FACTS, Cluster(gpus))[0].kept for gpus in (8, 16, 64)}
    assert best[8] < best[16] < best[64] < 8 * best[8]
    assert rank(config, FACTS, Cluster(8, "h200"))[0].kept >= best[8]


@pytest.mark.parametrize("packing", [True, False])
def test_documents_that_fill_a_third_of_a_row_are_not_counted_as_full_rows(config, packing):
    rows, length = config.train.global_batch_size, config.data.max_length
    config.data.packing = packing
    split = Split(8, 1, 8, 1, 2, shared=True)
    full = predict(config, FACTS, Cluster(8), split)
    assert work_of(config, FACTS, 2)[1] == rows * length
    third = StepFacts(positions=rows * length // 3, used=0.9)
    work, tokens = work_of(config, replace(FACTS, step=third), 2)
    assert tokens == pytest.approx(0.3 * rows * length, rel=1e-3)
    assert work.rows * work.length == pytest.approx(rows * length / 3, rel=1e-2)
    assert (work.length == length) is packing
    found = predict(config, replace(FACTS, step=third), Cluster(8), split)
    assert found.step < 0.5 * full.step
    assert found.tokens_per_second == pytest.approx(tokens / found.step)


def test_a_student_that_is_too_large_fits_nowhere(config):
    huge = replace(FACTS, student=replace(LARGE, parameters=400_000_000_000))
    assert rank(config, huge, Cluster(8)) == []


def test_the_settings_of_a_split_are_those_that_it_predicts(config):
    split = Split(8, 2, 4, 4, 2, shared=False)
    assert predict(config, FACTS, Cluster(32), split).split == split
    assert split.overrides == (
        "student.parallel.dp=8",
        "student.parallel.tp=2",
        "teachers.0.parallel.dp=4",
        "teachers.0.parallel.tp=4",
        "train.micro_batch_size=2",
        "ray.placement=disaggregated",
    )


def test_a_stage_is_divided_by_its_ranks():
    cluster = Cluster(8)
    one = teacher_time(LARGE, WORK, cluster, dp=1, tp=1)
    assert one.tensor_parallel == one.sharding == 0
    assert teacher_time(LARGE, WORK, cluster, dp=4, tp=1).compute == pytest.approx(one.compute / 4, rel=1e-9)
    halved = teacher_time(LARGE, WORK, cluster, dp=1, tp=2)
    assert halved.compute == pytest.approx(one.compute / 2)
    # Two sums per layer of 64 rows of 2,048 tokens of 4,096 bf16 features; of two ranks each sends half, twice.
    assert halved.tensor_parallel == pytest.approx(32 * 2 * 64 * 2048 * 4096 * 2 / cluster.inside)


def test_the_arithmetic_bounds_the_time_from_below():
    flops = 2 * LARGE.parameters * WORK.rows * WORK.length
    least = flops / CARDS["h100"].matmul
    assert least < teacher_time(LARGE, WORK, Cluster(1), dp=1, tp=1).total < 2 * least


def test_a_slow_network_holds_a_sharded_student_up():
    slow, work = Cluster(64, between=1e9), replace(WORK, rows=512, micro_batch=16)
    fast = student_time(SMALL, work, Cluster(64), dp=32, tp=1)
    waiting = student_time(SMALL, work, slow, dp=32, tp=1)
    assert not fast.waits_for_network
    assert waiting.waits_for_network
    assert waiting.total == waiting.sharding > fast.total
    assert student_time(SMALL, work, slow, dp=8, tp=1).sharding < waiting.sharding, "a node's own links"
