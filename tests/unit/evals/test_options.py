"""Options of an evaluation, and loading of its suites."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.options import Options, chat_suites, load_questions
from distill_rl.evals.suites.base import Item, Suite, resolve_num_fewshot
from tests.helpers.suites import write_suite


def test_warnings_about_the_data_are_errors_when_strict(tmp_path: Path) -> None:
    path = str(write_suite(tmp_path, warnings=("own: 24 rows, published are 30",)))
    (loaded,) = load_questions([path], tmp_path, Options())
    assert loaded.questions.warnings == ("own: 24 rows, published are 30",)
    with pytest.raises(DataError, match="own: 24 rows, published are 30"):
        load_questions([path], tmp_path, Options(strict=True))


def test_limit_keeps_the_order_of_the_data(tmp_path: Path) -> None:
    path = str(write_suite(tmp_path))
    (loaded,) = load_questions([path], tmp_path, Options(limit=5, seed=3))
    numbers = [int(item.id[1:]) for item in loaded.items]
    assert len(numbers) == 5
    assert numbers == sorted(numbers)


def test_all_invalid_sizes_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_questions(["exact_match"], tmp_path, Options(num_fewshot=-1, max_new_tokens=0, limit=0))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "limit",
        "max_new_tokens",
        "num_fewshot",
    ]


def test_two_items_of_one_id_are_refused(tmp_path: Path) -> None:
    path = write_suite(tmp_path)
    path.write_text(path.read_text().replace('f"q{n}"', '"q"'))
    with pytest.raises(DataError, match="suite own: ids must be unique; got q"):
        load_questions([str(path)], tmp_path, Options())


def test_a_suite_without_items_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="suite own: must have at least one item"):
        load_questions([str(write_suite(tmp_path, count=0))], tmp_path, Options())


class Examples:
    num_fewshot, max_fewshot = 5, 5


class NoExamples:
    num_fewshot, max_fewshot = 0, 0


@pytest.mark.parametrize(
    ("suite", "requested", "expected"),
    [(Examples, None, 5), (Examples, 0, 0), (NoExamples, None, 0), (NoExamples, 3, 0)],
)
def test_worked_examples_go_to_suites_that_take_them(suite: type, requested: int | None, expected: int) -> None:
    instance: Suite = suite()
    assert resolve_num_fewshot(instance, requested) == expected


def test_suites_with_chat_prompts_are_found(tmp_path: Path) -> None:
    (text,) = load_questions([str(write_suite(tmp_path))], tmp_path, Options())
    assert chat_suites([text]) == []
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hi"}], "answer": "ho"}\n')
    (chat,) = load_questions(["exact_match"], chats, Options())
    assert isinstance(chat.items[0], Item)
    assert chat_suites([text, chat]) == ["exact_match"]
