from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill_rl.errors import DataError
from distill_rl.evals.suites.base import Item, Questions, Verdict
from distill_rl.evals.suites.registry import find
from tests.helpers.align import DATA
from tests.helpers.eval_forms import Rows, write, write_splits

GOLDEN = Path(__file__).with_name("golden")
SPLITS: dict[str, list[dict[str, Any]]] = json.loads((GOLDEN / "mmlu.json").read_text(encoding="utf-8"))
DEV, TEST = SPLITS["dev"], SPLITS["test"]
REAL = DATA / "evals"


def load(data: Path, name: str = "mmlu", num_fewshot: int | None = None) -> Questions:
    suite = find(name)
    return suite.load(data, suite.num_fewshot if num_fewshot is None else num_fewshot)


def by_subject(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    subjects: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        subjects.setdefault(row["subject"], []).append(dict(row))
    return subjects


def files(suffix: str) -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        for split in ("dev", "test"):
            write(folder / "mmlu" / f"{split}{suffix}", SPLITS[split])
        return folder

    return written


def saved_together(folder: Path) -> Path:
    return write_splits(folder / "MMLU", {"dev": DEV, "test": TEST, "validation": DEV[:1]}).parent


def columns_and_letters(folder: Path) -> Path:
    for split in ("dev", "test"):
        rows = [
            {"Subject": row["subject"].replace("_", " "), "input": row["question"], "target": "ABCD"[row["answer"]]}
            | dict(zip("ABCD", row["choices"]))
            for row in SPLITS[split]
        ]
        write(folder / "mmlu" / f"{split}.csv", rows)
    return folder


def original(folder: Path) -> Path:
    for split in ("dev", "test"):
        for subject, rows in by_subject(SPLITS[split]).items():
            path = folder / "hendrycks_test" / "data" / split / f"{subject}_{split}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([r["question"], *r["choices"], "ABCD"[r["answer"]]] for r in rows)
    return folder


def hub_subjects(folder: Path) -> Path:
    for split in ("dev", "test"):
        for subject, rows in by_subject(SPLITS[split]).items():
            bare = [{key: row[key] for key in ("question", "choices", "answer")} for row in rows]
            write(folder / "cais_mmlu" / subject / f"{split}-00000-of-00001.parquet", bare)
    return folder


def hub_all(folder: Path) -> Path:
    for split in ("dev", "test"):
        for part in ("all", "formal_logic", "high_school_statistics"):
            rows = [row for row in SPLITS[split] if part in ("all", row["subject"])]
            write(folder / "cais" / "mmlu" / part / f"{split}-00000-of-00001.parquet", rows)
    return folder / "cais" / "mmlu"


@pytest.mark.parametrize(
    "form",
    [
        files(".parquet"),
        files(".jsonl"),
        files(".json"),
        files(".arrow"),
        files(""),
        saved_together,
        columns_and_letters,
        original,
        hub_subjects,
        hub_all,
    ],
    ids=["parquet", "jsonl", "json", "arrow", "saved", "saved together", "a to d", "original", "subjects", "all"],
)
def test_every_form_gives_the_same_questions(tmp_path: Path, form: Callable[[Path], Path]) -> None:
    expected = load(files(".parquet")(tmp_path / "expected"))
    loaded = load(form(tmp_path / "found"))
    key = {item.id: item for item in expected.items}
    assert len(key) == len(TEST) == len(loaded.items)
    assert {item.id: item for item in loaded.items} == key
    assert loaded.content_sha256 == expected.content_sha256
    assert loaded.warnings == expected.warnings == (
        "MMLU test: 6 rows, the published data have 14042",
        "MMLU dev: 10 rows, the published data have 285",
    )  # fmt: skip


@pytest.mark.parametrize(("subject", "index", "answer"), [("formal_logic", 2, "C"), ("high_school_statistics", 0, "B")])
def test_five_shot_prompts_equal_golden_files(tmp_path: Path, subject: str, index: int, answer: str) -> None:
    items = [item for item in load(files(".parquet")(tmp_path)).items if item.task == subject]
    golden = (GOLDEN / f"mmlu_{subject}.txt").read_bytes()
    assert isinstance(items[index].prompt, str)
    assert (items[index].prefix + items[index].prompt).encode() == golden
    assert {item.prefix for item in items} == {items[0].prefix}
    assert (items[index].choices, items[index].answer) == ((" A", " B", " C", " D"), answer)


@pytest.mark.parametrize("num_fewshot", [0, 1, 3])
def test_fewer_examples_are_the_first_ones(tmp_path: Path, num_fewshot: int) -> None:
    item = load(files(".parquet")(tmp_path), num_fewshot=num_fewshot).items[2]
    header, *examples = (GOLDEN / "mmlu_formal_logic.txt").read_text(encoding="utf-8").split("\n\n")
    assert isinstance(item.prompt, str)
    assert (item.prefix + item.prompt).split("\n\n") == [header, *examples[:num_fewshot], examples[-1]]


def test_dev_split_is_not_needed_without_examples(tmp_path: Path) -> None:
    write(tmp_path / "mmlu" / "test.jsonl", TEST)
    questions = load(tmp_path, "mmlu_0shot")
    assert questions.files == (tmp_path / "mmlu" / "test.jsonl",)
    assert questions.items == load(tmp_path, "mmlu", 0).items
    with pytest.raises(DataError, match="must hold the split 'dev' of mmlu"):
        load(tmp_path)


def test_dev_file_is_found_beside_the_test_file(tmp_path: Path) -> None:
    data = files(".jsonl")(tmp_path)
    assert load(data / "mmlu" / "test.jsonl") == load(data)


def test_content_hash_covers_questions_and_shown_examples(tmp_path: Path) -> None:
    data = files(".jsonl")(tmp_path)
    known = load(data).content_sha256
    write(data / "mmlu" / "test.jsonl", TEST[::-1])
    assert load(data).content_sha256 == known
    hashes = {known, load(data, num_fewshot=4).content_sha256, load(data, "mmlu_0shot").content_sha256}
    write(data / "mmlu" / "dev.jsonl", [DEV[1], DEV[0], *DEV[2:4], DEV[4] | {"answer": 0}, *DEV[5:]])
    hashes.add(load(data).content_sha256)
    write(data / "mmlu" / "test.jsonl", [TEST[0] | {"answer": 0}, *TEST[1:]])
    hashes.add(load(data, "mmlu_0shot").content_sha256)
    assert len(hashes) == 5


@pytest.mark.parametrize(
    ("num_fewshot", "rule"),
    [
        (6, r"num_fewshot of mmlu: must be at most 5, the examples of formal_logic in .*dev\.jsonl \(2 subjects have fewer"),
        (5, r"num_fewshot of mmlu: must be at most 4, the examples of high_school_statistics in .*; got 5"),
        (-1, r"num_fewshot of mmlu: must be 0 or more; got -1"),
    ],
)  # fmt: skip
def test_more_examples_than_the_subject_has_are_refused(tmp_path: Path, num_fewshot: int, rule: str) -> None:
    write(tmp_path / "mmlu" / "test.jsonl", TEST)
    write(tmp_path / "mmlu" / "dev.jsonl", DEV if num_fewshot != 5 else DEV[:-1])
    with pytest.raises(DataError, match=rule):
        load(tmp_path, num_fewshot=num_fewshot)


def test_a_subject_without_examples_is_named(tmp_path: Path) -> None:
    write(tmp_path / "mmlu" / "test.jsonl", TEST)
    write(tmp_path / "mmlu" / "dev.jsonl", DEV[:5])
    with pytest.raises(DataError, match="must be at most 0, the examples of high_school_statistics"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"answer": 4}, "`answer` must be one of A, B, C and D, or a number from 0 to 3"),
        ({"answer": "E"}, "`answer` must be one of"),
        ({"answer": True}, "`answer` must be one of"),
        ({"answer": None}, "`answer` must be one of"),
        ({"answer": "AB"}, "`answer` must be one of"),
        ({"choices": ["a", "b", "c"]}, "`choices` must be a list of four texts"),
        ({"choices": "['a' 'b' 'c' 'd']"}, "`choices` must be a list of four texts"),
        ({"choices": ["a", "b", "c", None]}, "all four choices must be texts"),
        ({"question": " "}, "`question` must be non-empty text"),
        ({"subject": ""}, "needs a `subject`"),
    ],
)
def test_bad_row_is_reported_with_place_and_rule(tmp_path: Path, change: dict[str, Any], rule: str) -> None:
    path = write(tmp_path / "test.jsonl", [TEST[0], TEST[1] | change])
    with pytest.raises(DataError) as caught:
        load(path, "mmlu_0shot")
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}, row 2: ")
    assert rule in problem


