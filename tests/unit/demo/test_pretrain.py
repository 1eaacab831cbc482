from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from distill_rl.demo.material import encode, new_model, train_teacher
from distill_rl.demo.recipe import RECIPE, ListProblem, ModelSizes, Recipe, draw_problems
from distill_rl.demo.tokenizer import make_tokenizer
from distill_rl.types import IGNORE_INDEX

TOKENIZER = make_tokenizer(64)
TINY = replace(
    RECIPE, teacher=ModelSizes(16, 32, 1, 2), positions=64, teacher_steps=12, teacher_batch=8, teacher_warmup=2
)


def trained(recipe: Recipe, seed: int) -> torch.nn.Module:
    teacher = new_model(recipe.teacher, recipe, TOKENIZER, seed)
    train_teacher(teacher, TOKENIZER, draw_problems(f"{seed}"), recipe)
    return teacher


def mean_loss(model: torch.nn.Module) -> float:
    input_ids, labels = encode(TOKENIZER, list(islice(draw_problems("measure"), 64)))
    with torch.no_grad():
        logits = model(input_ids=input_ids).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX).item()


def test_labels_are_the_next_tokens_of_the_answers_only() -> None:
    problems = [
        ListProblem("sort", "sort: 7 3 9 1", "1 3 7 9"),
        ListProblem("sort words", "sort words: kite house", "house kite"),
    ]
    input_ids, labels = encode(TOKENIZER, problems)
    assert input_ids.shape == labels.shape
    for row, problem in enumerate(problems):
        trained_on = labels[row] != IGNORE_INDEX
        assert TOKENIZER.decode(labels[row][trained_on]) == f" {problem.answer}<eos>"
        positions = trained_on.nonzero().flatten()
        assert torch.equal(input_ids[row][positions[1:]], labels[row][positions[:-1]]), "a label is the next token"
        assert TOKENIZER.decode(input_ids[row][: positions[0] + 1]) == f"<bos>{problem.prompt} =>"


def test_weights_depend_on_the_seed_not_on_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (new_model(TINY.teacher, TINY, TOKENIZER, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name])
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_training_lowers_the_loss_and_is_deterministic(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = trained(TINY, 3), trained(TINY, 3)
    untrained = new_model(TINY.teacher, TINY, TOKENIZER, 3)
    assert mean_loss(first) < mean_loss(untrained) - 0.1
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    assert "teacher 12/12  loss" in capfd.readouterr().err


def test_training_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trained(replace(TINY, teacher_steps=1), 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
