from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill_rl.config.save import fingerprint, save_config
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import DataError
from distill_rl.evals.results.compare import of_run
from distill_rl.observe.report.report import read_run, write_report
from distill_rl.observe.report.scores import Evaluation, read_runs
from tests.helpers import results
from tests.helpers.page import ACTIVE, HOSTILE, Page


def make_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def training(steps: int = 40) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        record: dict[str, Any] = {"step": step, "time": 1.7e9 + step, "train/kl_loss": 2 / step, "train/nll_loss": 3.0}
        record |= {"train/lr": 1e-3, "train/grad_norm": 1.0, "train/tokens": 100, "train/tokens_per_second": 50.0}
        record |= {"timing/step": 2.0, "timing/student": 1.5, "timing/other": 0.5}
        records.append(record)
        if step % 10 == 0:
            records.append({"step": step, "validation/kl_loss": 2.5 / step, "validation/nll_loss": 3.1})
    records.append({"step": steps, "eval/exact_match": 0.5})
    return records


def write_result(run: Path, model: str, **fields: Any) -> None:
    folder = run / "evals" / model
    folder.mkdir(parents=True, exist_ok=True)
    result = {"suite": "exact_match", "score": 0.5, "interval": [0.4, 0.6], "num_items": 96, "truncated": 3}
    (folder / "exact_match.json").write_text(json.dumps(result | {"per_task": {}} | fields))


def make_config() -> Config:
    config = Config(teachers=[TeacherConfig(model="runs/teacher")])
    config.run.name, config.student.model, config.data.path = "quickstart", "runs/student", "data.jsonl"
    return config


def report(run: Path, *comparisons: Path, evaluation: Evaluation | None = None) -> Page:
    runs = [run, *comparisons]
    evaluation = evaluation or read_runs(runs, [folder.name for folder in runs])
    path = write_report(run, evaluation=evaluation, comparisons=comparisons)
    assert path == run / "report.html"
    return Page(path.read_text("utf-8"))


def test_report_is_one_self_contained_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "quickstart", training())
    save_config(make_config(), run / "config.yaml")
    write_result(run, "teacher", score=0.998)
    page = report(run)
    text = (run / "report.html").read_text()
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert not ACTIVE & set(page.tags)
    assert not page.reaches_out
    assert sorted(file.name for file in run.iterdir()) == ["config.yaml", "evals", "metrics.jsonl", "report.html"]


def test_report_has_charts_figures_scores_and_config(tmp_path: Path) -> None:
    run = make_run(tmp_path / "quickstart", training())
    save_config(config := make_config(), run / "config.yaml")
    write_result(run, "teacher", score=0.998, per_task={"sort": {"score": 0.75}})
    page = report(run)
    titles = (
        "Distillation loss (KD)",
        "Cross-entropy with the data (CE)",
        "Learning rate",
        "Gradient norm before clipping",
    )
    for title in (*titles, "Tokens per second", "Seconds per step, by part"):
        assert title in page.texts
    assert page.tags.count("svg") == 7, "six charts and one for train/tokens among the others"
    for fact in (fingerprint(config)[:16], "2023-11-14 22:14:00 UTC", "4,000", "0.0625", "80.0 s"):
        assert fact in page.text
    for fact in ("teacher", "0.998", "0.400 – 0.600", "96", "sort 0.750"):
        assert fact in page.texts
    assert "student 75%" in page.texts
    assert "global_batch_size: 32" in page.text


def test_hostile_names_and_values_are_escaped(tmp_path: Path) -> None:
    records = [{"step": step, "time": HOSTILE, "train/kl_loss": 1.0, f"x/{HOSTILE}": step, "timing/" + HOSTILE.replace("/", ""): 1} for step in (1, 2)]  # fmt: skip
    run = make_run(tmp_path / HOSTILE.replace("/", ""), records)
    (run / "config.yaml").write_text(f"run: {HOSTILE}")
    write_result(run, HOSTILE.replace("/", ""), suite=HOSTILE, per_task={HOSTILE: {"score": 1.0}})
    other = make_run(tmp_path / ("<script>" + "other"), records)
    page = report(run, other)
    assert not ACTIVE & set(page.tags)
    assert not page.reaches_out
    assert "{{ 7 * 7 }}" in page.text
    assert "alert(1)" in page.text


def test_report_of_a_run_without_steps(tmp_path: Path) -> None:
    assert "No step has been recorded yet." in report(make_run(tmp_path / "r", [])).texts


def test_one_step_is_enough(tmp_path: Path) -> None:
    assert "svg" in report(make_run(tmp_path / "r", training(1))).tags


