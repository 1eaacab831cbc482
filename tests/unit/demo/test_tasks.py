from __future__ import annotations

import random
from itertools import islice

import pytest

from distill_rl.demo.recipe import (
    DIGITS,
    TASKS,
    WORDS,
    ListProblem,
    draw_problem,
    draw_problems,
    question_row,
    training_row,
    with_wrong_answers,
    wrong_answer,
)


def items(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("task", TASKS)
def test_answer_has_the_items_in_the_order_of_the_task(task: str) -> None:
    generator = random.Random(1)
    for _ in range(200):
        problem = draw_problem(generator, task)
        name, _, listed = problem.prompt.partition(": ")
        assert name == problem.task == task
        expected = sorted(items(listed))
        assert items(problem.answer) == (expected[::-1] if task == "sort words down" else expected)


def test_problems_have_4_to_7_digits_or_3_to_6_words() -> None:
    lengths: dict[str, set[int]] = {task: set() for task in TASKS}
    for problem in islice(draw_problems("lengths"), 300):
        lengths[problem.task].add(len(items(problem.answer)))
        assert set(items(problem.answer)) <= set(DIGITS if problem.task == "sort" else WORDS)
    assert lengths == {"sort": {4, 5, 6, 7}, "sort words": {3, 4, 5, 6}, "sort words down": {3, 4, 5, 6}}


def test_series_is_seeded_without_repeated_or_forbidden_prompts() -> None:
    first = list(islice(draw_problems("a"), 3000))
    assert first == list(islice(draw_problems("a"), 3000))
    prompts = {problem.prompt for problem in first}
    assert len(prompts) == 3000
    other = list(islice(draw_problems("b"), 3000))
    assert prompts & {problem.prompt for problem in other}, (
        "different seeds do share prompts, so the next assertion is not trivial"
    )
    assert not prompts & {problem.prompt for problem in islice(draw_problems("b", prompts), 3000)}


def test_wrong_answer_has_the_items_in_another_order() -> None:
    generator = random.Random(3)
    for problem in islice(draw_problems("wrong"), 300):
        wrong = wrong_answer(generator, problem)
        assert wrong != problem.answer
        assert sorted(items(wrong)) == sorted(items(problem.answer))


def test_exact_share_of_answers_is_wrong_and_nothing_else_changes() -> None:
    problems = list(islice(draw_problems("share"), 1000))
    noisy = with_wrong_answers("noise", problems, 0.3)
    assert [problem.prompt for problem in noisy] == [problem.prompt for problem in problems]
    assert sum(a.answer != b.answer for a, b in zip(noisy, problems)) == 300
    assert noisy == with_wrong_answers("noise", problems, 0.3)
    assert noisy != with_wrong_answers("other noise", problems, 0.3)
    assert with_wrong_answers("noise", problems, 0.0) == problems


def test_question_row_keeps_the_answer_out_of_the_chat() -> None:
    problem = ListProblem("sort", "sort: 7 3 9 1", "1 3 7 9")
    user, assistant = {"role": "user", "content": "sort: 7 3 9 1"}, {"role": "assistant", "content": "1 3 7 9"}
    assert training_row(problem) == {"messages": [user, assistant]}
    assert question_row(problem) == {"messages": [user], "answer": "1 3 7 9", "task": "sort"}
