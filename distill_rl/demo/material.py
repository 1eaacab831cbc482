"""The quickstart's models and data, made once per seed and reused afterwards; the teacher is trained here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.demo.recipe import (
    RECIPE,
    ListProblem,
    ModelSizes,
    Recipe,
    draw_problems,
    question_row,
    training_row,
    with_wrong_answers,
)
from distill_rl.demo.tokenizer import make_tokenizer
from distill_rl.observe.log import ProgressBar
from distill_rl.system.files import made_once, point_at, write_json_lines
from distill_rl.types import IGNORE_INDEX

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Material:
    """The files in a folder that `make_material` made."""

    def __init__(self, root: Path):
        self.root = root
        self.teacher = root / "teacher"
        """A model trained on the tasks, with its tokenizer."""
        self.student = root / "student"
        """A smaller model with random weights, with its tokenizer."""
        self.train = root / "train.jsonl"
        """Chats, some of them with a wrong answer."""
        self.half = root / "train-half.jsonl"
        """The first half of these chats."""
        self.validation = root / "validation.jsonl"
        """Chats with right answers."""
        self.test = root / "test.jsonl"
        """Questions with answers, in the format of the suite `exact_match`."""


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

    rows = draw_rows(seed, recipe)
    material.root.mkdir()
    write_json_lines(material.train, map(training_row, rows.train))
    write_json_lines(material.half, map(training_row, rows.train[: len(rows.train) // 2]))
    write_json_lines(material.validation, map(training_row, rows.validation))
    write_json_lines(material.test, map(question_row, rows.test))
    logging.disable_progress_bar()  # one bar per written file
    # Different seeds, so that the two models do not share initial weights.
    tokenizer = make_tokenizer(recipe.positions, recipe.teacher_tokenizer)
    teacher = new_model(recipe.teacher, recipe, tokenizer, seed=2 * seed)
    train_teacher(teacher, tokenizer, teacher_problems(seed, rows), recipe)
    teacher.save_pretrained(material.teacher)
    tokenizer.save_pretrained(material.teacher)
    tokenizer = make_tokenizer(recipe.positions, recipe.student_tokenizer)
    new_model(recipe.student, recipe, tokenizer, seed=2 * seed + 1).save_pretrained(material.student)
    tokenizer.save_pretrained(material.student)


def new_model(shape: ModelSizes, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A Llama with random weights, which `seed` determines for a given config; fp32, on the CPU. The caller's random
    state is left unchanged.

    Args:
        recipe: positions and initialiser range.
        tokenizer: determines the vocabulary size and the ids of bos, eos and padding.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=recipe.positions,
        initializer_range=recipe.initializer_range,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def train_teacher(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Iterator[ListProblem], recipe: Recipe
) -> None:
    """Trains the teacher in place with cross-entropy on the answers, each problem once, and shows progress on stderr.

    Takes `teacher_steps` batches of `teacher_batch` problems from `problems`, and leaves the model in evaluation mode.
    Uses one thread, so that a seed gives the same teacher on any number of cores.
    """
    import torch
    from rich.console import Console

    optimizer = torch.optim.AdamW(teacher.parameters(), lr=recipe.teacher_lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate(step, recipe))
    teacher.train()
    bar = ProgressBar("teacher", recipe.teacher_steps, console=Console(stderr=True))
    with closing(bar), ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for step in range(recipe.teacher_steps):
            input_ids, labels = encode(tokenizer, list(islice(problems, recipe.teacher_batch)))
            # Padding is on the right, where causal attention never sees it, so no attention mask is needed.
            logits = teacher(input_ids=input_ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.update(step + 1, [f"loss {loss.item():.3f}"])
    teacher.eval()


def encode(tokenizer: PreTrainedTokenizerBase, problems: list[ListProblem]) -> tuple[Tensor, Tensor]:
    """Input ids and labels of chats made of the problems, both int64 [R, S], padded on the right to the longest row.

    Labels are shifted, so that position s predicts labels[s]; they are the tokens of the answer, including its
    end-of-text token, and IGNORE_INDEX elsewhere. `problems` must not be empty.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows, answers = [], []
    for problem in problems:
        chat = training_row(problem)["messages"]
        row: Any = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        rows.append(torch.tensor(row["input_ids"]))
        answers.append(torch.where(torch.tensor(row["assistant_masks"]) > 0, rows[-1], IGNORE_INDEX))
    input_ids = pad_sequence(rows, batch_first=True, padding_value=int(tokenizer.pad_token_id))
    labels = pad_sequence(answers, batch_first=True, padding_value=IGNORE_INDEX)
    return input_ids, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def _learning_rate(step: int, recipe: Recipe) -> float:
    return min(1.0, (step + 1) / recipe.teacher_warmup) * 0.5 * (1 + math.cos(math.pi * step / recipe.teacher_steps))
