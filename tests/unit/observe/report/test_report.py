from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill_rl.config.save import fingerprint, save_config
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import DataError
from distill_rl.evals.compare import of_run
from distill_rl.observe.report.report import read_run, write_report
from distill_rl.observe.report.scores import Evaluation, read_runs
from tests.helpers import results
from tests.helpers.page import HOSTILE, Page


def make_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def training(steps: int = 40) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        record: dict[str, Any] = {"step": step, "time": 1.7e9 + step, "train/kl_loss": 2 / step, "train/nll_loss": 3.0}
        record |= {
            "train/lr": 1e-3 / step,
            "train/grad_norm": 1.0,
            "train/tokens": 100,
            "train/tokens_per_second": 50.0 + step % 3,
        }
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
    evaluation = evaluation or read_runs([run, *comparisons])
    path = write_report(run, evaluation=evaluation, comparisons=comparisons)
    assert path == run / "report.html"
    return Page(path.read_text("utf-8"))


def test_report_is_one_self_contained_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "quickstart", training())
    save_config(make_config(), run / "config.yaml")
    write_result(run, "teacher", score=0.998)
    page = report(run)
    page.require_self_contained()
    assert len(page.scripts) == 3, "data, uPlot, ours"
    assert "url(" not in (run / "report.html").read_text()
    assert sorted(file.name for file in run.iterdir()) == ["config.yaml", "evals", "metrics.jsonl", "report.html"]


def test_report_has_charts_figures_scores_and_config(tmp_path: Path) -> None:
    run = make_run(tmp_path / "quickstart", training())
    save_config(config := make_config(), run / "config.yaml")
    write_result(run, "teacher", score=0.998, per_task={"sort": {"score": 0.75}})
    page = report(run)
    titles = ["Distillation loss (KD)", "Learning rate", "Trained tokens per second", "Seconds per step, by part"]
    assert [text for text in page.texts if text in titles] == titles
    assert page.tags.count("figure") == len(page.data["charts"]) == 4
    for fact in (fingerprint(config)[:16], "2023-11-14 22:14:00 UTC", "4,000", "0.0625", "80.0 s"):
        assert fact in page.text
    for fact in ("teacher", "0.998", "0.400 – 0.600", "96", "sort 0.750"):
        assert fact in page.texts
    assert "global_batch_size: 32" in page.text


def test_data_hold_every_point_of_every_curve(tmp_path: Path) -> None:
    curves = report(make_run(tmp_path / "r", training())).curves("Distillation loss (KD)")
    assert list(curves) == [("r", "train"), ("r", "validation")]
    assert curves["r", "train"][:3] == [(1, 2), (2, 1), (3, 0.666667)]
    assert curves["r", "validation"] == [(10, 0.25), (20, 0.125), (30, 0.0833333), (40, 0.0625)]


def test_last_values_can_be_read_without_scripts(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "r", training()))
    table = page.texts[page.texts.index("Last values of all metrics") :]
    assert table[table.index("validation/kl_loss") + 1] == "0.0625"
    assert ("details", "open", None) in page.attributes, "the page's script closes it"


def test_hostile_names_and_values_are_escaped(tmp_path: Path) -> None:
    records = [{"step": step, "time": HOSTILE, "train/kl_loss": 1.0, f"x/{HOSTILE}": step, "timing/" + HOSTILE.replace("/", ""): 1} for step in (1, 2)]  # fmt: skip
    run = make_run(tmp_path / HOSTILE.replace("/", ""), records)
    (run / "config.yaml").write_text(f"run: {HOSTILE}")
    write_result(run, HOSTILE.replace("/", ""), suite=HOSTILE, per_task={HOSTILE: {"score": 1.0}})
    other = make_run(tmp_path / ("<script>" + "other"), records)
    page = report(run, other)
    page.require_self_contained()
    assert len(page.scripts) == 3
    assert not {"<", ">", "&"} & set(page.scripts[0]), "the data cannot end their element"
    assert page.data["runs"][0] == HOSTILE.replace("/", "")
    assert "<img src=x onerror=alert(1)>" in json.dumps(page.data["charts"])
    assert "{{ 7 * 7 }}" in page.text
    assert "alert(1)" in page.text


def test_report_of_a_run_without_steps(tmp_path: Path) -> None:
    assert "No step has been recorded yet." in report(make_run(tmp_path / "r", [])).texts


