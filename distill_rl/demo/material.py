"""The quickstart's models and data, made once per seed and reused afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from distill_rl.demo.recipe import (
    RECIPE,
    ListProblem,
    Recipe,
    draw_problems,
    question_row,
    training_row,
    with_wrong_answers,
)
from distill_rl.system.files import made_once, point_at, write_json_lines


@dataclass(frozen=True, slots=True)
class Material:
    """The files in a folder that `make_material` made."""

    root: Path

    @property
    def teacher(self) -> Path:
        """A model trained on the tasks, with its tokenizer."""
        return self.root / "teacher"

    @property
    def student(self) -> Path:
        """A smaller model with random weights, with its tokenizer."""
        return self.root / "student"

    @property
    def train(self) -> Path:
        """Chats, some of them with a wrong answer."""
        return self.root / "train.jsonl"

    @property
    def half(self) -> Path:
        """The first half of these chats."""
        return self.root / "train-half.jsonl"

    @property
    def validation(self) -> Path:
        """Chats with right answers."""
        return self.root / "validation.jsonl"

    @property
    def test(self) -> Path:
        """Questions with answers, in the format of the suite `exact_match`."""
        return self.root / "test.jsonl"


@dataclass(frozen=True, slots=True)
class MaterialRows:
    """The problems of the data files."""

    train: list[ListProblem]
    validation: list[ListProblem]
    test: list[ListProblem]

    @property
    def held_out(self) -> frozenset[str]:
        """Prompts that neither the student nor the teacher is trained on."""
        return frozenset(problem.prompt for problem in [*self.validation, *self.test])


def make_material(root: str | Path, seed: int, recipe: Recipe = RECIPE) -> Material:
    """Returns the material in `<root>/<recipe.folder>-<seed>-<hash>`, which is made if it does not exist.

    The hash covers the recipe and the programs that make the material. The folder is renamed into place when it is
    complete, and the link `<root>/<recipe.folder>-<seed>`, the path in the configuration, is set to it. A second
    process waits for the first.
    """
    root = Path(root)
    stable = f"{recipe.folder}-{seed}"
    name = f"{stable}-{recipe.fingerprint()[:12]}"
    folder = made_once(root, name, lambda partial: _make(Material(partial), seed, recipe))
    point_at(root / stable, name)
    return Material(folder)


def draw_rows(seed: int, recipe: Recipe) -> MaterialRows:
    """The problems of the data files, by seed and recipe alone. Every prompt occurs once in all three sets together.

    A share `recipe.wrong_share` of the training problems has a wrong answer.
    """
    test = list(islice(draw_problems(f"{seed} test"), recipe.test_rows))
    taken = {problem.prompt for problem in test}
    validation = list(islice(draw_problems(f"{seed} validation", taken), recipe.validation_rows))
    taken |= {problem.prompt for problem in validation}
    clean = list(islice(draw_problems(f"{seed} train", taken), recipe.training_rows))
    return MaterialRows(with_wrong_answers(f"{seed} wrong", clean, recipe.wrong_share), validation, test)


def teacher_problems(seed: int, rows: MaterialRows) -> Iterator[ListProblem]:
    """Training data of the teacher: an endless series of problems with right answers, without the held-out prompts."""
    return draw_problems(f"{seed} teacher", rows.held_out)


def _make(material: Material, seed: int, recipe: Recipe) -> None:
    """Makes data, tokenizers and models, and trains the teacher, which takes a while."""
    from transformers.utils import logging

    from distill_rl.demo.pretrain import new_model, train_teacher
    from distill_rl.demo.tokenizer import make_tokenizer

    rows = draw_rows(seed, recipe)
    material.root.mkdir()
    write_json_lines(material.train, map(training_row, rows.train))
    write_json_lines(material.half, map(training_row, rows.train[: len(rows.train) // 2]))
    write_json_lines(material.validation, map(training_row, rows.validation))
    write_json_lines(material.test, map(question_row, rows.test))
    teacher_tokenizer = make_tokenizer(recipe.positions, recipe.teacher_tokenizer)
    student_tokenizer = make_tokenizer(recipe.positions, recipe.student_tokenizer)
    # Different seeds, so that the two models do not share initial weights.
    teacher = new_model(recipe.teacher, recipe, teacher_tokenizer, seed=2 * seed)
    student = new_model(recipe.student, recipe, student_tokenizer, seed=2 * seed + 1)
    train_teacher(teacher, teacher_tokenizer, teacher_problems(seed, rows), recipe)
    logging.disable_progress_bar()  # one bar per written file
    for model, tokenizer, folder in (
        (teacher, teacher_tokenizer, material.teacher),
        (student, student_tokenizer, material.student),
    ):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
