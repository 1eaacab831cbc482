"""The next tokens of real text, with small models that are made and trained here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from distill_rl.config.load import load_config
from distill_rl.demo.material import new_model
from distill_rl.demo.recipe import RECIPE, ModelSizes
from distill_rl.system.files import made_once, write_atomic, write_json_lines
from tests.bench.material import train_tokenizer
from tests.bench.methods.scores import HeldOut
from tests.bench.methods.settings import CE
from tests.bench.methods.tasks.base import Prepared, Task, fingerprint
from tests.bench.methods.tasks.text import DOMAINS, texts
from tests.bench.methods.training import train

CONFIG = Path(__file__).with_name("language.yaml")
SMALL = ModelSizes(hidden=64, intermediate=192, layers=2, heads=4)
"""The student of the language tasks: 0.4M parameters with 2,048 tokens."""
LARGE = ModelSizes(hidden=128, intermediate=384, layers=3, heads=4)
"""Its teachers: 1.2M parameters with 2,048 tokens."""
TEACHER_STEPS, STUDENT_STEPS, RATE = 1000, 400, 3e-3
"""Steps on the texts alone that a teacher, and a student that is pretrained, has had, and their peak learning rate."""
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
    teachers: tuple[str, ...] = ("2k",)
    """Their vocabularies."""
    train: tuple[str, ...] = DOMAINS
    """Domains that the student sees; its teachers have seen all."""
    measured: tuple[str, ...] = DOMAINS
    """Domains that the student is measured on."""
    pretrained: bool = False
    """Whether the student has been trained on the texts alone (CE) before."""

    def prepare(self, root: Path, seed: int) -> Prepared:
        student = _language_model(root, seed, "2k", SMALL)
        if self.pretrained:
            student = _trained(root, seed, student, STUDENT_STEPS)
        teachers = [
            _language_teacher(root, seed, kind, self.teachers[:i].count(kind)) for i, kind in enumerate(self.teachers)
        ]

        def make(folder: Path) -> None:
            folder.mkdir()
            for name, domains in (("train", self.train), ("validation", self.measured), ("test", self.measured)):
                _write_texts(folder / f"{name}.jsonl", _texts(name, domains))
            models = [
                {"name": f"teacher-{i}", "model": os.fspath(path), "dtype": "fp32", "wire_dtype": "fp32"}
                for i, path in enumerate(teachers)
            ]
            config = {
                "extends": os.fspath(CONFIG),
                "run": {"seed": seed},
                "student": {"model": os.fspath(student)},
                "teachers": models,
            }
            write_atomic(folder / "config.yaml", json.dumps(config, indent=2))

        known = fingerprint(student.name, *(path.name for path in teachers), *self.train, *self.measured)
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


def _language_model(root: Path, seed: int, kind: str, shape: ModelSizes, copy: int = 0) -> Path:
    """The folder of an untrained model with its tokenizer.

    Args:
        copy: number of models before this one that have its vocabulary and shape, and other initial weights.
    """

    def make(folder: Path) -> None:
        vocabulary = VOCABULARIES[kind]
        corpus = _texts("train", DOMAINS)
        tokenizer = train_tokenizer(corpus, vocabulary.size, END, spaces_apart=vocabulary.spaces_apart)
        number = 100 * seed + 10 * copy + list(VOCABULARIES).index(kind)
        # Different seeds, so that no two models share initial weights.
        model = new_model(shape, RECIPE, tokenizer, seed=2 * number + (shape is SMALL))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    parts = repr(VOCABULARIES[kind]), repr(shape), repr(RECIPE), str(copy), *map(repr, map(texts, DOMAINS))
    name = re.sub(r"[^a-z0-9]+", "-", f"language {shape.hidden} {kind} {seed}")
    return made_once(root, f"{name}-{fingerprint(*parts)[:12]}", make)


def _language_teacher(root: Path, seed: int, kind: str, copy: int = 0) -> Path:
    """The folder of a model that was trained on all domains, as a student without a teacher is."""
    return _trained(root, seed, _language_model(root, seed, kind, LARGE, copy), TEACHER_STEPS, batch=16)


def _trained(root: Path, seed: int, untrained: Path, steps: int, batch: int = 8) -> Path:
    """The folder of a model after `steps` steps on the texts of all domains alone.

    Args:
        batch: documents of a step; one number for each shape, because the folder is not named after it.
    """

    def make(folder: Path) -> None:
        train_file = folder.with_name(f"{folder.name}.jsonl")
        _write_texts(train_file, _texts("train", DOMAINS))
        settings = [
            *CE,
            f"run.seed={seed}",
            f"student.model={untrained}",
            f"data.path={train_file}",
            f"train.steps={steps}",
            f"optimizer.lr={RATE}",
            f"train.global_batch_size={batch}",
            f"train.micro_batch_size={batch}",
            "teachers=[]",
        ]
        train(load_config(CONFIG, settings), folder)
        train_file.unlink()

    known = fingerprint(untrained.name, CONFIG.read_text("utf-8"), str(steps), str(RATE))
    return made_once(root, f"{untrained.name}-trained-{known[:12]}", make)


def _texts(part: str, domains: Iterable[str]) -> list[str]:
    """The documents of a part (train, validation, test) of domains."""
    return [text for domain in domains for text in getattr(texts(domain), part)]


def _write_texts(path: Path, documents: Iterable[str]) -> None:
    write_json_lines(path, ({"text": document} for document in documents))
