from __future__ import annotations

from pathlib import Path

from distill_rl.evals.compare import compare, find
from distill_rl.observe.report.report import write_comparison
from tests.helpers.page import HOSTILE, Page
from tests.helpers.results import numbered, write_result

GOOD, BAD = numbered([1.0] * 90 + [0.0] * 10), numbered([1.0] * 60 + [0.0] * 40)


def page_of(folder: Path) -> tuple[Page, str]:
    write_comparison(compare(find([folder])), folder / "comparison.html")
    text = (folder / "comparison.html").read_text("utf-8")
    return Page(text), text


def test_comparison_shows_scores_differences_tasks_and_settings(tmp_path: Path) -> None:
    write_result(tmp_path / "teacher", GOOD, tasks=["algebra", "history"], title="a quiz")
    write_result(tmp_path / "student_after", BAD, tasks=["algebra", "history"], num_fewshot=0, tokens_per_second=1234.5)
    page, _ = page_of(tmp_path)
    for text in ("teacher · student_after", "baseline", "quiz", "a quiz", "0.900", "0.600", "−0.300"):
        assert text in page.texts
    for text in ("0.100 – 0.900", "−0.390 to −0.210", "0 / 30", "quiz by task (2)", "algebra", "1,234"):
        assert text in page.texts
    assert "quiz: num_fewshot differs: 5 (teacher), 0 (student_after)" in page.texts
    assert [value for _, name, value in page.attributes if value == "down" and name == "class"] == ["down"]


def test_insignificant_difference_has_no_colour(tmp_path: Path) -> None:
    write_result(tmp_path / "a", numbered([1.0, 0.0, 1.0, 0.0]))
    write_result(tmp_path / "b", numbered([0.0, 1.0, 1.0, 1.0]))
    page, _ = page_of(tmp_path)
    assert "+0.250" in page.texts
    assert not {"up", "down"} & {value for _, name, value in page.attributes if name == "class"}


def test_one_model_has_a_page_without_differences(tmp_path: Path) -> None:
    write_result(tmp_path / "a", GOOD)
    page, _ = page_of(tmp_path)
    assert "0.900" in page.texts
    assert "difference" not in page.text


def test_comparison_is_self_contained_and_escapes_names(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "")
    for model in (name, "plain"):
        write_result(tmp_path / model, GOOD, tasks=[HOSTILE], title=HOSTILE, model=HOSTILE, data_sha256=HOSTILE + model)
    for result in tmp_path.glob("*/quiz.json"):
        result.write_text(result.read_text().replace('"suite": "quiz"', '"suite": "<script>alert(2)</script>"'))
        outcomes = '"outcomes": {"<img src=x onerror=alert(3)>": 3, '
        result.write_text(result.read_text().replace('"outcomes": {', outcomes, 1))
    page, text = page_of(tmp_path)
    page.require_self_contained()
    assert not page.scripts
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    for shown in ("{{ 7 * 7 }}", "alert(1)", "alert(2)", "alert(3)"):
        assert shown in page.text


def test_results_of_an_older_version_are_shown(tmp_path: Path) -> None:
    folder = write_result(tmp_path / "a", GOOD)
    (folder / "quiz.json").write_text('{"suite": "quiz", "score": 0.5, "truncated": 3}')
    page, _ = page_of(tmp_path)
    assert {"0.500", "cut off", "3"} <= set(page.texts)
