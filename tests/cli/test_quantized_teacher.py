"""A run with a teacher of 8 bits, its store, and what `verify teacher` measures of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill_rl.store.store import read_manifest
from tests.helpers.command import Cluster, distill_rl, distill_rl_in_process, series
from tests.helpers.quantized import store_quantized

pytestmark = pytest.mark.cli
pytest.importorskip("torchao", reason="torchao is not installed here: bash launch/test.sh quantization")

FEATURE = Path(__file__).parents[2] / "configs" / "features" / "quantised-teacher.yaml"
INT8 = "teachers.0.quantization=int8"
LOSSES = ("train/kl_loss", "train/loss", "train/grad_norm")


def losses(run: Path) -> dict[str, list[tuple[int, float]]]:
    return {metric: series(run, metric) for metric in LOSSES}


def test_a_quantised_teacher_teaches_and_its_cache_is_not_that_of_the_full_one(
    material, cluster: Cluster, tmp_path: Path
):
    """A second run reads what the first has stored, to the bit; the full teacher can use neither the cache nor a checkpoint."""
    config, cache = material.config(tmp_path), f"teachers.0.cache={tmp_path}/cache"
    ended = distill_rl("train", "-c", config, INT8, cache, "train.steps=3", cluster=cluster)
    assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "tiny"
    assert read_manifest(tmp_path / "cache").weights.endswith(" in int8")
    first = losses(run)
    assert [step for step, _ in first["train/kl_loss"]] == [1, 2, 3]
    ended = distill_rl("train", "-c", config, INT8, cache, "train.steps=3", "run.name=again", cluster=cluster)
    assert ended.code == 0, ended.err
    assert losses(run.parent / "again") == first
    assert [value for _, value in series(run.parent / "again", "store/read")] == [1.0] * 3
    refused = distill_rl_in_process("train", "-c", config, cache, "train.steps=3", "run.name=full")
    assert refused.code == 2
    (line,) = refused.errors
    assert "the teacher's weights" in line
    assert " in int8 here, " in line
    resumed = distill_rl_in_process("train", "-c", config, "train.steps=4", "--resume")
    assert resumed.code == 2
    assert any(
        "the teacher big of this run: must be the same" in line and " in int8" in line for line in resumed.errors
    )


def test_the_file_of_the_feature_trains(material, cluster: Cluster, tmp_path: Path):
    models = (f"student.model={material.root}/student", f"teachers.0.model={material.root}/teacher")
    data = (f"data.path={material.root}/chats.jsonl", "data.validation.path=null", "data.validation.fraction=0.1")
    settings = (f"run.dir={tmp_path}", "train.steps=2", "evaluate.suites=[]", "schedule.warmup_steps=1")
    ended = distill_rl("train", "-c", FEATURE, *models, *data, *settings, cluster=cluster)
    assert ended.code == 0, ended.err
    assert [step for step, _ in series(tmp_path / FEATURE.stem, "train/kl_loss")] == [1, 2]


@pytest.mark.parametrize("teacher", ["teacher", "foreign"])
def test_verify_measures_what_eight_and_four_bits_cost(material, tmp_path: Path, teacher: str):
    config, found = material.config(tmp_path, teacher), {}
    for format in ("int8", "int4"):
        out = tmp_path / f"{format}.json"
        setting = f"teachers.0.quantization={format}"
        ended = distill_rl_in_process("verify", "teacher", "-c", config, setting, "--rows", "9", "--out", out)
        assert ended.code == 0, ended.err
        (found[format],) = json.loads(out.read_text())["teachers"]
        assert f"teacher big: {format}, 9 documents, {found[format]['tokens']:,} positions" in ended.out
    eight, four = found["int8"], found["int4"]
    assert 0 < eight["kl_mean"] < four["kl_mean"] < four["kl_p99"] < 1
    assert 1 >= eight["top1_agreement"] > four["top1_agreement"] > 0.5
    assert 1 > eight["mass_full"] >= eight["mass_quantized"] > four["mass_quantized"] > 0.05
    assert eight["mass_full"] == four["mass_full"]
    assert eight["full"]["weight_bytes"] == four["full"]["weight_bytes"]
    assert eight["full"]["quantized_bytes"] == 0
    assert (
        eight["quantized"]["weight_bytes"]
        > eight["quantized"]["quantized_bytes"]
        > four["quantized"]["quantized_bytes"]
    )
    assert eight["full"]["weight_bytes"] > eight["quantized"]["weight_bytes"] > four["quantized"]["weight_bytes"]
    assert all(cost[side]["tokens_per_s"] > 0 for cost in found.values() for side in ("full", "quantized"))


def test_a_stored_checkpoint_is_compared_with_the_weights_that_were_quantised(material, tmp_path: Path):
    config, out = material.config(tmp_path), tmp_path / "figures.json"
    stored = store_quantized(tmp_path / "stored", material.root / "teacher")
    settings = (f"teachers.0.model={stored}", "teachers.0.quantization=as_stored", "--rows", "5")
    (line,) = distill_rl_in_process("verify", "teacher", "-c", config, *settings).errors
    assert "--full: needs the original weights of big" in line
    full = ("--full", material.root / "teacher", "--out", out)
    ended = distill_rl_in_process("verify", "teacher", "-c", config, *settings, *full)
    assert ended.code == 0, ended.err
    (found,) = json.loads(out.read_text())["teachers"]
    assert (found["quantization"], found["documents"]) == ("as_stored", 5)
    assert 0 < found["kl_mean"] < 0.01
    assert found["quantized"]["weight_bytes"] < found["full"]["weight_bytes"]
    assert "of them quantised" not in ended.out
    checked = distill_rl_in_process("check", "-c", config, *settings[:2])
    assert checked.code == 0, checked.err


def test_verify_says_what_it_lacks(material, tmp_path: Path):
    config = material.config(tmp_path)
    cases = {
        (): ("teachers[].quantization", "for example teachers.0.quantization=int8"),
        (INT8, "--rows", "0"): ("--rows", "must be 1 or more"),
        (INT8, "--full", str(tmp_path)): ("--full", "of the one teacher with quantization as_stored"),
    }
    for arguments, words in cases.items():
        ended = distill_rl_in_process("verify", "teacher", "-c", config, *arguments)
        assert ended.code == 2
        (line,) = ended.errors
        assert all(word in line for word in words), line
