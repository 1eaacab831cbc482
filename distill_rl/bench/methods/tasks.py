"""The tasks: models and data made here from a seed, a base configuration, and what is held out.

- `noisy`: the quickstart as it is; 30 % of the training answers are wrong. Two more are the same with a teacher of another tokenizer.
- `clean`: the same questions with right answers, and few rows.
- `language`: next tokens of real text. `shift`: the student sees one domain of it, and is measured on the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distill_rl.bench.material import train_tokenizer
from distill_rl.bench.methods.scores import HeldOut
from distill_rl.bench.methods.settings import CE
from distill_rl.bench.methods.text import DOMAINS, LIBRARY, REFERENCE, texts
from distill_rl.bench.methods.training import train
from distill_rl.config.load import load_config
from distill_rl.quickstart.material import draw_rows, make_material
from distill_rl.quickstart.pretrain import new_model
from distill_rl.quickstart.recipe import CROSS, RECIPE, Recipe, Shape
from distill_rl.quickstart.tasks import question_row, training_row
from distill_rl.system.files import sha256, write_atomic
from distill_rl.system.install import CONFIGS
from distill_rl.system.made_folder import made_once

LANGUAGE_CONFIG = Path(__file__).with_name("language.yaml")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task of one seed, on disk."""

    config: Path
    """The base configuration."""
    overrides: tuple[str, ...]
    """The seed, and the paths of models and data."""
    student: Path
    """The untrained student."""
    teacher: Path
    """The first one."""
    same_tokenizer: bool
    """Whether it is the only teacher and has the student's tokenizer."""
    selection: HeldOut
    """By which the learning rate is chosen."""
    test: HeldOut
    fingerprint: str
    """Of models and data: the figures of another fingerprint are those of another task."""


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    about: str

    def prepare(self, root: Path, seed: int) -> Prepared:
        """Makes what is missing of models and data below `root`. Other processes may do the same."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Questions(Task):
    """Sorting of digits and words, as in the quickstart."""

    recipe: Recipe
    clean: bool = False
    """Whether all training answers are right."""
    rows: int | None = None
    """Training rows; None: all."""

    def prepare(self, root: Path, seed: int) -> Prepared:
        material = make_material(root, seed, self.recipe)
        recipe = replace(self.recipe, wrong_share=0.0) if self.clean else self.recipe
        rows = draw_rows(seed, recipe)

        def make(folder: Path) -> None:
            folder.mkdir()
            _write_rows(folder / "train.jsonl", map(training_row, rows.train[: self.rows]))
            _write_rows(folder / "validation-questions.jsonl", map(question_row, rows.validation))
            _write_rows(folder / "test.jsonl", map(training_row, rows.test))

        data = made_once(root, f"{material.root.name}-{'clean' if self.clean else 'noisy'}-{self.rows or 'all'}", make)
        same = self.recipe.teacher_tokenizer == self.recipe.student_tokenizer
        return Prepared(
            CONFIGS / ("quickstart.yaml" if same else "quickstart-cross.yaml"),
            (
                f"run.seed={seed}",
                f"student.model={material.student}",
                f"teachers.0.model={material.teacher}",
                f"data.path={data / 'train.jsonl'}",
                f"data.validation.path={material.validation}",
                f"evaluate.data={material.test}",
            ),
            material.student,
            material.teacher,
            same,
            selection=HeldOut(material.validation, data / "validation-questions.jsonl"),
            test=HeldOut(data / "test.jsonl", material.test),
            fingerprint=_fingerprint(material.root.name, sha256(data / "train.jsonl")),
        )


SMALL = Shape(hidden=64, intermediate=192, layers=2, heads=4)
"""The student of the language tasks: 0.4M parameters with 2,048 tokens."""
LARGE = Shape(hidden=128, intermediate=384, layers=3, heads=4)
"""Its teachers: 1.2M parameters with 2,048 tokens."""
TEACHER_STEPS, TEACHER_RATE = 3000, 3e-3
END = "<|end|>"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How a tokenizer of the language tasks is trained."""

    size: int
    spaces_apart: bool = False


VOCABULARIES: Mapping[str, Vocabulary] = MappingProxyType(
    {
        "2k": Vocabulary(2048),
        "4k": Vocabulary(4096),
        "1k, spaces apart": Vocabulary(1024, spaces_apart=True),
    }
)
"""`2k` is the student's. Nearly all of its tokens are tokens of `4k`; hardly any that begins with a space is one of the last."""


