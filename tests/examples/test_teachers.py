"""Whole runs with several teachers, each on several ranks."""

import pytest
import torch

from tests.cli.test_train import boxes, overlap
from tests.helpers.command import distill_rl, series

pytestmark = pytest.mark.cli


def test_several_split_teachers_and_a_short_last_batch(material, cluster, tmp_path):
    """All teachers are equal, so that the weighted mean of their losses is the loss of one of them."""
    losses = []
    for overrides in (
        ["aligner.workers=0"],
        [f"teachers.1={{name: same, model: {material.root}/teacher, dtype: fp32, micro_batch_size: 1, weight: 3, parallel: {{dp: 2}}}}",
         "student.parallel.dp=2", "prefetch.depth=2", "transport=shared_memory", "ray.placement=disaggregated",
         "observe.timeline=true"],
    ):  # fmt: skip
        folder = tmp_path / str(len(losses))
        epochs = ("train.steps=null", "train.epochs=0.4")
        ended = distill_rl("train", "-c", material.config(folder), *epochs, *overrides, cluster=cluster)
        assert ended.code == 0, ended.err
        losses.append(series(folder / "runs" / "tiny", "train/kl_loss"))
    forwards = [boxes(folder / "runs" / "tiny", "forward", row) for row in ("big/dp0-tp0", "same/dp0-tp0")]
    assert overlap(*forwards), "the teachers took turns"
    assert [step for step, _ in losses[0]] == [1, 2, 3, 4]
    torch.testing.assert_close([kl for _, kl in losses[0]], [kl for _, kl in losses[1]], rtol=2e-4, atol=1e-6)