def test_one_step_gives_a_table_and_no_charts(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "r", training(1)))
    assert page.data["charts"] == []
    assert page.texts[page.texts.index("train/kl_loss") + 1] == "2"


def test_report_skips_torn_lines_and_null_values(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [*training(5), {"step": 6, "train/kl_loss": None}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/kl_l')
    assert "1 not finite" in report(run).text


def test_records_of_one_step_are_merged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [{"step": 2, "b": 1}, {"step": 1, "a": 1}, {"step": 2, "c": 3}])
    assert read_run(run).records == [{"step": 1, "a": 1}, {"step": 2, "b": 1, "c": 3}]


def test_compared_runs_share_every_chart_and_the_scores(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "kd", training()), make_run(tmp_path / "ce_only", training(20))
    write_result(run, "student_after", score=0.9)
    write_result(other, "student", score=0.4)
    page = report(run, other)
    assert "kd · ce_only" in page.texts
    assert "ce_only: student" in page.texts
    lengths = {curve: len(points) for curve, points in page.curves("Distillation loss (KD)").items()}
    labels = {("kd", "train"): 40, ("ce_only", "train"): 20, ("kd", "validation"): 4, ("ce_only", "validation"): 2}
    assert lengths == labels
    assert set(page.curves("Learning rate")) == {("kd", "lr"), ("ce_only", "lr")}
    assert {"Seconds per step, by part: kd", "Seconds per step, by part: ce_only"} <= set(page.texts)


def test_many_steps_make_a_small_page_that_keeps_the_peaks(tmp_path: Path) -> None:
    records = [{"step": step, "train/kl_loss": 1 / step, "train/x": step % 7} for step in range(1, 30_001)]
    records[12_345]["train/kl_loss"] = 50.0
    run = make_run(tmp_path / "r", records)
    points = report(run).curves("Distillation loss (KD)")["r", "train"]
    assert len(points) <= 2000
    assert (12_346, 50) in points
    assert points[0] == (1, 1)
    assert points[-1][0] == 30_000
    assert (run / "report.html").stat().st_size < 300_000


def test_models_are_listed_in_order_of_evaluation(tmp_path: Path) -> None:
    import os

    run = make_run(tmp_path / "r", training(2))
    for when, model in enumerate(("teacher", "a_student", "m_control")):
        write_result(run, model)
        os.utime(run / "evals" / model / "exact_match.json", (when, when))
    assert read_runs([run]).models == ["teacher", "a_student", "m_control"]


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
    assert set(read_runs([run]).models) == {"good", "odd"}
    page = report(run)
    assert "good" in page.texts
    assert f"{run / 'evals' / 'torn' / 'exact_match.json'}: must be JSON" in page.text, "it is left out and reported"


def test_worker_times_are_not_in_the_drivers_sum(tmp_path: Path) -> None:
    records = [
        record | {"timing/teacher/forward": 100.0} if "timing/step" in record else record for record in training(3)
    ]
    page = report(make_run(tmp_path / "r", records))
    labels = [label for _, label in page.curves("Seconds per step, by part")]
    assert labels == ["student 75%", "other 25%"]
    assert page.texts[page.texts.index("timing/teacher/forward") + 1] == "100"


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
    for fact in ("wrong", "cut off", "grading timed out", "3 not graded", "29", "8", "3", "quiz: num_fewshot differs: 0 (teacher), 5 (student_after)"):  # fmt: skip
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
    assert page.curves("Score during training") == {("r", "quiz"): [(9, 0.09), (10, 0.1), (100, 1)]}


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
    assert set(report(run, other).curves("Score during training")) == {("kd", "quiz"), ("ce", "quiz")}


def test_problems_are_marked_and_ordinary_notes_are_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", training(2))
    results.write_result(run / "evals" / "a", results.numbered([1.0, 0.0]))
    results.write_result(run / "evals" / "b", results.numbered([1.0, 0.0]), num_fewshot=0)
    lists = [
        value for tag, name, value in report(run, evaluation=of_run(run)).attributes if (tag, name) == ("ul", "class")
    ]
    assert "notes" in lists
    assert "notes problems" not in lists
    (run / "evals" / "b" / "torn.json").write_text("{")
    lists = [
        value for tag, name, value in report(run, evaluation=of_run(run)).attributes if (tag, name) == ("ul", "class")
    ]
    assert "notes problems" in lists
