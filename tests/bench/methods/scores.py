"""How good a student is: its answers to questions, the bits it needs per byte of a text, and how far it is from its teacher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from distill_rl.config.schema import DataConfig
from distill_rl.demo import bits
from distill_rl.demo.bits import EncodedText
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.suites.exact_match import ExactMatch

Measure = Literal["exact match", "bits per byte"]
LENGTH = 256
"""Most tokens that models which are trained here read at once."""
NEW_TOKENS = 32
"""Most tokens of an answer; the right ones have up to 19."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What students are measured on."""

    documents: Path
    """JSON lines of texts or chats."""
    questions: Path | None = None
    """Questions of the suite `exact_match`; None: the score is the bits per byte of the documents."""
    length: int = LENGTH
    """Most tokens that a model reads at once."""

    @property
    def measure(self) -> Measure:
        return "bits per byte" if self.questions is None else "exact match"


@dataclass(frozen=True, slots=True)
class Scores:
    """What was measured of a model."""

    score: float
    """In the unit of `HeldOut.measure`: of the answers, the share that is right; or bits per byte."""
    items: list[float]
    """The score's parts: 0 or 1 per question, or bits per document."""
    bits_per_byte: float
    kl: float | None
    """KL(teacher ‖ student) in nats, the mean over predicted tokens; None for another tokenizer, and without a teacher."""


def measure(model: Path, held_out: HeldOut, data: DataConfig, teacher: Path | None = None) -> Scores:
    """Measures the model in a folder.

    Args:
        data: how a chat is read (`loss_on`).
        teacher: one with the model's tokenizer; None: there is none to compare with.
    """
    lines = held_out.documents.read_text("utf-8").splitlines()
    rows = [{"row": i, **json.loads(line)} for i, line in enumerate(lines)]
    with closing(HfBackend(model, Settings(batch_size=100))) as backend:
        encoded = [bits.encode(backend.encoder.tokenizer, row, data) for row in rows]
        found = bits.bits(backend.model, encoded, held_out.length)
        per_byte = float(found.sum() / sum(document.num_bytes for document in encoded))
        kl = None if teacher is None else _kl(teacher, backend.model, encoded, held_out.length)
        if held_out.questions is None:
            return Scores(per_byte, [round(value, 3) for value in found.tolist()], per_byte, kl)
        items = _answers(backend, held_out.questions)
        return Scores(float(np.mean(items)), items, per_byte, kl)


def _answers(backend: HfBackend, questions: Path) -> list[float]:
    """Per question, whether the greedy answer is right: 1 or 0."""
    suite = ExactMatch()
    items = suite.load(questions).items
    right = [0.0] * len(items)
    for i, output in backend.generate(items, max_new_tokens=NEW_TOKENS):
        right[i] = suite.judge(items[i], output.text).score
    return right


@torch.no_grad()
def _kl(teacher: Path, student: Any, documents: Sequence[EncodedText], length: int) -> float:
    """KL(teacher ‖ student) over the whole vocabulary, in nats, the mean over the counted tokens of the documents."""
    total, count = 0.0, 0
    with closing(HfBackend(teacher, Settings())) as other:
        for batch in bits.batches(documents, length):
            p, q = (
                model(input_ids=batch.ids, use_cache=False).logits[batch.counted].log_softmax(-1)
                for model in (other.model, student)
            )
            total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            count += len(batch.targets)
    return total / count


def as_record(scores: Scores, held_out: HeldOut) -> dict[str, Any]:
    """Scores as JSON. The answers become one text, a digit for each."""
    items = scores.items if held_out.questions is None else "".join(str(int(item)) for item in scores.items)
    kl = None if scores.kl is None else round(scores.kl, 5)
    return {"score": round(scores.score, 5), "bits_per_byte": round(scores.bits_per_byte, 5), "kl": kl, "items": items}
