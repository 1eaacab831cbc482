"""Whole runs with teacher and student, or their rows, split over several ranks, against one process each."""

import pytest
import torch

from tests.helpers.command import distill_rl, series

pytestmark = pytest.mark.cli


def test_tensor_parallel_matches_the_loss_curve_of_one_process(material, cluster, tmp_path):
    curves = []
    for tp in (1, 2):
        folder = tmp_path / str(tp)
        ended = distill_rl(
            "train",
            "-c",
            material.config(folder),
            "optimizer.lr=0.001",
            "teachers.0.export=hidden",
            "transport=shared_memory",
            f"student.parallel.tp={tp}",
            f"teachers.0.parallel.tp={tp}",
            "aligner.workers=0",
            cluster=cluster,
        )
        assert ended.code == 0, ended.err
        curves.append([series(folder / "runs" / "tiny", f"train/{name}") for name in ("kl_loss", "nll_loss")])
    for whole, split in zip(*curves, strict=True):
        assert len(whole) == 8
        torch.testing.assert_close([value for _, value in split], [value for _, value in whole], rtol=1e-5, atol=0)


def test_split_ranks_and_other_micro_batches_train_alike(straight, material, cluster, tmp_path):
    ended = distill_rl(
        "train", "-c", material.config(tmp_path),
        "student.parallel={dp: 2, tp: 1}", "teachers.0.parallel={dp: 1, tp: 2}",
        "teachers.0.micro_batch_size=4", "train.micro_batch_size=1", "aligner.workers=0", cluster=cluster,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "tiny"
    for metric in ("train/kl_loss", "train/nll_loss"):
        ours, whole = series(run, metric), series(straight, metric)
        assert [step for step, _ in ours] == [step for step, _ in whole]
        torch.testing.assert_close([value for _, value in ours], [value for _, value in whole], rtol=2e-4, atol=1e-6)


def test_divided_rows_train_alike(straight, material, cluster, tmp_path):
    ended = distill_rl(
        "train", "-c", material.config(tmp_path),
        "student.parallel={sp: 2}", "teachers.0.parallel={sp: 2}", "aligner.workers=0", cluster=cluster,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "tiny"
    for metric in ("train/kl_loss", "train/nll_loss", "train/grad_norm", "train/tokens"):
        ours, whole = series(run, metric), series(straight, metric)
        assert [step for step, _ in ours] == [step for step, _ in whole]
        torch.testing.assert_close([value for _, value in ours], [value for _, value in whole], rtol=2e-4, atol=1e-6)
