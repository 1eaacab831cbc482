from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distill_rl.cli import main
from tests.helpers.page import Page
from tests.helpers.results import numbered, write_result

GOOD, BAD = numbered([1.0] * 90 + [0.0] * 10), numbered([1.0] * 60 + [0.0] * 40)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_result(tmp_path / "out" / "teacher", GOOD)
    write_result(tmp_path / "out" / "student_after", BAD, num_fewshot=0)
    return tmp_path / "out"


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    records = [{"step": step, "train/kl_loss": 1 / step, "validation/kl_loss": 1.0} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_result(folder / "evals" / "student", GOOD)
    return folder


def text_of(path: Path) -> str:
    return Page(path.read_text("utf-8")).text


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("distill-rl: error: ") for line in capsys.readouterr().err.splitlines()]


def test_models_are_compared_in_a_table_and_a_page(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "teacher 0.900 0.100 to 0.900",
        "student_after 0.600 0.100 to 0.900 -0.300 -0.390 to -0.210 100",
    ):
        assert words in printed
    assert "note quiz: num_fewshot differs: 5 (teacher), 0 (student_after)" in printed
    assert printed.endswith(f"report {out / 'comparison.html'}")
    assert "−0.300" in text_of(out / "comparison.html")


def test_items_without_a_grade_are_counted_beside_the_score(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {"right": 60, "wrong": 35, "grader_timeout": 2, "grader_failed": 3}
    write_result(out / "student_after", BAD, num_fewshot=0, outcomes=outcomes)
    assert main(["report", str(out)]) == 0
    assert "-0.210 100 (5 not graded)" in " ".join(capsys.readouterr().out.split())
    assert "5 not graded" in text_of(out / "comparison.html")


def test_narrow_terminal_shows_outcomes_below_the_table(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["report", str(out / "teacher"), str(out / "student_after")]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    (figures,) = [line for line in lines if "0.600" in line]
    assert figures.split() == [
        "student_after",
        "0.600",
        "0.100",
        "to",
        "0.900",
        "-0.300",
        "-0.390",
        "to",
        "-0.210",
        "100",
    ]
    assert "student_after: wrong 40" in lines


def test_the_baseline_and_the_file_are_options(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = out.parent / "new" / "page.html"
    assert main(["report", str(out), "--baseline", "student_after", "-o", str(page)]) == 0
    assert "+0.300" in capsys.readouterr().out
    assert "+0.300" in text_of(page)
    assert not (out / "comparison.html").exists()


def test_a_run_has_its_report_with_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "kd")
    write_result(run / "evals" / "teacher", BAD)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"report    {run / 'report.html'}\n"
    assert {"kd", "+0.300"} <= set(Page((run / "report.html").read_text()).texts)


def test_several_runs_share_the_report_of_the_first(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "kd"), make_run(tmp_path / "ce")
    assert main(["report", str(first), str(second), "--baseline", "ce: student"]) == 0
    page = Page((first / "report.html").read_text())
    assert {"kd · ce", "ce: student", "difference from ce: student, 95\xa0% interval"} <= set(page.texts)
    assert ("ce", "train") in page.curves("Distillation loss (KD)")
    assert not (second / "report.html").exists()


def test_run_beside_result_folders_keeps_its_report(out: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "kd")
    for paths in ([run, out], [run / "evals"]):
        assert main(["report", *map(str, paths)]) == 0
    assert "student" in text_of(run / "comparison.html")
    assert "student" in text_of(run / "evals" / "comparison.html")
    assert not (run / "report.html").exists()


def test_all_paths_without_results_are_reported(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out.parent / "empty").mkdir()
    assert main(["report", str(out), str(out.parent / "empty"), "/no/such"]) == 2
    first, second = errors(capsys)
    assert f"{out.parent / 'empty'}: must be a run directory" in first
    assert "/no/such: must be a run directory" in second
    assert "no such folder" in second


def test_a_run_beside_a_path_that_is_none_is_not_called_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "kd"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n")
    assert main(["report", str(run), "/no/such"]) == 2
    first, second = errors(capsys)
    assert f"{run}: must hold evaluation results, as other paths are not run directories" in first
    assert "/no/such: must be a run directory" in second


def test_all_damaged_files_are_reported_and_nothing_written(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / "teacher" / "mmlu.json").write_text('{"score": 0.')
    (out / "student_after" / "quiz.items.jsonl").write_text('{"id": 1}\n')
    assert main(["report", str(out)]) == 2
    first, second = errors(capsys)
    assert "mmlu.json: must be JSON" in first
    assert "quiz.items.jsonl, line 1: " in second
    assert not (out / "comparison.html").exists()


@pytest.mark.parametrize("run", [False, True], ids=["results", "run"])
def test_unusable_options_are_reported_in_one_line(
    out: Path, tmp_path: Path, run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "kd") if run else out
    assert main(["report", str(path), "--baseline", "nobody"]) == 2
    assert [line.startswith("--baseline: must be a model among ") for line in errors(capsys)] == [True]
    assert main(["report", str(path), "--out", str(tmp_path)]) == 2
    assert [f"{tmp_path}: must be a file that can be written" in line for line in errors(capsys)] == [True]


def test_names_and_notes_are_text_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index, name in enumerate(("[red]plain", "\x1b[31mred", "[b]")):
        write_result(tmp_path / name, GOOD, suite="[bold]s", num_fewshot=index, outcomes={"[/odd]": 3})
    assert main(["report", str(tmp_path), "--baseline", "[b]"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    for words in ("[red]plain", r"\x1b[31mred", "to [b]", "[bold]s", "[/odd] 3"):
        assert words in printed
