"""What `check` suggests for a run on many GPUs, and when it says nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distill_rl.commands.check import summary
from distill_rl.scaling.splits import suggestions
from tests.unit.scaling.conftest import FACTS

ON_GPUS = replace(FACTS, gpus=8)


@pytest.fixture
def cluster(config):
    """512 GPUs of each side, with an interval and a look-ahead that suit them."""
    parallel = replace(config.student.parallel, dp=512)
    return replace(
        config,
        student=replace(config.student, parallel=parallel),
        teachers=[replace(config.teachers[0], parallel=parallel)],
        train=replace(config.train, steps=100_000, micro_batch_size=1),
        ray=replace(config.ray, placement="disaggregated", address="auto"),
        checkpoint=replace(config.checkpoint, every=400, async_save=False),
    )


def test_nothing_is_said_of_settings_that_suit(cluster):
    assert suggestions(cluster, FACTS) == []


@pytest.mark.parametrize("every", [0, 1, 20_000])
def test_another_interval_is_suggested_where_it_keeps_more(cluster, every):
    (line,) = suggestions(replace(cluster, checkpoint=replace(cluster.checkpoint, every=every)), FACTS)
    setting, _, reason = line.partition(": ")
    name, _, steps = setting.partition("=")
    assert name == "checkpoint.every"
    assert 1 < int(steps) < 20_000
    assert f"with {f'checkpoint.every={every}' if every else 'none before the end'}" in reason
    improved = replace(cluster, checkpoint=replace(cluster.checkpoint, every=int(steps)))
    assert suggestions(improved, FACTS) == []


def test_look_ahead_is_suggested_where_there_is_none(cluster):
    (line,) = suggestions(replace(cluster, prefetch=replace(cluster.prefetch, depth=0)), FACTS)
    assert line.startswith("prefetch.depth=1: a step is predicted to take ")


def test_nothing_is_said_of_what_is_not_modelled(cluster):
    hasty = replace(cluster, checkpoint=replace(cluster.checkpoint, every=1))
    assert suggestions(hasty, FACTS)
    assert suggestions(hasty, replace(FACTS, student=None)) == []
    assert suggestions(replace(hasty, teachers=[]), FACTS) == []
    assert suggestions(replace(hasty, teachers=[replace(hasty.teachers[0], backend="vllm")]), FACTS) == []
    longer = replace(hasty.student, parallel=replace(hasty.student.parallel, sp=2))
    assert suggestions(replace(hasty, student=longer), FACTS) == []


def test_nothing_is_said_of_few_ranks_or_cpus(cluster, config):
    hasty = replace(cluster, checkpoint=replace(cluster.checkpoint, every=1))
    on_cpus = replace(hasty, ray=replace(hasty.ray, address=None))
    assert not [line for line in summary(on_cpus, FACTS) if line.startswith("suggested")]
    assert [line for line in summary(on_cpus, ON_GPUS) if line.startswith("suggested")]
    assert suggestions(replace(config, checkpoint=hasty.checkpoint), ON_GPUS) == []


def test_saving_beside_the_training_costs_less(cluster):
    often = replace(cluster, checkpoint=replace(cluster.checkpoint, every=1))
    assert suggestions(often, FACTS)
    assert suggestions(replace(often, checkpoint=replace(often.checkpoint, async_save=True)), FACTS) == []


def test_a_short_run_is_not_saved_at_every_step(cluster):
    short = replace(cluster, train=replace(cluster.train, steps=100), checkpoint=replace(cluster.checkpoint, every=1))
    (line,) = suggestions(short, FACTS)
    assert line.startswith("checkpoint.every=")
    assert not line.startswith("checkpoint.every=1:")


def test_check_prints_them(cluster):
    hasty = replace(cluster, checkpoint=replace(cluster.checkpoint, every=1))
    (line,) = suggestions(hasty, FACTS)
    assert f"suggested  {line}" in summary(hasty, FACTS)
