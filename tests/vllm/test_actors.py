"""vLLM as users run it: in Ray actors of `distill-rl eval`, and beside a training run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed here: bash launch/test.sh vllm")

from tests.cli.conftest import CONFIG
from tests.cli.test_train import assert_equal_runs
from tests.helpers.command import distill_rl, series
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.suites import write_suite
from tests.vllm.material import SHAPE

pytestmark = pytest.mark.cli


def completions(out: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in (out / "own.items.jsonl").read_text().splitlines()]
    return {row["id"]: row["completion"] for row in rows}


def evaluate(model: Path, suite: Path, out: Path, *more: str) -> dict[str, str]:
    """Completions by item."""
    arguments = ("--model", model, "--suites", suite, "--data", suite.parent, "--dtype", "fp32", "--out", out)
    ended = distill_rl("eval", *arguments, *more)
    assert ended.code == 0, ended.err
    assert json.loads((out / "own.json").read_text())["backend"] == more[more.index("--backend") + 1]
    return completions(out)


def assert_alike(ours: dict[str, str], theirs: dict[str, str]) -> None:
    assert ours.keys() == theirs.keys()
    ties = [name for name in ours if ours[name] != theirs[name]]
    print("differ:", ties)
    assert len(ties) <= 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=1, **SHAPE)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_suite(tmp_path_factory.mktemp("suite"), count=40)


@pytest.fixture(scope="module")
def by_hf(model: Path, suite: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return evaluate(model, suite, tmp_path_factory.mktemp("hf"), "--backend", "hf")


def test_evaluation_in_ray_actors_equals_hf(model: Path, suite: Path, by_hf: dict[str, str], tmp_path: Path) -> None:
    assert_alike(evaluate(model, suite, tmp_path / "vllm", "--backend", "vllm"), by_hf)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs pretended GPUs")
def test_tensor_parallelism_in_an_actor_of_a_placement_group(
    model: Path, suite: Path, by_hf: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray believes in two GPUs, which the actor's bundle takes; by default vllm would request two more."""
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"GPU": 2}))
    assert_alike(evaluate(model, suite, tmp_path / "vllm", "--backend", "vllm", "--tensor-parallel", "2"), by_hf)


def test_vllm_beside_training_loads_every_step_and_changes_no_bit(tmp_path: Path) -> None:
    for name, seed in (("teacher", 1), ("student", 2)):
        write_tiny_model(tmp_path / name, seed=seed, **SHAPE)  # type: ignore[arg-type]
    write_corpus(tmp_path / "corpus.jsonl", rows=80, seed=5)
    suite = write_suite(tmp_path, count=24)
    more = {"alone": (), "evaluated": (f"evaluate.suites=[{suite}]", f"evaluate.data={tmp_path}")}
    for name, settings in more.items():
        (tmp_path / f"{name}.yaml").write_text(CONFIG.format(root=tmp_path, runs=tmp_path / "runs", teacher="teacher"))
        inline = ("evaluate.suites_every=4", "evaluate.backend=vllm") if settings else ()
        ended = distill_rl("train", "-c", tmp_path / f"{name}.yaml", *settings, *inline)
        assert ended.code == 0, ended.err
    assert_equal_runs(tmp_path / "runs" / "alone", tmp_path / "runs" / "evaluated")
    assert [step for step, _ in series(tmp_path / "runs" / "evaluated", "eval/own")] == [4, 8]
    scored = completions(tmp_path / "runs" / "evaluated" / "evals" / "step-4")
    assert scored != completions(tmp_path / "runs" / "evaluated" / "evals" / "student")
