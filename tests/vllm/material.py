"""A tiny model that has learned, for a moment, to answer questions with a letter and to say why."""

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
# Heads of 32: vLLM on CPUs has no smaller ones.
SHAPE = {"hidden": 64, "heads": 2, "kv_heads": 1, "positions": POSITIONS}
_KEYS = ("ka", "lo", "mi", "ter", "an", "sol", "be", "ru", "ing", "est", "und", "oo")
_WORDS = sorted(set(seeded_words(12, 300)))[:60]


def _question(draw: random.Random) -> tuple[str, str, str]:
    """A question up to its "Answer:", the right letter, and the reason: both follow from the key word in it."""
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
    """Questions with choices; `space`: choices are " A" …, of two tokens here, else "A" … after a space, of one."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        subject = SUBJECTS[number % len(SUBJECTS)]
        question, letter, _ = _question(draw)
        choices = tuple(f" {each}" if space else each for each in LETTERS)
        prompt = question if space else question + " "
        found.append(Item(f"{subject}/{number}", prompt, letter, subject, _shots(subject, shots), choices))
    return found


def train(folder: Path, *, seed: int = 0, steps: int = 300) -> Path:
    """A model that answers most questions rightly, so that no letter is preferred and few choices are close."""
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
    """16 questions of the model's ids [R, S] and labels [R, S]: only answers are learned, and that they end."""
    import torch

    rows = []
    for _ in range(16):
        question, letter, reason = _question(draw)
        prompt = tokenizer(question)["input_ids"]
        answer = tokenizer(f" {letter}{reason}{tokenizer.eos_token}")["input_ids"]
        rows.append((prompt + answer, [-100] * len(prompt) + answer))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
    return ids, labels
