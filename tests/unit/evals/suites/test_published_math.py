from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill_rl.errors import DataError
from distill_rl.evals.suites.base import Item, Questions, Verdict
from distill_rl.evals.suites.registry import find
from tests.helpers.align import DATA
from tests.helpers.eval_forms import Rows, one_file, write, write_splits

GOLDEN = Path(__file__).with_name("golden")
REAL = DATA / "evals"
ROWS = [
    {
        "problem": "What is $1 + 1$?",
        "level": "Level 1",
        "type": "Counting & Probability",
        "solution": "One and one are $\\boxed{2}$.",
        "answer": "2",
    },
    {
        "problem": "What is half of $\\frac{1}{2}$?",
        "level": "Level 2",
        "type": "Algebra",
        "solution": "First $\\boxed{x}$, then $\\boxed{\\frac{1}{4} }$.",
        "answer": " \\frac{1}{4} ",
    },
]


def load(data: Path, name: str = "math", num_fewshot: int | None = None) -> Questions:
    suite = find(name)
    return suite.load(data, suite.num_fewshot if num_fewshot is None else num_fewshot)


def original(folder: Path, rows: Rows) -> Path:
    """One file per problem, whose answer is in its solution only."""
    for number, row in enumerate(rows):
        path = folder / "MATH" / "test" / str(row["type"]).lower().replace(" & ", "_and_") / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({key: row[key] for key in ("problem", "level", "type", "solution")}))
    return folder


def hub_types(folder: Path, rows: Rows) -> Path:
    for row in rows:
        name = str(row["type"]).lower().replace(" & ", "_and_")
        write(folder / "EleutherAI" / "hendrycks_math" / name / "test-00000-of-00001.parquet", [row])
    return folder


def saved_together(folder: Path, rows: Rows) -> Path:
    return write_splits(folder / "competition_math", {"train": rows[:1], "test": rows})


@pytest.mark.parametrize(
    "form",
    [
        *map(one_file, ("math/test.parquet", "MATH/test.jsonl", "math.json", "math/test.csv", "math_test.arrow")),
        *map(one_file, ("math/test", "hendrycks_math")),
        original,
        hub_types,
        saved_together,
    ],
)
@pytest.mark.parametrize("name", ["math", "minerva_math"])
def test_every_form_gives_the_same_questions(tmp_path: Path, form: Callable[[Path, Rows], Path], name: str) -> None:
    questions = load(form(tmp_path / "found", ROWS), name)
    expected = load(one_file("test.jsonl")(tmp_path / "expected", ROWS), name)
    assert sorted(questions.items, key=lambda item: item.id) == sorted(expected.items, key=lambda item: item.id)
    assert questions.content_sha256 == expected.content_sha256
    assert questions.warnings == ("MATH test: 2 rows, the published data have 5000",)
    assert {(item.task, item.answer) for item in questions.items} == {
        ("counting_and_probability", "2"),
        ("algebra", "\\frac{1}{4}"),
    }


@pytest.mark.parametrize(
    "form", [one_file(name) for name in ("math/math500.parquet", "MATH-500/test.jsonl", "math500.csv", "math500/test")]
)
def test_math500_is_found_in_its_own_folder_or_beside_math(tmp_path: Path, form: Callable[[Path, Rows], Path]) -> None:
    write(tmp_path / "math" / "test.parquet", ROWS)
    questions = load(form(tmp_path, [ROWS[0] | {"subject": "Counting & Probability", "type": None}]), "math500")
    assert questions.items == load(tmp_path, "math").items[:1]
    assert questions.warnings == ("MATH-500: 1 rows, the published data have 500",)


def test_four_shot_prompt_equals_golden_file(tmp_path: Path) -> None:
    items = load(one_file("math/test.parquet")(tmp_path, ROWS), "minerva_math").items
    assert isinstance(items[0].prompt, str)
    assert (items[0].prefix + items[0].prompt).encode() == (GOLDEN / "minerva_math.txt").read_bytes()
    assert {item.prefix for item in items} == {items[0].prefix}
    fewer = load(tmp_path, "minerva_math", 1).items[0].prefix
    assert items[0].prefix.startswith(fewer)
    assert fewer.count("Problem:") == 1