@pytest.mark.parametrize(("answer", "letter"), [(0, "A"), ("3", "D"), (" b ", "B"), ("C", "C")])
def test_answers_are_letters_or_numbers(tmp_path: Path, answer: object, letter: str) -> None:
    write(tmp_path / "test.jsonl", [TEST[0] | {"answer": answer}])
    assert load(tmp_path, "mmlu_0shot").items[0].answer == letter


def test_missing_answer_column_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "mmlu" / "test.parquet", [{"question": "q", "choices": list("wxyz"), "subject": "s", "gold": 1}])
    with pytest.raises(DataError, match=r"column with the answer .*; got the columns question, choices, subject, gold"):
        load(tmp_path, "mmlu_0shot")


def test_repeated_questions_get_different_ids(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [TEST[0], TEST[0]])
    one, two = load(tmp_path, "mmlu_0shot").items
    assert two.id == f"{one.id}-2"
    assert one.id.startswith("formal_logic/")


def test_chat_prompt_requests_reasoning_and_a_last_line(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", TEST)
    questions = load(tmp_path, "mmlu_cot")
    assert questions.items[1].prompt == (
        {
            "role": "user",
            "content": "The following is a multiple choice question about formal logic.\n\n"
            "Select the best translation into predicate logic. David teaches Chris. "
            "(c: Chris; d: David; Txy: x teaches y)\nA. Tdc\nB. Tcd\nC. Tcc\nD. dTc\n\n"
            "Think step by step, then end with a line of the form `Answer: X`, where X is one of A, B, C and D.",
        },
    )
    likeliest = load(tmp_path, "mmlu_0shot")
    assert [(i.id, i.answer, i.task) for i in questions.items] == [(i.id, i.answer, i.task) for i in likeliest.items]
    assert not any(item.choices for item in questions.items)


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        ("Because.\nAnswer: B", Verdict(1.0, "B")),
        ("Answer: A\n… no.\n**Answer: (B)**", Verdict(1.0, "B")),
        ("Answer: C", Verdict(0.0, "C")),
        ("I do not know.", Verdict(0.0, None)),
        ("", Verdict(0.0, None)),
    ],
)
def test_the_last_answer_line_is_judged(completion: str, verdict: Verdict) -> None:
    for name in ("mmlu_cot", "mmlu"):
        assert find(name).judge(Item("i", "p", "B"), completion) == verdict


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real data of the suites, which are no part of the project")
def test_the_real_data_are_the_published_ones() -> None:
    questions = load(REAL)
    assert (len(questions.items), questions.warnings) == (14042, ())
    assert len({item.id for item in questions.items}) == 14042
    assert len({item.task for item in questions.items}) == len({item.prefix for item in questions.items}) == 57
    for subject in ("formal_logic", "high_school_statistics"):
        golden = (GOLDEN / f"mmlu_{subject}.txt").read_text(encoding="utf-8")
        assert golden in {f"{item.prefix}{item.prompt}" for item in questions.items}
