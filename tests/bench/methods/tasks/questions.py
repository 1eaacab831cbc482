"""Sorting digits and words, as in the quickstart: with its wrong answers, or without and with few rows."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from distill_rl.config.load import load_config
from distill_rl.demo.material import Material, draw_rows, make_material
from distill_rl.demo.recipe import Recipe, question_row, training_row
from distill_rl.system.environment import CONFIGS
from distill_rl.system.files import made_once, sha256, write_json_lines
from tests.bench.methods.scores import HeldOut
from tests.bench.methods.settings import CE
from tests.bench.methods.tasks.base import Prepared, Task, fingerprint
from tests.bench.methods.training import train

PRETRAINING_RATE = 3e-3
"""Learning rate of the training that a pretrained student has had."""


@dataclass(frozen=True, slots=True)
class Questions(Task):
    recipe: Recipe
    clean: bool = False
    """Whether all training answers are right."""
    rows: int | None = None
    """Training rows; None: all."""
    pretrained: bool = False
    """Whether the student has been trained on the rows alone (CE) before."""

    def prepare(self, root: Path, seed: int) -> Prepared:
        material = make_material(root, seed, self.recipe)
        recipe = replace(self.recipe, wrong_share=0.0) if self.clean else self.recipe
        rows = draw_rows(seed, recipe)

        def make(folder: Path) -> None:
            folder.mkdir()
            write_json_lines(folder / "train.jsonl", map(training_row, rows.train[: self.rows]))
            write_json_lines(folder / "validation-questions.jsonl", map(question_row, rows.validation))
            write_json_lines(folder / "test.jsonl", map(training_row, rows.test))

        data = made_once(root, f"{material.root.name}-{'clean' if self.clean else 'noisy'}-{self.rows or 'all'}", make)
        same = self.recipe.teacher_tokenizer == self.recipe.student_tokenizer
        config = CONFIGS / ("quickstart.yaml" if same else "quickstart-cross.yaml")
        overrides = (
            f"run.seed={seed}",
            f"student.model={material.student}",
            f"teachers.0.model={material.teacher}",
            f"data.path={data / 'train.jsonl'}",
            f"data.validation.path={material.validation}",
            f"evaluate.data={material.test}",
        )
        student = material.student
        if self.pretrained:
            before = load_config(config, [*overrides, *CE, f"optimizer.lr={PRETRAINING_RATE}"])
            student = made_once(root, f"{data.name}-pretrained", partial(train, before))
        return Prepared(
            config,
            (*overrides, f"student.model={student}"),
            student,
            material.teacher,
            same,
            selection=HeldOut(material.validation, data / "validation-questions.jsonl"),
            test=HeldOut(data / "test.jsonl", material.test),
            fingerprint=self._fingerprint(material, data),
        )

    def _fingerprint(self, material: Material, data: Path) -> str:
        """Of all that is made but trained weights, which are not the same to the bit on every machine: they follow from the
        recipe.
        """
        files = [
            *sorted(data.glob("*.jsonl")),
            material.validation,
            material.test,
            material.teacher / "tokenizer.json",
            material.student / "tokenizer.json",
            material.student / "model.safetensors",
        ]
        known = [json.dumps(asdict(self.recipe), sort_keys=True), *map(sha256, files)]
        return fingerprint(*known, *([f"pretrained with {PRETRAINING_RATE}"] if self.pretrained else []))
