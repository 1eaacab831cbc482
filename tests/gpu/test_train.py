"""A whole run on one GPU that student and teacher share."""

import pytest

from tests.cli.conftest import Material
from tests.helpers.command import distill_rl, records, series
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.cli]


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    root = tmp_path_factory.mktemp("material")
    write_tiny_model(root / "teacher", hidden=64, seed=1)
    write_tiny_model(root / "student", hidden=32, seed=2)
    write_tiny_model(root / "foreign", hidden=64, seed=4, tokenizer=tiny_tokenizer(600, seed=7))
    write_corpus(root / "corpus.jsonl", rows=80, seed=5)
    return Material(root)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_deterministic_run_repeats_itself_at_any_depth(material, tmp_path, dtype):
    curves = []
    for depth in (0, 2):
        folder = tmp_path / str(depth)
        ended = distill_rl(
            "train", "-c", material.config(folder), f"prefetch.depth={depth}", "train.deterministic=true",
            f"student.dtype={dtype}", f"teachers.0.dtype={dtype}", "teachers.0.wire_dtype=auto",
        )  # fmt: skip
        assert ended.code == 0, ended.err
        curves.append(series(folder / "runs" / "tiny", "train/kl_loss"))
    assert len(curves[0]) == 8
    assert curves[0] == curves[1]


def test_an_aligner_with_a_share_of_the_gpu_runs_the_dynamic_programme_there(material, tmp_path):
    runs = []
    for backend in ("numba", "cuda"):
        ended = distill_rl(
            "train", "-c", material.config(tmp_path / backend, "foreign"), "train.deterministic=true", "train.steps=3",
            "aligner.method=dp", "aligner.num_gpus=0.1", f"aligner.dp.backend={backend}",
        )  # fmt: skip
        assert ended.code == 0, ended.err
        runs.append(records(tmp_path / backend / "runs" / "tiny"))
    assert runs[0][0]["align/method/dp/numba"] == runs[1][0]["align/method/dp/cuda"] == 8
    assert [record["train/kl_loss"] for record in runs[0]] == [record["train/kl_loss"] for record in runs[1]]
