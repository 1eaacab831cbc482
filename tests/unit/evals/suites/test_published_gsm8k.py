from __future__ import annotations

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
    {"question": "Tom has 3 pens and buys 4 more. How many pens has he?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A house for $1,000, twice?", "answer": "2 * 1000 = 2000\n#### 2,000"},
    {"question": "Five below zero, half of it?", "answer": "-5 / 2\n#### -2.5"},
]


def load(data: Path, name: str = "gsm8k", num_fewshot: int | None = None) -> Questions:
    suite = find(name)
    return suite.load(data, suite.num_fewshot if num_fewshot is None else num_fewshot)


def saved_together(folder: Path, rows: Rows) -> Path:
    return write_splits(folder / "gsm8k", {"train": ROWS[:1], "test": rows}).parent


@pytest.mark.parametrize(
    "form",
    [
        *map(one_file, ("gsm8k/test.jsonl", "gsm8k/main/test-00000-of-00001.parquet", "GSM8K/test.csv", "gsm8k.json")),
        *map(one_file, ("gsm8k/test", "gsm8k", "openai/gsm8k/main/test.arrow", "grade-school-math/data/test.jsonl")),
        saved_together,
    ],
)
def test_every_form_gives_the_same_questions(tmp_path: Path, form: Callable[[Path, Rows], Path]) -> None:
    questions = load(form(tmp_path / "found", ROWS))
    expected = load(one_file("test.jsonl")(tmp_path / "expected", ROWS))
    assert questions.items == expected.items
    assert questions.content_sha256 == expected.content_sha256
    assert questions.warnings == ("GSM8K test: 3 rows, the published data have 1319",)
    assert [item.answer for item in questions.items] == ["7", "2000", "-2.5"]


def test_eight_shot_prompt_equals_golden_file(tmp_path: Path) -> None:
    items = load(one_file("gsm8k/test.jsonl")(tmp_path, ROWS)).items
    assert isinstance(items[0].prompt, str)
    assert (items[0].prefix + items[0].prompt).encode() == (GOLDEN / "gsm8k.txt").read_bytes()
    assert {item.prefix for item in items} == {items[0].prefix}
    fewer = load(tmp_path, num_fewshot=2).items[0].prefix
    assert items[0].prefix.startswith(fewer)
    assert fewer.count("Q: ") == 2


def test_the_chat_asks_for_reasoning_and_a_number(tmp_path: Path) -> None:
    data = one_file("gsm8k/test.jsonl")(tmp_path, ROWS)
    (message,) = load(data, "gsm8k_0shot").items[0].prompt
    assert message == {
        "role": "user",
        "content": "Tom has 3 pens and buys 4 more. How many pens has he?\n\n"
        "Please reason step by step, and end with a line of the form `#### N`, where N is the answer, a number.",
    }
    assert [item.id for item in load(data, "gsm8k_0shot").items] == [item.id for item in load(data).items]


@pytest.mark.parametrize("num_fewshot", [-1, 9])
def test_more_examples_than_the_paper_has_are_refused(tmp_path: Path, num_fewshot: int) -> None:
    with pytest.raises(DataError, match=f"num_fewshot of gsm8k: must be 0 to 8, .*; got {num_fewshot}"):
        load(one_file("gsm8k/test.jsonl")(tmp_path, ROWS), num_fewshot=num_fewshot)


@pytest.mark.parametrize(
    ("answer", "gold"), [("18", "18"), (18, "18"), (2.5, "2.5"), ("#### $1,450,000 ", "1450000"), ("x\n#### .5", ".5")]
)
def test_the_answer_may_be_the_number_itself(tmp_path: Path, answer: object, gold: str) -> None:
    path = write(tmp_path / "test.jsonl", [{"question": "q", "answer": answer}])
    assert load(path).items[0].answer == gold


@pytest.mark.parametrize("answer", ["no number", "", "#### ", "18 apples", "18 #### x", None, True, [1]])
def test_row_without_a_number_is_refused(tmp_path: Path, answer: object) -> None:
    path = write(tmp_path / "test.jsonl", [ROWS[0], {"question": "q", "answer": answer}])
    with pytest.raises(DataError) as caught:
        load(path)
    assert caught.value.problems == (f"{path}, row 2: `answer` must end with `#### ` and a number, or be a number",)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"question": "q", "gold": "18"}, r"column with the answer .*; got the columns question, gold"),
        ({"question": "q", "choices": [], "answer": 1}, "must have no column with choices"),
    ],
)
def test_columns_of_other_data_are_reported(tmp_path: Path, row: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        load(write(tmp_path / "test.jsonl", [row]))


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        (" 1000 + 1000 = 2000. The answer is 2,000.", Verdict(1.0, "2000")),
        ("#### 2000", Verdict(1.0, "2000")),
        ("It is 1999.", Verdict(0.0, "1999")),
        ("I cannot say.", Verdict(0.0, None)),
    ],
)
def test_the_last_number_is_judged(completion: str, verdict: Verdict) -> None:
    for name in ("gsm8k", "gsm8k_0shot"):
        assert find(name).judge(Item("i", "p", "2000"), completion) == verdict


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real data of the suites, which are no part of the project")
def test_the_real_data_are_the_published_ones(tmp_path: Path) -> None:
    questions = load(REAL)
    assert (len(questions.items), questions.warnings) == (1319, ())
    assert len({item.id for item in questions.items}) == 1319
    lines = (REAL / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "test.jsonl").write_text("\n".join([*lines[:-1], lines[-1].replace("#### ", "#### 1")]))
    (warning,) = load(tmp_path).warnings
    assert warning.startswith("GSM8K test: the content differs from the published data (sha256 ")
