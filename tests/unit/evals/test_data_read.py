from __future__ import annotations

from pathlib import Path

import pytest

from distill_rl.errors import DataError
from distill_rl.evals.data import (
    MAX_PROBLEMS,
    PublishedSplit,
    Row,
    content_sha256,
    convert_rows,
    make_questions,
    read_rows,
    require_columns,
    require_unicode,
    required_text,
)
from distill_rl.evals.suites.base import Item
from tests.helpers.eval_forms import write

ROWS = [{"Question": "zwei\nZeilen, “so”", "answer": "4"}, {"Question": "∀x", "answer": "5"}]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json", "a.csv", "a.arrow", "saved", "A.PARQUET"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name.lower(), ROWS).rename(tmp_path / name)
    rows = read_rows(path)
    assert [dict(row.values) for row in rows] == [{"question": r["Question"], "answer": r["answer"]} for r in ROWS]
    assert {row.file for row in rows} == {path}
    assert not any(row.problem for row in rows)


def test_json_may_hold_a_list_lines_or_one_object(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, count in (('[{"a": 1}, {"a": 2}]', 2), ('{"a": 1}\n{"a": 2}\n', 2), ('\ufeff{"a":\n1}', 1)):
        path.write_text(content)
        assert [row.values["a"] for row in read_rows(path)] == [1, 2][:count]


def test_csv_without_header_gets_the_suites_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"one, ""two""\nthree",B\n\nfour,A\n')
    header = ("question", "answer")
    assert [dict(row.values) for row in read_rows(path, header)] == [
        {"question": 'one, "two"\nthree', "answer": "B"},
        {"question": "four", "answer": "A"},
    ]
    path.write_text("Input,Answer\nfour,A\n")
    assert [dict(row.values) for row in read_rows(path, header)] == [{"input": "four", "answer": "A"}]


def test_bad_rows_are_reported_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"question": "q"}\n{\n\n[1]\n{"question": "\xff"}\n{"question": 4}\n{"question": "\\ud800"}\n')
    with pytest.raises(DataError) as caught:
        convert_rows(read_rows(path), lambda row: required_text(row, ["question"]))
    assert list(caught.value.problems) == [
        f"{path}, row 2: must be one JSON object per line",
        f"{path}, row 4: must be one JSON object per line",
        f"{path}, row 5: must be UTF-8",
        f"{path}, row 6: `question` must be non-empty text; got 4; correct the row, or remove it",
        f"{path}, row 7: `question` must be Unicode text, without lone surrogates",
    ]
    path.write_text("x\n" * 1000)
    with pytest.raises(DataError) as caught:
        convert_rows(read_rows(path), lambda row: row)
    assert len(caught.value.problems) == MAX_PROBLEMS + 1


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("a.parquet", b"PAR1 cut", "readable, complete parquet"),
        ("a.arrow", b"no arrow", "readable, complete arrow"),
        ("a.csv", b"question\n\xff\n", "readable, complete csv"),
        ("a.json", b'[{"a": 1}, {"a"', "valid JSON"),
        ("a.xlsx", b"x", "must end in .parquet"),
        ("a.jsonl", b"\n \n", "at least one row"),
        ("a.csv", b"question,answer\n", "at least one row"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, name: str, content: bytes, rule: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=rule) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_missing_file_and_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read; got No such file"):
        read_rows(tmp_path / "a.jsonl")
    with pytest.raises(DataError):
        read_rows(tmp_path)


def test_csv_record_of_another_width_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer\nonly one\na,b\n")
    assert [row.problem for row in read_rows(path)] == ["must have 2 cells (question, answer), has 1", ""]


def test_missing_and_foreign_columns_are_reported(tmp_path: Path) -> None:
    rows = [Row(tmp_path / "a.csv", 1, {"question": "q", "gold": "4", "choices": []})]
    require_columns(rows, {"question": ("problem", "question")}, {})
    with pytest.raises(DataError) as caught:
        require_columns(rows, {"question": ("question",), "answer": ("answer", "target")}, {"choices": ("choices",)})
    assert list(caught.value.problems) == [
        f"{tmp_path}/a.csv: must have a column with the answer (`answer` or `target`); "
        "got the columns question, gold, choices",
        f"{tmp_path}/a.csv: must have no column with choices, which belongs to the data of another suite; "
        "got the columns question, gold, choices",
    ]


def test_content_hash_ignores_only_order_and_white_space() -> None:
    rows = [("a b", "c"), ("d", "e")]
    known = content_sha256(rows)
    assert known == content_sha256([("d", " e\n"), ("a\n  b", "c")])
    others = [[("a b", "c")], [*rows, ("d", "e")], [("a", "b c"), ("d", "e")], [("ab", "c"), ("d", "e")]]
    assert known not in {content_sha256(other) for other in others}


def test_exact_content_hash_ignores_only_order() -> None:
    rows = [("a b", "c"), ("d", "e")]
    known = content_sha256(rows, exact=True)
    assert known == content_sha256(reversed(rows), exact=True)
    others = [[("a  b", "c"), rows[1]], [("a b ", "c"), rows[1]], [("a\nb", "c"), rows[1]]]
    assert known not in {content_sha256(other, exact=True) for other in others}


def test_ids_follow_content_and_count_repetitions() -> None:
    def ids(*rows: tuple[str, ...]) -> list[str]:
        questions = make_questions(rows, tuple, lambda name, row: Item(name, "", ""), [], PublishedSplit("x", 0, ""))
        return [item.id for item in questions.items]

    first, other = ids(("a", "b"), ("c",))
    assert ids(("c",), ("a", "b"), ("a ", "b")) == [other, first, f"{first}-2"]
    assert len(first) == 12


def test_text_must_be_encodable() -> None:
    assert require_unicode("∀", "x") == "∀"
    with pytest.raises(ValueError, match="`x` must be Unicode"):
        require_unicode("\udc00", "x")
