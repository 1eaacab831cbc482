"""What a finished quickstart keeps to. A test class makes the fixture `finished`, a `Quickstart`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from distill_rl.demo.recipe import RECIPES
from tests.helpers.command import Cluster, Ended, environment, run_python, series
from tests.helpers.page import Page

SEED = 2
DEADLINE_S = 1200


@dataclass(frozen=True)
class Quickstart:
    name: str
    steps: int
    ended: Ended
    runs: Path
    material: Path
    stored: bool = False

    @property
    def run(self) -> Path:
        return self.runs / self.name

    @property
    def flags(self) -> tuple[str, ...]:
        return _flags(self.name, self.stored)

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
    variables = environment() | dict(cluster.variables if cluster else {})
    return run_python(
        ["-m", "distill_rl", "quickstart", *map(os.fspath, arguments), *settings], variables, None, DEADLINE_S
    )


def _flags(name: str, stored: bool) -> tuple[str, ...]:
    return (*(["--cross"] if name == "quickstart-cross" else []), *(["--stored"] if stored else []))


def finish(name: str, root: Path, steps: int, cluster: Cluster | None = None, *, stored: bool = False) -> Quickstart:
    """Runs a quickstart to its end. Without a cluster its runs start Ray, as a user's do."""
    runs, material, flags = root / "runs", root / "material", _flags(name, stored)
    settings = ["--runs", runs, "--material", material, "--seed", str(SEED), *flags, f"train.steps={steps}"]
    ended = quickstart(*settings, cluster=cluster)
    assert ended.code == 0, ended.out + ended.err
    return Quickstart(name, steps, ended, runs, material, stored)


class QuickstartContract:
    def test_distillation_beats_the_ce_only_control(self, finished):
        summary = finished.summary
        assert summary["teacher"] > 0.95
        assert summary["student_before"] < 0.05
        # The control is far behind: about 0.65 against 0.95 (0.9 across tokenizers), beyond the noise of 600 questions.
        assert summary["intervals"]["student_after"][0] > summary["intervals"]["ce_only"][1]
        assert (summary["seed"], summary["num_questions"]) == (SEED, 600)
        assert summary["tokens_per_second"] > 0
        assert summary["seconds"] > 0

    def test_the_table_shows_the_summary_and_the_caveat(self, finished):
        for model in ("teacher", "student_before", "student_after", "ce_only", "half_rows"):
            assert f"{finished.summary[model]:.3f}" in finished.ended.out
        assert "Without wrong answers the two would tie" in " ".join(finished.ended.out.split())

    def test_run_and_control_see_the_same_data_in_order(self, finished):
        control = finished.runs / f"{finished.name}-ce"
        for metric in ("train/tokens", "align/tokens"):
            assert series(finished.run, metric) == series(control, metric)
            assert len(series(control, metric)) == finished.steps
        assert not series(control, "train/kl_loss")

    def test_half_of_the_rows_are_read_as_often(self, finished):
        half = finished.runs / f"{finished.name}-half"
        tokens = series(half, "train/tokens")
        assert len(tokens) == finished.steps // 2
        everything = sum(value for _, value in series(finished.run, "train/tokens"))
        assert sum(value for _, value in tokens) == pytest.approx(everything / 2, rel=0.05)
        assert series(half, "train/kl_loss")
        assert finished.summary["student_before"] < finished.summary["half_rows"] < finished.summary["student_after"]

    def test_the_export_answers_a_held_out_question(self, finished):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(finished.run / "export")
        tokenizer = AutoTokenizer.from_pretrained(finished.run / "export")
        rows = list(
            map(
                json.loads,
                (finished.run / "evals" / "student_after" / "exact_match.items.jsonl").read_text().splitlines(),
            )
        )
        row = next(row for row in rows if row["score"] == 1)
        prompt = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == row["answer"]
        trained_on = (finished.material / f"{RECIPES[finished.name].folder}-{SEED}" / "train.jsonl").read_text()
        assert json.dumps(row["prompt"][0]["content"]) not in trained_on

    def test_the_report_charts_kd_and_ce(self, finished):
        page = (finished.run / "report.html").read_text()
        assert "Distillation loss (KD)" in page
        assert "Cross-entropy with the data (CE)" in page
        assert ("Alignment across tokenizers" in page) == finished.crosses

    def test_the_report_is_self_contained_and_compares_five_models(self, finished):
        page = Page((finished.run / "report.html").read_text())
        assert {"teacher", "student_before", "student_after", "ce_only", "half_rows"} <= set(page.texts)
        assert len(page.data["runs"]) == 2
        page.require_self_contained()

    def test_the_report_shows_answers_of_teacher_student_and_control_side_by_side(self, finished):
        page = Page((finished.run / "report.html").read_text())
        assert len(page.data["samples"]) == 4
        for sample in page.data["samples"]:
            last = [(each["who"], each["run"]) for each in sample["answers"] if each["step"] in (0, finished.steps)]
            assert sorted(last) == [("student", 0), ("student", 1), ("teacher", 0)]

    def test_a_second_quickstart_without_clean_is_refused(self, finished):
        before = (finished.run / "summary.json").stat().st_mtime_ns
        ended = finished.again()
        assert ended.code == 2
        assert [line for line in ended.err.splitlines() if "in use" in line and "--clean" in line]
        assert (finished.run / "summary.json").stat().st_mtime_ns == before

    def test_bad_input_of_a_run_keeps_its_exit_code(self, finished, tmp_path):
        ended = quickstart(
            "--runs", tmp_path, "--material", finished.material, "--seed", str(SEED), *finished.flags, "train.stepz=5"
        )
        assert ended.code == 2
        assert "train.stepz" in ended.err
        assert "Traceback" not in ended.err
