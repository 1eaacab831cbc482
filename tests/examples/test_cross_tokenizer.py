"""Whole runs across tokenizers that need minutes."""

import pytest
import torch

from tests.cli.test_cross_tokenizer import straight, train
from tests.cli.test_train import assert_equal_runs, shards
from tests.helpers.command import distill_rl, records, series

__all__ = ["straight"]
pytestmark = pytest.mark.cli


def test_neither_resume_aligners_nor_depth_change_a_bit(straight, material, cluster, tmp_path):
    """Three steps and five more, with other aligners, depth and transport in either part, equal eight steps.

    Resuming also restores the ratio that scales KD. Repeated resumes are in test_same_bits.py.
    """
    for part in (
        ("train.steps=3", "prefetch.depth=0", "aligner.workers=0", "transport=shared_memory"),
        ("train.steps=8", "prefetch.depth=3", "aligner.workers=3", "--resume"),
    ):
        run = train(material, tmp_path, "loss.dynamic_scale=on", *part, cluster=cluster)
    assert_equal_runs(straight, run)
    assert series(run, "validation/kl_loss")[-1] == series(straight, "validation/kl_loss")[-1]
    assert shards(run, 8) == shards(straight, 8)


def test_dp_runs_on_the_chosen_backend_with_equal_rows(material, cluster, tmp_path, monkeypatch):
    """The CUDA backend runs on Numba's simulator, which needs no device."""
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    common = (
        "aligner.method=dp", "data.max_length=16", "data.validation.fraction=0",
        "train.global_batch_size=2", "train.steps=1", "schedule.steps=1", "schedule.warmup_steps=0",
    )  # fmt: skip
    actor = ("aligner.dp.backend=cuda", "aligner.num_gpus=0.1")
    runs = {
        "cuda": train(material, tmp_path / "cuda", *actor, *common),
        "numpy": train(
            material, tmp_path / "numpy", "aligner.dp.backend=numpy", "aligner.workers=0", *common, cluster=cluster
        ),
    }
    first = {backend: records(run)[0] for backend, run in runs.items()}
    for backend, record in first.items():
        assert record[f"align/method/dp/{backend}"] == 2
    assert first["cuda"]["train/kl_loss"] == first["numpy"]["train/kl_loss"]
    assert first["cuda"]["align/chunks"] == first["numpy"]["align/chunks"] > 0


def test_two_copies_of_one_tokenizer_match_the_plain_loss(material, cluster, tmp_path):
    common = ("data.packing=false", "loss.temperature=1", "train.steps=4", "schedule.steps=4", "aligner.workers=0")
    cross, same = (
        train(material, tmp_path / loss, f"teachers.0.loss={loss}", *common, teacher="teacher", cluster=cluster)
        for loss in ("hybrid", "same")
    )
    assert records(cross)[0]["align/one_to_one"] == 1.0
    assert records(cross)[0]["align/coverage"] == 1.0
    for metric in ("train/kl_loss", "train/nll_loss", "train/grad_norm"):
        ours, theirs = (torch.tensor([value for _, value in series(run, metric)]) for run in (cross, same))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_split_ranks_match_one_process_and_save_the_learned_projection(material, cluster, tmp_path):
    common = (
        "loss.cross_tokenizer=xtoken", "teachers.0.export=logits", "projection.learnable=true", "loss.temperature=2",
        "train.steps=4", "schedule.steps=4", "optimizer.lr=0.001", "aligner.workers=0",
    )  # fmt: skip
    whole = train(material, tmp_path / "whole", *common, cluster=cluster)
    split = train(
        material, tmp_path / "split", *common, "student.parallel={dp: 1, tp: 2}", "teachers.0.parallel={dp: 2, tp: 1}",
        "train.micro_batch_size=1", "transport=shared_memory", cluster=cluster,
    )  # fmt: skip
    for metric in ("train/kl_loss", "train/nll_loss", "train/grad_norm", "validation/kl_loss"):
        ours, theirs = (torch.tensor([value for _, value in series(run, metric)]) for run in (split, whole))
        assert len(ours) == (1 if metric.startswith("validation") else 4)
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-6)
    learned = whole / "projections" / "0.safetensors"
    again = distill_rl("check", "-c", tmp_path / "whole" / "tiny.yaml", *common, f"projection.path={learned}")
    assert again.code == 0, again.err
