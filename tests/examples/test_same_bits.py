"""Runs that are interrupted, or look further ahead, and must equal the reference run."""

import pytest

from tests.cli.test_train import assert_equal_but_for_sums, assert_equal_runs, shards
from tests.helpers.command import distill_rl, series

pytestmark = pytest.mark.cli


def test_three_plus_two_plus_three_steps_equal_eight_bit_for_bit(straight, material, cluster, tmp_path):
    """Every part has another depth than the straight run, and some another transport, no aligner, or synchronous saves."""
    config, run = material.config(tmp_path), tmp_path / "runs" / "tiny"
    for part in (
        ("train.steps=3", "prefetch.depth=0", "transport=shared_memory", "aligner.workers=0"),
        ("train.steps=5", "prefetch.depth=2", "checkpoint.async_save=false", "aligner.workers=0", "--resume"),
        ("train.steps=8", "prefetch.depth=5", "transport=shared_memory", "--resume", "auto"),
    ):
        ended = distill_rl("train", "-c", config, "evaluate.at_start=true", *part, cluster=cluster)
        assert ended.code == 0, ended.err
    assert_equal_runs(straight, run)
    assert series(run, "validation/kl_loss")[-1] == series(straight, "validation/kl_loss")[-1]
    assert [step for step, _ in series(run, "validation/kl_loss")] == [0, 3, 5, 8], "step 0 is measured once"
    assert shards(run, 8) == shards(straight, 8)


def test_a_small_ring_looked_ahead_by_five_batches_changes_no_weight(straight, material, cluster, tmp_path):
    settings = ("prefetch.depth=5", "prefetch.slots=3", "aligner.workers=0")
    ended = distill_rl("train", "-c", material.config(tmp_path), *settings, cluster=cluster)
    assert ended.code == 0, ended.err
    assert_equal_but_for_sums(tmp_path / "runs" / "tiny", straight)
