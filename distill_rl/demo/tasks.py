"""Templated list tasks that a tiny model can learn, with answers that are either right or wrong."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

WORDS = [
    "apple", "bread", "cloud", "dance", "eagle", "flame", "grape", "house", "island", "jungle", "kite", "lemon",
    "maple", "night", "ocean", "piano", "queen", "river", "stone", "tiger", "umbrella", "violet", "window", "zebra",
]  # fmt: skip
DIGITS = list("0123456789")
TASKS = ("sort", "sort words", "sort words down")
DIGITS_PER_PROBLEM = (4, 7)
WORDS_PER_PROBLEM = (3, 6)


@dataclass(frozen=True, slots=True)
class Problem:
    """A task of TASKS, a prompt (`sort: 7 3 9 1`) and its only right answer (`1 3 7 9`)."""

    task: str
    prompt: str
    answer: str


def draw_problem(generator: random.Random, task: str) -> Problem:
    """A random problem of one task, with distinct items: 4 to 7 digits, or 3 to 6 words.

    Advances `generator`.
    """
    pool, (fewest, most) = (WORDS, WORDS_PER_PROBLEM) if "words" in task else (DIGITS, DIGITS_PER_PROBLEM)
    items = generator.sample(pool, generator.randint(fewest, most))
    answer = sorted(items, reverse=task.endswith("down"))
    return Problem(task, f"{task}: {' '.join(items)}", " ".join(answer))


def draw_problems(seed: str, forbidden: Collection[str] = ()) -> Iterator[Problem]:
    """An endless series of problems that cycles through the tasks and never repeats a prompt.

    Args:
        seed: determines the whole series, together with `forbidden`.
        forbidden: prompts that must not occur.
    """
    generator = random.Random(seed)
    seen: set[str] = set()
    while True:
        for task in TASKS:
            problem = draw_problem(generator, task)
            while problem.prompt in seen or problem.prompt in forbidden:
                problem = draw_problem(generator, task)
            seen.add(problem.prompt)
            yield problem


def wrong_answer(generator: random.Random, problem: Problem) -> str:
    """The right items of a problem in a random wrong order; the problem must have at least two different items."""
    items = problem.answer.split()
    while " ".join(items) == problem.answer:
        generator.shuffle(items)
    return " ".join(items)


def with_wrong_answers(seed: str, problems: list[Problem], share: float) -> list[Problem]:
    """The problems in the same order, with a wrong answer in exactly `round(share * len(problems))` of them.

    Args:
        seed: determines which problems, and their answers.
        share: fraction from 0 to 1.
    """
    generator = random.Random(seed)
    wrong = set(generator.sample(range(len(problems)), round(share * len(problems))))
    return [
        Problem(problem.task, problem.prompt, wrong_answer(generator, problem)) if i in wrong else problem
        for i, problem in enumerate(problems)
    ]


def training_row(problem: Problem) -> dict[str, Any]:
    """Question and answer as a chat, in the format `messages` of `data.format`."""
    user, assistant = problem.prompt, problem.answer
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def question_row(problem: Problem) -> dict[str, Any]:
    """The question as a chat, with answer and task as further columns, in the format of the suite `exact_match`."""
    return {
        "messages": [{"role": "user", "content": problem.prompt}],
        "answer": problem.answer,
        "task": problem.task,
    }
