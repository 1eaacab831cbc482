"""The sizes of the quickstart, which determine how good it becomes and how long it takes, and its tasks."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A Llama-style model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters of the material. Recipes that differ in any of them make different folders."""

    folder: str = "seed"
    """Name of the folder of the material, before the seed."""
    teacher: ModelSizes = ModelSizes(hidden=96, intermediate=288, layers=2, heads=4)
    student: ModelSizes = ModelSizes(hidden=48, intermediate=144, layers=2, heads=4)
    teacher_tokenizer: str = "words"
    student_tokenizer: str = "words"
    """Kinds of `tokenizer.KINDS`. Two kinds have different vocabularies and chat templates."""
    positions: int = 256
    """Maximum input length of both models, in tokens."""
    initializer_range: float = 0.05
    """Standard deviation of initial weights. Models of this width learn slowly with the usual 0.02."""
    training_rows: int = 2000
    wrong_share: float = 0.3
    """Fraction of the training rows whose answer has the right items in a wrong order."""
    validation_rows: int = 192
    test_rows: int = 600
    teacher_steps: int = 800
    teacher_batch: int = 32
    teacher_lr: float = 3e-3
    teacher_warmup: int = 30

    def fingerprint(self) -> str:
        """sha256 (hex) over the recipe and the programs that use it, so that a change of either makes new material."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for name in ("recipe.py", "tokenizer.py", "material.py"):
            digest.update(Path(__file__).with_name(name).read_bytes())
        return digest.hexdigest()


RECIPE = Recipe()
CROSS = replace(RECIPE, folder="cross-seed", teacher_tokenizer="pieces", student_tokenizer="lines")
"""The same tasks with another tokenizer for the teacher, which splits most words into two or three tokens."""

RECIPES = {"quickstart": RECIPE, "quickstart-cross": CROSS}
"""Name of the run and of its configuration → recipe."""


# Templated list tasks that a tiny model can learn, with answers that are either right or wrong.

WORDS = [
    "apple", "bread", "cloud", "dance", "eagle", "flame", "grape", "house", "island", "jungle", "kite", "lemon",
    "maple", "night", "ocean", "piano", "queen", "river", "stone", "tiger", "umbrella", "violet", "window", "zebra",
]  # fmt: skip
DIGITS = list("0123456789")
TASKS = ("sort", "sort words", "sort words down")
DIGITS_PER_PROBLEM = (4, 7)
WORDS_PER_PROBLEM = (3, 6)


@dataclass(frozen=True, slots=True)
class ListProblem:
    """A task of TASKS, a prompt (`sort: 7 3 9 1`) and its only right answer (`1 3 7 9`)."""

    task: str
    prompt: str
    answer: str


def draw_problem(generator: random.Random, task: str) -> ListProblem:
    """A random problem of one task, with distinct items: 4 to 7 digits, or 3 to 6 words.

    Advances `generator`.
    """
    pool, (fewest, most) = (WORDS, WORDS_PER_PROBLEM) if "words" in task else (DIGITS, DIGITS_PER_PROBLEM)
    items = generator.sample(pool, generator.randint(fewest, most))
    answer = sorted(items, reverse=task.endswith("down"))
    return ListProblem(task, f"{task}: {' '.join(items)}", " ".join(answer))


def draw_problems(seed: str, forbidden: Collection[str] = ()) -> Iterator[ListProblem]:
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


def wrong_answer(generator: random.Random, problem: ListProblem) -> str:
    """The right items of a problem in a random wrong order; the problem must have at least two different items."""
    items = problem.answer.split()
    while " ".join(items) == problem.answer:
        generator.shuffle(items)
    return " ".join(items)


def with_wrong_answers(seed: str, problems: list[ListProblem], share: float) -> list[ListProblem]:
    """The problems in the same order, with a wrong answer in exactly `round(share * len(problems))` of them.

    Args:
        seed: determines which problems, and their answers.
        share: fraction from 0 to 1.
    """
    generator = random.Random(seed)
    wrong = set(generator.sample(range(len(problems)), round(share * len(problems))))
    return [
        ListProblem(problem.task, problem.prompt, wrong_answer(generator, problem)) if i in wrong else problem
        for i, problem in enumerate(problems)
    ]


def training_row(problem: ListProblem) -> dict[str, Any]:
    """Question and answer as a chat, in the format `messages` of `data.format`."""
    user, assistant = problem.prompt, problem.answer
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def question_row(problem: ListProblem) -> dict[str, Any]:
    """The question as a chat, with answer and task as further columns, in the format of the suite `exact_match`."""
    return {
        "messages": [{"role": "user", "content": problem.prompt}],
        "answer": problem.answer,
        "task": problem.task,
    }