@pytest.mark.parametrize("num_fewshot", [-1, 5])
def test_more_examples_than_the_paper_has_are_refused(tmp_path: Path, num_fewshot: int) -> None:
    with pytest.raises(DataError, match=f"num_fewshot of minerva_math: must be 0 to 4, .*; got {num_fewshot}"):
        load(one_file("math/test.parquet")(tmp_path, ROWS), "minerva_math", num_fewshot)


def test_the_chat_asks_for_reasoning_and_a_box(tmp_path: Path) -> None:
    (message,) = load(one_file("math/test.parquet")(tmp_path, ROWS)).items[0].prompt
    instruction = "Please reason step by step, and put your final answer within \\boxed{}."
    assert message == {"role": "user", "content": f"What is $1 + 1$?\n\n{instruction}"}


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"problem": "p", "solution": "no box"}, "needs an `answer`, or a `solution` with the answer in \\boxed{}"),
        ({"problem": "p", "solution": "\\boxed{1"}, "needs an `answer`, or a `solution`"),
        ({"problem": "p", "answer": " "}, "`answer` must be non-empty text"),
        ({"problem": "p", "answer": [1]}, "`answer` must be non-empty text"),
        ({"problem": "p", "answer": "so\n#### 18"}, "`####` is how GSM8K writes its answers"),
        ({"problem": "", "answer": "1"}, "`problem` must be non-empty text"),
        ({"problem": "p", "answer": "\ud800"}, "`answer` must be Unicode text"),
    ],
)
def test_bad_row_is_reported_with_place_and_rule(tmp_path: Path, row: dict[str, Any], rule: str) -> None:
    path = write(tmp_path / "test.jsonl", [ROWS[0], row])
    with pytest.raises(DataError) as caught:
        load(path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}, row 2: ")
    assert rule in problem


def test_numeric_answers_and_missing_types_are_accepted(tmp_path: Path) -> None:
    (item,) = load(write(tmp_path / "test.jsonl", [{"question": "1 + 1", "answer": 2}])).items
    assert (item.answer, item.task) == ("2", "")


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"problem": "p", "gold": "1"}, r"column with the answer \(`answer` .*; got the columns problem, gold"),
        ({"question": "p", "choices": [], "answer": 1}, "must have no column with choices"),
    ],
)
def test_columns_of_other_data_are_reported(tmp_path: Path, row: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        load(write(tmp_path / "test.jsonl", [row]))


@pytest.mark.parametrize(
    ("name", "completion", "verdict"),
    [
        ("math", "So $\\boxed{x}$, no: $\\boxed{0.25}$.", Verdict(1.0, "0.25")),
        ("math500", "\\boxed{\\dfrac14}", Verdict(1.0, "\\dfrac14")),
        ("math", "\\boxed{4}", Verdict(0.0, "4")),
        ("math", "The answer is 1/4.", Verdict(0.0, None)),
        ("math", "\\boxed{\\frac{1}{4}", Verdict(0.0, None)),
        ("minerva_math", " Final Answer: The final answer is $1/4$. I hope it is correct.\n\n", Verdict(1.0, "$1/4$")),
        ("minerva_math", "Final Answer: The final answer is $4$. I hope it is correct.", Verdict(0.0, "$4$")),
        ("minerva_math", "It is $\\boxed{\\frac{1}{4}}$.", Verdict(0.0, None)),
    ],
)
def test_answer_is_judged_where_the_prompt_requests_it(name: str, completion: str, verdict: Verdict) -> None:
    assert find(name).judge(Item("i", "p", "\\frac{1}{4}"), completion) == verdict


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real data of the suites, which are no part of the project")
@pytest.mark.parametrize(("name", "count"), [("math", 5000), ("minerva_math", 5000), ("math500", 500)])
def test_the_real_data_are_the_published_ones(name: str, count: int) -> None:
    questions = load(REAL, name)
    assert (len(questions.items), questions.warnings) == (count, ())
    assert len({item.id for item in questions.items}) == count
    assert len({item.task for item in questions.items}) == 7
    known = {item.id: item.answer for item in load(REAL, "math").items}
    assert all(known[item.id] == item.answer for item in questions.items)
