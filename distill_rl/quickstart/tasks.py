"""Templated list tasks: problems that a tiny model can learn, with answers that are right or wrong and nothing between."""

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
    """`task` is one of TASKS; `prompt` is what the user says (`sort: 7 3 9 1`), `answer` the only right reply (`1 3 7 9`)."""

    task: str
    prompt: str
    answer: str


def draw_problem(generator: random.Random, task: str) -> Problem:
    """A random problem of one task; its items are all different."""
    pool, (fewest, most) = (WORDS, WORDS_PER_PROBLEM) if "words" in task else (DIGITS, DIGITS_PER_PROBLEM)
    items = generator.sample(pool, generator.randint(fewest, most))
    answer = sorted(items, reverse=task.endswith("down"))
    return Problem(task, f"{task}: {' '.join(items)}", " ".join(answer))


def draw_problems(seed: str, forbidden: Collection[str] = ()) -> Iterator[Problem]:
    """An endless series of problems, the tasks in turn; no prompt twice, and none of `forbidden`.

    Args:
        seed: names the series; two seeds give two independent series.
        forbidden: prompts that must not appear.
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
    """The right items in a wrong order."""
    items = problem.answer.split()
    while " ".join(items) == problem.answer:
        generator.shuffle(items)
    return " ".join(items)


def with_wrong_answers(seed: str, problems: list[Problem], share: float) -> list[Problem]:
    """The same problems in the same order, exactly `round(share * len(problems))` of them with a wrong answer."""
    generator = random.Random(seed)
    spoilt = set(generator.sample(range(len(problems)), round(share * len(problems))))
    return [
        Problem(problem.task, problem.prompt, wrong_answer(generator, problem)) if index in spoilt else problem
        for index, problem in enumerate(problems)
    ]


def training_row(problem: Problem) -> dict[str, Any]:
    """A chat of one turn, as `data.format: messages` reads it."""
    user, assistant = problem.prompt, problem.answer
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def question_row(problem: Problem) -> dict[str, Any]:
    """The question alone, with the answer and the task beside it, as the `exact_match` suite reads it."""
    return {
        "messages": [{"role": "user", "content": problem.prompt}],
        "answer": problem.answer,
        "task": problem.task,
    }
