"""The quickstart from the command line, at full length across tokenizers and at half length with one tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from distill_rl.quickstart.recipe import RECIPES
from tests.helpers.command import Cluster, Ended, environment, series

pytestmark = pytest.mark.cli

SEED = 2
STEPS = {"quickstart": 300, "quickstart-cross": 600}
"""The quickstart itself takes 600 steps. After 300 the gap between the two students is as wide: 0.75 against 0.47."""
DEADLINE_S = 1200


@dataclass(frozen=True)
class Quickstart:
    name: str
    ended: Ended
    runs: Path
    material: Path

    @property
    def run(self) -> Path:
        return self.runs / self.name

    @property
    def steps(self) -> int:
        return STEPS[self.name]

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--cross",) if self.crosses else ()

    @property
    def crosses(self) -> bool:
        return self.name == "quickstart-cross"

    @property
    def summary(self) -> dict:
        return json.loads((self.run / "summary.json").read_text())

    def again(self, *arguments: str) -> Ended:
        return quickstart(
            "--runs", self.runs, "--material", self.material, "--seed", str(SEED), *self.flags, *arguments
        )


def quickstart(*arguments: str | Path, cluster: Cluster | None = None) -> Ended:
    settings = cluster.settings if cluster else ()
    command = [sys.executable, "-m", "distill_rl.quickstart", *map(os.fspath, arguments), *settings]
    variables = environment() | dict(cluster.variables if cluster else {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=variables)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module", params=RECIPES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """A finished quickstart. With one tokenizer its runs start Ray as a user's do; across tokenizers they join one."""
    root = tmp_path_factory.mktemp(request.param)
    runs, material = root / "runs", root / "material"
    crosses = request.param == "quickstart-cross"
    flags = ["--cross"] if crosses else []
    steps = f"train.steps={STEPS[request.param]}"
    cluster = request.getfixturevalue("cluster") if crosses else None
    ended = quickstart("--runs", runs, "--material", material, "--seed", str(SEED), *flags, steps, cluster=cluster)
    assert ended.code == 0, ended.out + ended.err
    return Quickstart(request.param, ended, runs, material)


def test_distillation_beats_the_ce_only_control(finished):
    summary = finished.summary
    assert summary["teacher"] > 0.95
    assert summary["student_before"] < 0.05
    # The control is far behind: about 0.65 against 0.95 (0.9 across tokenizers), beyond the noise of 600 questions.
    assert summary["intervals"]["student_after"][0] > summary["intervals"]["ce_only"][1]
    assert (summary["seed"], summary["num_questions"]) == (SEED, 600)
    assert summary["tokens_per_second"] > 0
    assert summary["seconds"] > 0


def test_the_table_shows_the_summary_and_the_caveat(finished):
    for model in ("teacher", "student_before", "student_after", "ce_only"):
        assert f"{finished.summary[model]:.3f}" in finished.ended.out
    assert "Without wrong answers the two would tie" in " ".join(finished.ended.out.split())


def test_run_and_control_see_the_same_data_in_order(finished):
    control = finished.runs / f"{finished.name}-ce"
    for metric in ("train/tokens", "align/tokens"):
        assert series(finished.run, metric) == series(control, metric)
        assert len(series(control, metric)) == finished.steps
    assert not series(control, "train/kl_loss")


def test_the_export_answers_a_held_out_question(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished.run / "export")
    tokenizer = AutoTokenizer.from_pretrained(finished.run / "export")
    rows = list(
        map(json.loads, (finished.run / "evals" / "student_after" / "exact_match.items.jsonl").read_text().splitlines())
    )
    row = next(row for row in rows if row["score"] == 1)
    prompt = tokenizer.apply_chat_template(
        row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == row["answer"]
    trained_on = (finished.material / f"{RECIPES[finished.name].folder}-{SEED}" / "train.jsonl").read_text()
    assert json.dumps(row["prompt"][0]["content"]) not in trained_on


def test_cross_tokenizer_chunks_are_covered_and_the_student_stops(finished):
    summary = finished.summary
    if not finished.crosses:
        assert "one_to_one_share" not in summary
        return
    assert 0.33 < summary["one_to_one_share"] < 0.41
    assert summary["coverage"] == 1
    one_to_one = f"{summary['one_to_one_share']:.0%} are one token on either side"
    assert one_to_one in " ".join(finished.ended.out.split())
    assert {count for _, count in series(finished.run, "align/method/bytes")} == {32}
    assert {share for _, share in series(finished.run, "align/exact")} == {1}
    answers = (finished.run / "evals" / "student_after" / "exact_match.json").read_text()
    assert json.loads(answers)["truncated"] <= 6, "the student learns to end an answer, too"


def test_the_report_charts_kd_and_ce(finished):
    page = (finished.run / "report.html").read_text()
    assert "Distillation loss (KD)" in page
    assert "Cross-entropy with the data (CE)" in page
    assert ("Alignment across tokenizers" in page) == finished.crosses


def test_the_report_is_self_contained_and_compares_four_models(finished):
    page = (finished.run / "report.html").read_text()
    assert all(name in page for name in ("teacher", "student_before", "student_after", "ce_only"))
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page


def test_a_second_quickstart_without_clean_is_refused(finished):
    before = (finished.run / "summary.json").stat().st_mtime_ns
    ended = finished.again()
    assert ended.code == 2
    assert [line for line in ended.err.splitlines() if "in use" in line and "--clean" in line]
    assert (finished.run / "summary.json").stat().st_mtime_ns == before


def test_bad_input_of_a_run_keeps_its_exit_code(finished, tmp_path):
    ended = quickstart(
        "--runs", tmp_path, "--material", finished.material, "--seed", str(SEED), *finished.flags, "train.stepz=5"
    )
    assert ended.code == 2
    assert "train.stepz" in ended.err
    assert "Traceback" not in ended.err
