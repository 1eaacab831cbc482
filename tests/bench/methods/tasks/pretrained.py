"""Real text with pretrained models: SmolLM2 135M or the half of its layers as the student, SmolLM2 or Gemma 3 270M as the teacher.

Models and the language reference of Python are those of `distill-rl quickstart --real`. Other texts are public domain, and lie
beside the project: the inaugural addresses of US presidents, and the declaration of human rights in languages that SmolLM2 was
not trained on, and Gemma was.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from distill_rl.demo import real
from distill_rl.system.files import made_once, write_atomic, write_json_lines
from tests.bench import harness
from tests.bench.methods.scores import HeldOut
from tests.bench.methods.tasks.base import Prepared, Task, fingerprint
from tests.helpers.align import DATA

CONFIG = Path(__file__).with_name("pretrained.yaml")
LENGTH = 512
"""Most tokens that a model reads at once; documents have about 400."""
TEST = 24
"""Documents of the reference that are measured, one of each in turn."""
ELSEWHERE = 12
"""Documents of the inaugural addresses, one of each in turn."""
LANGUAGES = ("spa", "fra", "ita", "por_BR", "nld", "pol", "swe", "ron", "tur", "ces", "ind", "dan")
LANGUAGE_PIECE = 800
"""Characters of a document in one of them, which have about as many tokens as twice as many in English."""
HELD_OUT = 4
"""Of a language, one document in this many is held out."""


@dataclass(frozen=True, slots=True)
class Pretrained(Task):
    student: Literal["half", "whole"]
    teacher: Literal["smollm2", "gemma"]
    text: Literal["reference", "languages"] = "reference"

    def prepare(self, root: Path, seed: int) -> Prepared:
        made = real.make_real(root)
        student = made.student if self.student == "half" else made.smollm2
        accepted = os.environ.get("ACCEPT_GEMMA_TERMS") == "1"
        teacher = made.smollm2 if self.teacher == "smollm2" else real.make_gemma(root, accepted=accepted)
        train, test = reference() if self.text == "reference" else languages()

        def make(folder: Path) -> None:
            folder.mkdir()
            for name, texts in (("train", train), ("test", test), ("elsewhere", addresses())):
                write_json_lines(folder / f"{name}.jsonl", ({"text": text} for text in texts))
            config = {
                "extends": os.fspath(CONFIG),
                "run": {"seed": seed},
                "student": {"model": os.fspath(student)},
                "teachers": [{"name": "teacher", "model": os.fspath(teacher), "dtype": "bf16"}],
            }
            write_atomic(folder / "config.yaml", json.dumps(config, indent=2))

        weights = real.SMOLLM2.sha256, (real.SMOLLM2 if self.teacher == "smollm2" else real.GEMMA).sha256
        known = fingerprint(*weights, self.student, *train, *test, *addresses())
        data = made_once(root, f"{re.sub(r'[^a-z0-9]+', '-', self.name.lower())}-{seed}-{known[:12]}", make)
        return Prepared(
            data / "config.yaml",
            (f"data.path={data / 'train.jsonl'}",),
            student,
            teacher,
            self.teacher == "smollm2",
            selection=None,
            test=HeldOut(data / "test.jsonl", length=LENGTH),
            fingerprint=known,
            elsewhere=HeldOut(data / "elsewhere.jsonl", length=LENGTH),
        )


@cache
def reference() -> tuple[list[str], list[str]]:
    """Documents of the language reference: those of the quickstart to train on, and some of those that it holds out."""
    train, test = real.documents()
    return train, test[:: len(test) // TEST][:TEST]


@cache
def addresses() -> tuple[str, ...]:
    """Pieces of the inaugural addresses, spread over all of them."""
    found = [*real.pieces(_shared("corpus/en/inaugural.txt"), real.PIECE)]
    return tuple(found[:: len(found) // ELSEWHERE][:ELSEWHERE])


@cache
def languages() -> tuple[list[str], list[str]]:
    """The declaration of human rights in LANGUAGES: documents to train on, and those that are held out, which are of the same
    articles in every language.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    for text in _declarations():
        for i, piece in enumerate(real.pieces(text, LANGUAGE_PIECE)):
            parts[i % HELD_OUT == HELD_OUT - 1].append(piece)
    return parts


def _declarations() -> Iterator[str]:
    by_language = {
        row["lang"]: row["text"] for row in map(json.loads, _shared("corpus/multilingual/udhr.jsonl").splitlines())
    }
    for language in LANGUAGES:
        yield by_language[language]


def _shared(name: str) -> str:
    file = DATA / name
    if not file.exists():
        raise harness.Refused(f"pretrained models are measured on a text that is not here: {file}")
    return file.read_text("utf-8")
