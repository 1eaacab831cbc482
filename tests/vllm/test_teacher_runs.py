"""Whole runs whose teacher is in vLLM, against the same runs with the backend hf; run by `bash launch/test.sh vllm`."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: bash launch/test.sh vllm")

from distill_rl.demo.material import make_material
from distill_rl.demo.recipe import RECIPE, ModelSizes
from tests.cli.conftest import Material
from tests.cli.test_capture import config_of, stored
from tests.faults.conftest import assert_same_student, disturb, undisturbed
from tests.helpers.command import distill_rl, series, survivors
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer
from tests.vllm.material import SHAPE

__all__ = ["disturb", "undisturbed"]

pytestmark = pytest.mark.cli

FEATURE = Path(__file__).parents[2] / "configs" / "features" / "served-vllm.yaml"
VLLM = "teachers.0.backend=vllm"


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """As that of tests/cli, with heads that vLLM supports on CPUs."""
    root = tmp_path_factory.mktemp("material")
    write_tiny_model(root / "teacher", seed=1, **SHAPE | {"kv_heads": 2})
    write_tiny_model(root / "student", hidden=16, seed=2)
    write_tiny_model(root / "foreign", seed=4, tokenizer=tiny_tokenizer(600, seed=7), **SHAPE)
    write_tiny_model(root / "small-heads", hidden=32, seed=1)
    write_corpus(root / "corpus.jsonl", rows=80, seed=5)
    return Material(root)


def train(material: Material, folder: Path, *settings: str, teacher: str = "teacher") -> Path:
    ended = distill_rl("train", "-c", material.config(folder, teacher), *settings)
    assert ended.code == 0, ended.err
    return folder / "runs" / "tiny"


@pytest.mark.parametrize(("teacher", "packing"), [("teacher", "true"), ("foreign", "false")])
def test_losses_of_fifty_steps_are_those_of_hf(material, tmp_path, teacher, packing):
    settings = ("train.steps=50", "schedule.steps=50", f"data.packing={packing}")
    runs = [
        train(material, tmp_path / backend, *settings, f"teachers.0.backend={backend}", teacher=teacher)
        for backend in ("hf", "vllm")
    ]
    hf, vllm = (np.array(series(run, "train/kl_loss")) for run in runs)
    assert len(hf) == 50
    assert np.ptp(hf[:, 1]) > 0.3 * hf[0, 1], "the student has changed"
    np.testing.assert_allclose(vllm, hf, rtol=1e-3)
    report = (runs[1] / "logs" / "latest" / "driver.log").read_text()
    assert "transport object_store: " in report


def test_a_killed_engine_of_two_processes_is_replaced_without_a_trace(material, disturb, undisturbed):
    settings = ("train.steps=24", "schedule.steps=24", VLLM, "teachers.0.parallel.tp=2", "prefetch.depth=2")
    expected = undisturbed(*settings)
    with disturb(*settings) as run:
        assert [name for name in run.actors if name.startswith("big/")] == ["big/dp0-tp0"]
        teacher = psutil.Process(run.actors["big/dp0-tp0"])
        engine = teacher.children(recursive=True)
        assert len(engine) >= 2
        os.kill(teacher.pid, signal.SIGKILL)
        run.wait_for_output("restarting big/dp0-tp0 (1 of faults.teacher_restarts=3)")
        assert not survivors(engine)
        assert run.end() == 0, run.text
    assert_same_student(run.run, expected)


def test_a_captured_teacher_trains_the_same_student(material, tmp_path):
    live = train(material, tmp_path / "live", VLLM)
    store = tmp_path / "store"
    ended = distill_rl("capture", "-c", material.config(tmp_path / "capture"), "--out", store, VLLM)
    assert ended.code == 0, ended.err
    ended = distill_rl("train", "-c", config_of(material, tmp_path / "stored", stored(store)))
    assert ended.code == 0, ended.err
    runs = tmp_path / "stored" / "runs" / "tiny", live
    ours, theirs = (np.array(series(run, "train/kl_loss")) for run in runs)
    assert len(ours) == 8
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_teachers_of_both_backends_and_a_cache_teach_together(material, tmp_path):
    two = (
        f"teachers=[{{name: big, model: {material.root}/teacher, dtype: fp32, backend: vllm, cache: {tmp_path}/cache}}, "
        f"{{name: other, model: {material.root}/foreign, dtype: fp32}}]"
    )
    run = train(material, tmp_path, two, "train.epochs=2", "train.steps=16", "schedule.steps=16")
    assert len(series(run, "train/kl_loss/big")) == len(series(run, "train/kl_loss/other")) == 16
    read = [value for _, value in series(run, "store/read")]
    assert read[0] == 0
    assert read[-1] > 0, "the second epoch comes from the cache"


def test_what_vllm_cannot_do_is_refused_at_once(material, tmp_path):
    config = material.config(tmp_path, "small-heads")
    ended = distill_rl("train", "-c", config, VLLM, "teachers.0.export=hidden", "loss.temperature=2")
    assert ended.code == 2
    settings = sorted(line.partition("error: ")[2].partition(":")[0] for line in ended.errors)
    assert settings == ["loss.temperature", "teachers.0.backend", "teachers.0.export"]
    assert "needs attention heads of 32, 64" in ended.err
    assert not (tmp_path / "runs").exists()


def test_the_feature_file_trains_and_exports(tmp_path):
    """With a teacher whose heads vLLM supports on CPUs."""
    shape = ModelSizes(hidden=96, intermediate=288, layers=2, heads=3)
    make_material(tmp_path / ".cache" / "quickstart", 0, replace(RECIPE, teacher=shape, teacher_steps=20))
    settings = ("train.steps=3", "schedule.warmup_steps=1", "evaluate.suites=[]")
    ended = distill_rl("train", "-c", FEATURE, *settings, cwd=tmp_path)
    assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "served-vllm"
    assert [step for step, _ in series(run, "train/loss")] == [1, 2, 3]
    assert (run / "export" / "model.safetensors").exists()
