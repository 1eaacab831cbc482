from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from distill_rl.demo.material import Material, draw_rows, make_material, teacher_problems
from distill_rl.demo.recipe import CROSS, RECIPE, ModelSizes

SMALL: dict[str, Any] = {
    "teacher": ModelSizes(16, 32, 1, 2),
    "student": ModelSizes(8, 16, 1, 2),
    "positions": 64,
    "training_rows": 30,
    "validation_rows": 6,
    "test_rows": 9,
    "teacher_steps": 2,
    "teacher_batch": 4,
}
TINY, TINY_CROSS = replace(RECIPE, **SMALL), replace(CROSS, **SMALL)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def material(root: Path) -> Material:
    return make_material(root, 4, TINY)


def prompts(path: Path) -> list[str]:
    return [json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines()]


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path.read_bytes()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_prompts_are_never_trained_on(seed: int) -> None:
    rows = draw_rows(seed, RECIPE)
    train, validation, test = ({p.prompt for p in part} for part in (rows.train, rows.validation, rows.test))
    assert (len(train), len(validation), len(test)) == (2000, 192, 600)
    assert len(train | validation | test) == 2792
    teacher_rows = islice(teacher_problems(seed, rows), RECIPE.teacher_steps * RECIPE.teacher_batch)
    assert not {problem.prompt for problem in teacher_rows} & (test | validation)


def test_only_training_rows_have_wrong_answers() -> None:
    def wrong(problem) -> bool:
        return problem.answer.split() != sorted(problem.answer.split(), reverse=problem.task.endswith("down"))

    rows = draw_rows(0, RECIPE)
    assert sum(map(wrong, rows.train)) == 600
    assert not any(map(wrong, [*rows.validation, *rows.test]))


def test_another_seed_gives_other_rows() -> None:
    one, two = draw_rows(1, TINY), draw_rows(2, TINY)
    assert one == draw_rows(1, TINY)
    assert [p.prompt for p in one.train] != [p.prompt for p in two.train]
    assert [p.prompt for p in one.test] != [p.prompt for p in two.test]


def test_files_contain_the_rows(material: Material) -> None:
    rows = draw_rows(4, TINY)
    for path, part in (
        (material.train, rows.train),
        (material.validation, rows.validation),
        (material.test, rows.test),
    ):
        assert prompts(path) == [problem.prompt for problem in part]
    question = json.loads(material.test.read_text().splitlines()[0])
    assert question["answer"] == rows.test[0].answer


def test_models_load_and_the_student_is_smaller(material: Material) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sizes = []
    for folder in (material.teacher, material.student):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.config.vocab_size == len(tokenizer)
        assert tokenizer.chat_template
        assert list(folder.glob("*.safetensors"))
        assert not list(folder.glob("*.bin"))
        sizes.append(sum(weight.numel() for weight in model.parameters()))
    assert sizes[0] > 1.5 * sizes[1]


def test_material_is_made_once_and_linked(material: Material, root: Path) -> None:
    inode = material.train.stat().st_ino
    assert make_material(root, 4, TINY).root == material.root
    assert material.train.stat().st_ino == inode
    assert (root / "seed-4").resolve() == material.root.resolve()


def test_same_seed_gives_the_same_bytes_elsewhere(material: Material, tmp_path: Path) -> None:
    again = make_material(tmp_path, 4, TINY)
    assert dict(files(again.root)) == dict(files(material.root))


def test_another_recipe_gets_its_own_folder_and_the_link(material: Material, root: Path) -> None:
    other = make_material(root, 4, replace(TINY, training_rows=31))
    try:
        assert other.root != material.root
        assert material.train.exists()
        assert (root / "seed-4").resolve() == other.root.resolve()
    finally:
        make_material(root, 4, TINY)


def test_cross_recipe_has_same_rows_and_two_tokenizers(material: Material, root: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    cross = make_material(root, 4, TINY_CROSS)
    assert (root / "cross-seed-4").resolve() == cross.root.resolve()
    assert (root / "seed-4").resolve() == material.root.resolve()
    for path in ("train", "validation", "test"):
        assert getattr(cross, path).read_bytes() == getattr(material, path).read_bytes()
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (cross.student, cross.teacher)]
    assert [tokenizer.eos_token for tokenizer in tokenizers] == ["<eos>", "<|end|>"]
    for folder, tokenizer in zip((cross.student, cross.teacher), tokenizers):
        config = AutoConfig.from_pretrained(folder)
        assert config.vocab_size == len(tokenizer)
        assert (config.bos_token_id, config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_incomplete_material_is_removed_and_never_used(tmp_path: Path) -> None:
    partial = tmp_path / f".partial-seed-4-{TINY.fingerprint()[:12]}"
    partial.mkdir()
    (partial / "train.jsonl").write_text("half a li")
    material = make_material(tmp_path, 4, TINY)
    assert len(prompts(material.train)) == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f".{material.root.name}.lock",
        "seed-4",
        material.root.name,
    ]


def test_fingerprint_covers_every_number_of_the_recipe() -> None:
    changed = [
        replace(RECIPE, student=ModelSizes(48, 144, 3, 4)),
        replace(RECIPE, wrong_share=0.2),
        replace(RECIPE, teacher_lr=1e-3),
        replace(RECIPE, test_rows=601),
        CROSS,
    ]
    assert len({recipe.fingerprint() for recipe in [RECIPE, *changed]}) == 6