def test_report_skips_torn_lines_and_null_values(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [*training(5), {"step": 6, "train/kl_loss": None}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/kl_l')
    assert "1 not finite" in report(run).text


def test_records_of_one_step_are_merged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [{"step": 2, "b": 1}, {"step": 1, "a": 1}, {"step": 2, "c": 3}])
    assert read_run(run).records == [{"step": 1, "a": 1}, {"step": 2, "b": 1, "c": 3}]


def test_compared_runs_share_the_charts_and_the_table(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "kd", training()), make_run(tmp_path / "ce_only", training())
    write_result(run, "student_after", score=0.9)
    write_result(other, "student", score=0.4)
    page = report(run, other)
    assert page.texts.count("validation, ce_only") == 2
    assert "ce_only: student" in page.texts
    assert "dashed" in " ".join(value or "" for _, name, value in page.attributes if name == "class")


def test_models_are_listed_in_order_of_evaluation(tmp_path: Path) -> None:
    import os

    run = make_run(tmp_path / "r", training(2))
    for when, model in enumerate(("teacher", "a_student", "m_control")):
        write_result(run, model)
        os.utime(run / "evals" / model / "exact_match.json", (when, when))
    assert read_runs([run], ["r"]).models == ["teacher", "a_student", "m_control"]


def test_summary_scores_are_used_without_results(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", training(2))
    summary = {"teacher": 1.0, "student_before": 0.0, "student_after": 0.94, "ce_only": 0.55, "seconds": 100.0}
    (run / "summary.json").write_text(json.dumps(summary))
    page = report(run)
    assert {"student_after", "0.940", "ce_only", "0.550"} <= set(page.texts)
    assert "seconds" not in page.texts


def test_damaged_results_are_left_out_and_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", training(2))
    write_result(run, "good")
    for name, content in (("torn", '{"score": 0.'), ("list", "[]"), ("text", '{"score": "high"}'), ("odd", '{"score": 0.5, "interval": 3, "per_task": [1], "num_items": "x"}')):  # fmt: skip
        write_result(run, name)
        (run / "evals" / name / "exact_match.json").write_text(content)
    assert set(read_runs([run], ["r"]).models) == {"good", "odd"}
    page = report(run)
    assert "good" in page.texts
    assert f"{run / 'evals' / 'torn' / 'exact_match.json'}: must be JSON" in page.text, "it is left out and reported"


def test_worker_times_are_not_in_the_drivers_sum(tmp_path: Path) -> None:
    records = [record | {"timing/teacher/forward": 100.0} for record in training(3)]
    page = report(make_run(tmp_path / "r", records))
    assert "student 75%" in page.texts
    assert "timing/teacher/forward" in page.texts


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"report of .*nothing: a run directory holds metrics\.jsonl"):
        write_report(tmp_path / "nothing", evaluation=Evaluation())
    assert not (tmp_path / "nothing").exists()


def test_score_table_has_differences_outcomes_and_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", training(2))
    good, bad = results.numbered([1.0] * 90 + [0.0] * 10), results.numbered([1.0] * 60 + [0.0] * 40)
    results.write_result(run / "evals" / "student_after", bad, macro=0.625, outcomes={"right": 60, "wrong": 29, "truncated": 8, "grader_timeout": 3})  # fmt: skip
    results.write_result(run / "evals" / "teacher", good, num_fewshot=0)
    page = report(run, evaluation=of_run(run))
    for fact in ("difference from teacher, 95\xa0% interval", "−0.300", "−0.390 to −0.210", "0 / 30", "0.625"):
        assert fact in page.texts
    for fact in ("wrong", "cut off", "grading timed out", "29", "8", "3", "quiz: num_fewshot differs: 0 (teacher), 5 (student_after)"):  # fmt: skip
        assert fact in page.texts
    assert "no answer found" not in page.texts, "it did not occur"


def test_evaluations_during_training_have_chart_and_table(tmp_path: Path) -> None:
    scored = [{"step": step, "eval/quiz": step / 100, "eval/quiz/items": 9.0} for step in (9, 10, 100)]
    run = make_run(tmp_path / "r", scored)
    for step in (100, 9, 10):
        results.write_result(run / "evals" / f"step-{step}", results.numbered([1.0, 0.0]))
    results.write_result(run / "evals" / "teacher", results.numbered([1.0, 1.0]))
    page = report(run)
    names = [text for text in page.texts if text in ("teacher", "step-9", "step-10", "step-100", "Evaluations during training")]  # fmt: skip
    assert names == ["teacher", "Evaluations during training", "step-9", "step-10", "step-100"]
    assert page.texts.count("Score during training") == 1
    assert "eval/quiz" not in page.texts
    assert "eval/quiz/items" in page.texts, "a metric that is not a score is among the other metrics"


def test_evaluations_during_training_are_shown_if_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", training(2))
    results.write_result(run / "evals" / "step-1", results.numbered([1.0, 0.0]))
    page = report(run)
    assert "step-1" in page.texts
    assert "Evaluations during training" not in page.texts


def test_many_tasks_get_a_separate_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", training(2))
    tasks = [f"subject {index}" for index in range(57)]
    results.write_result(run / "evals" / "student", results.numbered([1.0] * 57), tasks=tasks)
    page = report(run)
    assert "quiz by task (57)" in page.texts
    assert "by task" not in page.texts
    assert page.texts.count("subject 56") == 1


def test_compared_runs_share_the_score_chart(tmp_path: Path) -> None:
    run, other = (make_run(tmp_path / name, [{"step": 1, "eval/quiz": 0.1}, {"step": 2, "eval/quiz": 0.2}]) for name in ("kd", "ce"))  # fmt: skip
    page = report(run, other)
    assert {"quiz", "quiz, ce"} <= set(page.texts)