@dataclass(frozen=True, slots=True)
class Language(Task):
    """The next tokens of real text."""

    teachers: tuple[str, ...] = ("2k",)
    """Their vocabularies."""
    train: tuple[str, ...] = DOMAINS
    """Domains that the student sees; its teachers have seen all."""
    measured: tuple[str, ...] = DOMAINS
    """Domains that the student is measured on."""

    def prepare(self, root: Path, seed: int) -> Prepared:
        student = _language_model(root, seed, "2k", SMALL)
        teachers = [
            _language_teacher(root, seed, kind, self.teachers[:i].count(kind)) for i, kind in enumerate(self.teachers)
        ]

        def make(folder: Path) -> None:
            folder.mkdir()
            for name, domains in (("train", self.train), ("validation", self.measured), ("test", self.measured)):
                _write_texts(
                    folder / f"{name}.jsonl", (text for domain in domains for text in getattr(texts(domain), name))
                )
            models = [
                {"name": f"teacher-{i}", "model": os.fspath(path), "dtype": "fp32", "wire_dtype": "fp32"}
                for i, path in enumerate(teachers)
            ]
            run = {"seed": seed}
            config = {
                "extends": os.fspath(LANGUAGE_CONFIG),
                "run": run,
                "student": {"model": os.fspath(student)},
                "teachers": models,
            }
            write_atomic(folder / "config.yaml", json.dumps(config, indent=2))

        known = _fingerprint(student.name, *(path.name for path in teachers), *self.train, *self.measured)
        data = made_once(root, f"{re.sub(r'[^a-z0-9]+', '-', self.name)}-{seed}-{known[:12]}", make)
        return Prepared(
            data / "config.yaml",
            (f"data.path={data / 'train.jsonl'}",),
            student,
            teachers[0],
            self.teachers == ("2k",),
            selection=HeldOut(data / "validation.jsonl"),
            test=HeldOut(data / "test.jsonl"),
            fingerprint=known,
        )


def _language_model(root: Path, seed: int, kind: str, shape: Shape, copy: int = 0) -> Path:
    """The folder of an untrained model with its tokenizer.

    Args:
        copy: number of models before this one that have its vocabulary and shape, and other initial weights.
    """

    def make(folder: Path) -> None:
        vocabulary = VOCABULARIES[kind]
        corpus = [text for domain in DOMAINS for text in texts(domain).train]
        tokenizer = train_tokenizer(corpus, vocabulary.size, END, spaces_apart=vocabulary.spaces_apart)
        number = 100 * seed + 10 * copy + list(VOCABULARIES).index(kind)
        # Different seeds, so that no two models share initial weights.
        model = new_model(shape, RECIPE, tokenizer, seed=2 * number + (shape is SMALL))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    parts = repr(VOCABULARIES[kind]), repr(shape), repr(RECIPE), str(copy), *map(repr, map(texts, DOMAINS))
    name = re.sub(r"[^a-z0-9]+", "-", f"language {shape.hidden} {kind} {seed}")
    return made_once(root, f"{name}-{_fingerprint(*parts)[:12]}", make)


def _language_teacher(root: Path, seed: int, kind: str, copy: int = 0) -> Path:
    """The folder of a model that was trained on all domains, as a student without a teacher is."""
    untrained = _language_model(root, seed, kind, LARGE, copy)

    def make(folder: Path) -> None:
        train_file = folder.with_name(f"{folder.name}.jsonl")
        _write_texts(train_file, (text for domain in DOMAINS for text in texts(domain).train))
        settings = [
            *CE,
            f"run.seed={seed}",
            f"student.model={untrained}",
            f"data.path={train_file}",
            f"train.steps={TEACHER_STEPS}",
            "train.global_batch_size=16",
            "train.micro_batch_size=16",
            f"optimizer.lr={TEACHER_RATE}",
            "teachers=[]",
        ]
        train(load_config(LANGUAGE_CONFIG, settings), folder)
        train_file.unlink()

    known = _fingerprint(untrained.name, LANGUAGE_CONFIG.read_text("utf-8"), str(TEACHER_STEPS), str(TEACHER_RATE))
    return made_once(root, f"{untrained.name}-trained-{known[:12]}", make)


def _write_texts(path: Path, documents: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), "utf-8")


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _fingerprint(*parts: str) -> str:
    """sha256 (hex) of texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


_STEMS = replace(CROSS, folder="stems-seed", teacher_tokenizer="stems")
_LINES = replace(CROSS, folder="stem-lines-seed", teacher_tokenizer="stem lines")
ROWS = (125, 250, 500, 1000, 2000)
"""Training rows of the `clean` tasks."""
TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Questions("noisy", "sorting, 30 % of the answers wrong", RECIPE),
            Questions("noisy, few shared tokens", "the same, teacher with another tokenizer", CROSS),
            Questions("noisy, most tokens shared", "the same, teacher with another tokenizer", _STEMS),
            Questions("noisy, same template", "the same, with the student's chat template and special tokens", _LINES),
            *(Questions(f"clean, {rows} rows", "sorting, all answers right", RECIPE, True, rows) for rows in ROWS),
            Language("language", "real text"),
            Language("language, most tokens shared", "real text, teacher with twice as many tokens", ("4k",)),
            Language("language, few shared tokens", "real text, teacher with other tokens", ("1k, spaces apart",)),
            Language("language, two teachers", "real text, both of these teachers", ("4k", "1k, spaces apart")),
            Language(
                "shift",
                "the student sees one domain, and is measured on the other",
                train=(REFERENCE,),
                measured=(LIBRARY,),
            ),
        )
    }
)
