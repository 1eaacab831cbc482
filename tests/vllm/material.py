"""A tiny model, briefly trained to answer questions with a letter and a reason."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from distill_rl.evals.suites.base import Item
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import seeded_words

LETTERS = "ABCD"
SUBJECTS = ("ka lo", "mi ter", "sol", "be ru")
POSITIONS = 512
# vLLM on CPUs supports no heads smaller than 32.
SHAPE = {"hidden": 64, "heads": 2, "kv_heads": 1, "positions": POSITIONS}
_KEYS = ("ka", "lo", "mi", "ter", "an", "sol", "be", "ru", "ing", "est", "und", "oo")
_WORDS = sorted(set(seeded_words(12, 300)))[:60]


def _question(draw: random.Random) -> tuple[str, str, str]:
    """A question up to its "Answer:", the right letter and the reason, both determined by the key word in the question."""
    key = draw.randrange(len(_KEYS))
    lines = [f"{letter}. {' '.join(draw.choices(_WORDS, k=draw.randint(1, 3)))}" for letter in LETTERS]
    reason = f"\nBecause {_WORDS[key]} {_WORDS[(7 * key + 3) % len(_WORDS)]}.\n\n"
    return "\n".join([*lines, f"Which is {_KEYS[key]}? Answer:"]), LETTERS[key % 4], reason


def _shots(subject: str, count: int) -> str:
    draw = random.Random(f"shots-{subject}")
    texts = [f"The following are questions about {subject}.\n\n"]
    texts += [f"{question} {letter}\n\n" for question, letter, _ in (_question(draw) for _ in range(count))]
    return "".join(texts)


def items(count: int, *, shots: int, space: bool, seed: int = 1) -> list[Item]:
    """Questions with choices.

    Args:
        space: the choices are " A" …, of two tokens here; otherwise "A" … after a space, of one token.
    """
    draw = random.Random(seed)
    questions = []
    for i in range(count):
        subject = SUBJECTS[i % len(SUBJECTS)]
        question, letter, _ = _question(draw)
        choices = tuple(f" {name}" if space else name for name in LETTERS)
        prompt = question if space else question + " "
        questions.append(Item(f"{subject}/{i}", prompt, letter, subject, _shots(subject, shots), choices))
    return questions


def train(folder: Path, *, seed: int = 0, steps: int = 300) -> Path:
    """Trains a model to answer most questions correctly, so that it prefers no letter and few choices are close."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny_model(folder, seed=seed, **SHAPE)  # type: ignore[arg-type]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        ids, labels = _batch(tokenizer, draw)
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return folder


def _batch(tokenizer: Any, draw: random.Random) -> tuple[Any, Any]:
    """Ids [R, S] and labels [R, S] of 16 questions; only answers and their end-of-text tokens have labels.

    All come after the same number of worked examples, as in the tests: without these, what the model answers after
    examples would be left to chance, and so to the machine.
    """
    import torch

    rows, shots = [], draw.choice((0, 0, 0, 0, 0, 1, 1, 5))
    for _ in range(16):
        question, letter, reason = _question(draw)
        prompt = tokenizer(_shots(draw.choice(SUBJECTS), shots) + question)["input_ids"]
        answer = tokenizer(f" {letter}{reason}{tokenizer.eos_token}")["input_ids"]
        rows.append((prompt + answer, [-100] * len(prompt) + answer))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
    return ids, labels
