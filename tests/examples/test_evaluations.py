"""Suites evaluated during training, which does not change by a bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distill_rl.evals.results import read_samples
from distill_rl.system.files import read_json_lines
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
    """The straight run, with a suite before the first step and every other step, on student and teacher."""
    folder = tmp_path_factory.mktemp("evaluated")
    suite = write_suite(folder, count=24)
    start = ("evaluate.at_start=true", "evaluate.teachers=true")
    limits = ("evaluate.limit=10", "evaluate.final_limit=20", "evaluate.max_new_tokens=7", "evaluate.samples=3")
    best = ("checkpoint={every: 2, keep_last: 1, keep_best: 1, best_by: eval/own}",)
    suites = settings(suite, "evaluate.suites_every=2", *start, *limits, *best, "aligner.workers=0")
    ended = distill_rl("train", "-c", material.config(folder), *suites, cluster=cluster)
    assert ended.code == 0, ended.err
    for model, items in (("step 0", 10), ("teacher big", 10), ("step 2", 10), ("the student", 20)):
        assert re.search(rf"evaluated {model} on own: [01]\.\d+ \[.*\], {items} items, [\d.]+ items/s", ended.out)
    assert re.search(r"evaluating (step \d|teacher big|the student) on own: \d+ of [12]0 items, ", ended.out)
    return folder / "runs" / "tiny"


def test_evaluation_changes_no_bit_of_training(straight, evaluated):
    assert_equal_runs(straight, evaluated)


def test_scores_belong_to_the_evaluated_step(evaluated):
    scores = dict(series(evaluated, "eval/own"))
    assert list(scores) == [0, 2, 4, 6, 8]
    for step in (0, 2, 4, 6):
        assert result(evaluated, f"step-{step}")["score"] == scores[step]
        assert result(evaluated, f"step-{step}")["num_items"] == 10
    assert result(evaluated, "student")["score"] == scores[8]
    assert result(evaluated, "student")["num_items"] == 20
    assert result(evaluated, "student")["max_new_tokens"] == 7


def test_best_checkpoint_by_the_score_of_a_suite_is_kept(evaluated):
    scores = {step: score for step, score in series(evaluated, "eval/own") if step in (2, 4, 6)}
    best = max(scores, key=lambda step: (scores[step], -step))
    kept = sorted(path.name for path in (evaluated / "checkpoints").glob("step-*"))
    assert kept == [f"step-{best}", "step-8"]


def test_untrained_student_is_validated_as_step_zero(evaluated, straight):
    assert [step for step, _ in series(evaluated, "validation/kl_loss")] == [0, 8]
    at_end = [dict(series(run, "validation/kl_loss"))[8] for run in (evaluated, straight)]
    assert at_end[0] == at_end[1]


def test_samples_are_the_same_items_at_every_evaluation(evaluated):
    samples = read_samples(evaluated / "samples.jsonl")
    student = [sample for sample in samples if sample["who"] == "student"]
    ids = {step: [sample["id"] for sample in student if sample["step"] == step] for step in (0, 2, 4, 6, 8)}
    assert len(ids[0]) == 3
    assert all(ids[step] == ids[0] for step in ids)
    (teacher,) = {sample["teacher"] for sample in samples if sample["who"] == "teacher"}
    assert teacher == "big"
    assert [sample["id"] for sample in samples if sample["who"] == "teacher"] == ids[0]
    rows = {row["id"]: row for row in read_json_lines(evaluated / "evals" / "step-6" / "own.items.jsonl")}
    for sample in student:
        assert (sample["suite"], sample["reference"]) == ("own", "even")
        assert sample["correct"] == (len(sample["completion"]) % 2 == 0)
        if sample["step"] == 6:
            assert sample["completion"] == rows[sample["id"]]["completion"]
            assert sample["prompt"] == rows[sample["id"]]["prompt"]


def test_each_evaluated_step_has_its_own_weights(evaluated):
    names = [path.name for path in (evaluated / "evals").iterdir()]
    assert sorted(names) == ["step-0", "step-2", "step-4", "step-6", "student", "teacher-big"]
    hashes = {result(evaluated, name)["model_sha256"] for name in names}
    assert len(hashes) == 6


def test_scores_are_in_the_report_and_the_model_card(evaluated):
    page = (evaluated / "report.html").read_text()
    assert "Score during training" in page
    assert "step-2" in page
    assert "eval/own" in (evaluated / "export" / "README.md").read_text()
