from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill_rl.errors import DataError
from distill_rl.evals.data import MAX_PROBLEMS
from distill_rl.evals.suites.base import Item, Verdict
from distill_rl.evals.suites.exact_match import ExactMatch


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "exact_match.jsonl"
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def test_rows_become_items_named_by_file_and_row(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2 + 2?"}]
    path = write(
        tmp_path,
        json.dumps({"prompt": "sort: 2 1 =>", "answer": "1 2", "task": "sort"}),
        "",
        json.dumps({"messages": messages, "answer": "4"}),
    )
    questions = ExactMatch().load(path, 0)
    assert questions.items == (
        Item("exact_match.jsonl:1", "sort: 2 1 =>", "1 2", "sort"),
        Item("exact_match.jsonl:3", tuple(messages), "4", ""),
    )
    assert (questions.files, questions.warnings) == ((path,), ())


def test_a_folder_holds_the_suite_under_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "p", "answer": "a"}')
    assert ExactMatch().load(tmp_path, 0) == ExactMatch().load(path, 0)


def test_content_hash_covers_questions_and_answers(tmp_path: Path) -> None:
    one, two = '{"prompt": "p", "answer": "a"}', '{"answer": "b", "prompt": "q"}'
    known = ExactMatch().load(write(tmp_path, one, two), 0).content_sha256
    assert ExactMatch().load(write(tmp_path, one, two), 0).content_sha256 == known
    assert ExactMatch().load(write(tmp_path, two, one), 0).content_sha256 != known, "ids are lines of the file"
    for other in (two.replace("b", "c"), two.replace('"q"', '"q "'), two.replace('"b"', '" b"')):
        assert ExactMatch().load(write(tmp_path, one, other), 0).content_sha256 != known


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "one JSON object per line"),
        ("[1]", "one JSON object per line"),
        ("[" * 100_000, "one JSON object per line"),
        (b'{"prompt": "\xff", "answer": "a"}', "UTF-8"),
        ('{"prompt": "p"}', "`answer` must be non-empty text"),
        ('{"prompt": "p", "answer": 4}', "`answer` must be non-empty text"),
        ('{"prompt": "p", "answer": " "}', "`answer` must be non-empty text"),
        ('{"prompt": "\\ud800", "answer": "a"}', "`prompt` must be Unicode"),
        ('{"answer": "a"}', "either `prompt` or `messages`"),
        ('{"prompt": "p", "messages": [], "answer": "a"}', "either `prompt` or `messages`"),
        ('{"prompt": "", "answer": "a"}', "`prompt` must be non-empty text"),
        ('{"prompt": ["p"], "answer": "a"}', "`prompt` must be non-empty text"),
        ('{"prompt": "p", "answer": "a", "task": 1}', "`task` must be a text"),
        ('{"messages": "hi", "answer": "a"}', "list of {role, content}"),
        ('{"messages": [{"role": "user"}], "answer": "a"}', "list of {role, content}"),
        ('{"messages": [], "answer": "a"}', "end with a user turn"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "answer": "a"}', "end with a user turn"),
    ],
)
def test_bad_row_is_reported_with_file_and_number(tmp_path: Path, line: str | bytes, rule: str) -> None:
    path = write(tmp_path, '{"prompt": "p", "answer": "a"}', line)
    with pytest.raises(DataError) as caught:
        ExactMatch().load(path, 0)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}, row 2: ")
    assert rule in problem


def test_all_bad_rows_are_reported_up_to_a_limit(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        ExactMatch().load(write(tmp_path, "1", '{"prompt": "p", "answer": "a"}', "3"), 0)
    assert [problem.split(":")[0].rpartition(" ")[2] for problem in caught.value.problems] == ["1", "3"]
    with pytest.raises(DataError) as caught:
        ExactMatch().load(write(tmp_path, *["x"] * 1000), 0)
    assert len(caught.value.problems) == MAX_PROBLEMS + 1


@pytest.mark.parametrize("lines", [(), ("", "  ")])
def test_an_empty_file_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="must hold at least one row"):
        ExactMatch().load(write(tmp_path, *lines), 0)


def test_missing_file_is_refused_with_remedy(tmp_path: Path) -> None:
    for data in (tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(DataError, match=r"\.jsonl: cannot be read; got no such file; give a \.jsonl"):
            ExactMatch().load(data, 0)


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        ("1 2", Verdict(1.0, "1 2")),
        (" 1 2\n", Verdict(1.0, "1 2")),
        ("1  2", Verdict(0.0, "1  2")),
        ("1 2 3", Verdict(0.0, "1 2 3")),
        (" \n", Verdict(0.0, None)),
        ("\x00", Verdict(0.0, "\x00")),
    ],
)
def test_only_the_answer_itself_scores(completion: str, verdict: Verdict) -> None:
    assert ExactMatch().judge(Item("i", "p", "1 2"), completion) == verdict
