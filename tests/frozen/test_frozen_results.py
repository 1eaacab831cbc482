"""Metrics and evaluations of an earlier commit are reported, compared and repeated."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.frozen import record
from tests.frozen.past import Past, reads, succeeds
from tests.helpers.command import series

QUESTIONS = ("--suites", "exact_match", "--data", "data/questions.jsonl", "--max-new-tokens", "4", "--shards", "0")
MODELS = ("--model", "student=models/student", "trained=runs/two-teachers/export")


@pytest.mark.parametrize("run", record.RUNS)
@reads("runs/{run}")
def test_a_run_is_reported(past: Past, run: str):
    succeeds("report", f"runs/{run}", "--out", "page.html")
    page = Path("page.html").read_text()
    (_, loss) = series(Path("runs", run), "train/loss")[-1]
    assert f"{loss:.4g}" in page
    assert ("exact_match" in page) == (run == "lora")


@reads("results")
def test_results_are_compared(past: Past):
    printed = succeeds("report", "results")
    for result in past.recorded["scores"].values():
        assert f"{result['score']:.3f}" in printed
    assert record.scores(Path("results")) == past.recorded["scores"]


@reads("results")
def test_an_evaluation_that_is_there_is_not_repeated(past: Past):
    shutil.copytree("results", "kept")
    before = {path: path.stat().st_mtime_ns for path in Path("kept").rglob("*.items.jsonl")}
    assert len(before) == 2
    succeeds("eval", *MODELS, *QUESTIONS, "--out", "kept")
    assert before == {path: path.stat().st_mtime_ns for path in Path("kept").rglob("*.items.jsonl")}


@reads("results")
def test_a_new_evaluation_has_the_scores_of_then(past: Past):
    succeeds("eval", *MODELS, *QUESTIONS, "--out", "new")
    assert record.scores(Path("new")) == past.recorded["scores"]
    for model in ("student", "trained"):
        name = f"{model}/exact_match.items.jsonl"
        assert Path("new", name).read_text() == Path("results", name).read_text()
