"""Options of an evaluation, and loading of its suites."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.options import Options, chat_suites, load_questions, without_effect
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


def test_items_of_a_limit_are_among_those_of_a_larger_one(tmp_path: Path) -> None:
    path = str(write_suite(tmp_path))
    drawn = {n: load_questions([path], tmp_path, Options(limit=n, seed=3))[0] for n in (4, 9, None)}
    assert drawn[4].drawn == drawn[9].drawn[:4] == drawn[None].drawn[:4]
    assert {item.id for item in drawn[4].items} == set(drawn[4].drawn)
    assert len(drawn[None].items) == 24
    assert load_questions([path], tmp_path, Options(limit=4, seed=4))[0].drawn != drawn[4].drawn


def test_an_option_that_no_suite_uses_is_an_error_and_some_a_remark(tmp_path: Path) -> None:
    options = Options(num_fewshot=2, max_new_tokens=5)
    (generates,) = load_questions([str(write_suite(tmp_path))], tmp_path, options)
    (unused,), remarks = without_effect([generates], options)
    assert unused == ("num_fewshot: is for suites that take worked examples, unlike own; got 2; leave it out")
    assert remarks == []
    (tmp_path / "choices.py").write_text(
        (tmp_path / "own.py")
        .read_text()
        .replace("max_fewshot = 0", "max_fewshot = 4")
        .replace('"own"', '"letters"')
        .replace('task=f"t{n % 2}"', 'choices=("even", "odd")')
    )
    both = load_questions([str(tmp_path / "own.py"), str(tmp_path / "choices.py")], tmp_path, options)
    unused, remarks = without_effect(both, options)
    assert unused == []
    assert remarks == [
        "num_fewshot has no effect on own: it is for suites that take worked examples",
        "max_new_tokens has no effect on letters: it is for suites that generate",
    ]


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
