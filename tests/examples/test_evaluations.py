"""Suites evaluated during training, which does not change by a bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_train import assert_equal_runs
from tests.helpers.command import distill_rl, series
from tests.helpers.suites import write_suite

pytestmark = pytest.mark.cli


def settings(suite: Path, *more: str) -> list[str]:
    return [f"evaluate.suites=[{suite}]", f"evaluate.data={suite.parent}", "evaluate.batch_size=4", *more]


def result(run: Path, name: str) -> dict:
    return json.loads((run / "evals" / name / "own.json").read_text())


@pytest.fixture(scope="module")
def evaluated(material, cluster, tmp_path_factory) -> Path:
    """The straight run, with a suite every other step."""
    folder = tmp_path_factory.mktemp("evaluated")
    suite = write_suite(folder, count=24)
    suites = settings(suite, "evaluate.suites_every=2", "evaluate.limit=10", "aligner.workers=0")
    ended = distill_rl("train", "-c", material.config(folder), *suites, cluster=cluster)
    assert ended.code == 0, ended.err
    assert "evaluated step 2 on own" in ended.out
    assert "evaluated the student on own" in ended.out
    return folder / "runs" / "tiny"


def test_evaluation_changes_no_bit_of_training(straight, evaluated):
    assert_equal_runs(straight, evaluated)


def test_scores_belong_to_the_evaluated_step(evaluated):
    scores = dict(series(evaluated, "eval/own"))
    assert list(scores) == [2, 4, 6, 8]
    for step in (2, 4, 6):
        assert result(evaluated, f"step-{step}")["score"] == scores[step]
        assert result(evaluated, f"step-{step}")["num_items"] == 10
    assert result(evaluated, "student")["score"] == scores[8]
    assert result(evaluated, "student")["num_items"] == 24


def test_each_evaluated_step_has_its_own_weights(evaluated):
    names = [path.name for path in (evaluated / "evals").iterdir()]
    assert sorted(names) == ["step-2", "step-4", "step-6", "student"]
    hashes = {result(evaluated, name)["model_sha256"] for name in names}
    assert len(hashes) == 4


def test_scores_are_in_the_report_and_the_model_card(evaluated):
    page = (evaluated / "report.html").read_text()
    assert "Score during training" in page
    assert "step-2" in page
    assert "eval/own" in (evaluated / "export" / "README.md").read_text()
