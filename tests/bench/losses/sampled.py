"""Students from sampled, top-k and whole targets of one teacher, at equal bytes: the table of arXiv 2503.16870 in miniature.

The text is made up, in the shape of language: 1,024 tokens whose frequencies follow Zipf's law, and a next token that depends on
the last two through random features. The teacher is a small network trained on it; the students are smaller ones, which differ
in the targets that they learn from and in nothing else. A position has the same targets whenever it is seen, as if they had
been stored. Nothing is timed: a seed gives the same figures on every machine but for rounding.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distill_rl.config.target_bytes import target_bytes_per_token
from distill_rl.losses import DenseLogits, kd_loss, token_agreement, vocab_parallel_sample, vocab_parallel_topk
from distill_rl.losses.options import TAILS
from distill_rl.losses.targets import Teacher
from tests.bench import harness

VOCABULARY = 1024
CHAINS, LENGTH, VALIDATED = 256, 400, 8192
BATCH = 256
ENTRIES = (12, 50)
"""Entries per token of top-k and sampled targets."""
WIRE_BYTES = 2
"""Of a log-probability or a logit: fp16."""
Targets = Callable[[Tensor, Tensor], tuple[Teacher | None, dict[str, Any]]]
"""The teacher's logits [N, V] and the numbers [N] of the positions → targets, and settings of `kd_loss`."""


class Text:
    """Contexts of two tokens [N, 2] and the tokens that follow [N], from a random source."""

    def __init__(self, seed: int):
        draw = torch.Generator().manual_seed(seed)
        features = 8
        # The logits of the next token: Zipf's law, and features of the last two tokens, the last one more.
        zipf = -torch.arange(1, VOCABULARY + 1).float().log()
        inputs = torch.randn(2, VOCABULARY, features, generator=draw)
        outputs = torch.randn(2, features, VOCABULARY, generator=draw) * torch.tensor([0.8, 1.3])[:, None, None]
        tokens = torch.randint(VOCABULARY, (CHAINS, 2), generator=draw)
        for _ in range(LENGTH):
            logits = zipf + sum(inputs[i, tokens[:, i - 2]] @ outputs[i] for i in range(2))
            following = torch.multinomial(logits.softmax(1), 1, generator=draw)
            tokens = torch.cat([tokens, following], 1)
        windows = tokens.unfold(1, 3, 1).flatten(0, 1)
        self.contexts, self.labels = windows[:, :2], windows[:, 2]


class Network(nn.Sequential):
    """Logits [N, V] of the token after two tokens [N, 2]."""

    def __init__(self, width: int, seed: int):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(
                nn.Embedding(VOCABULARY, width),
                nn.Flatten(),
                nn.Linear(2 * width, 2 * width),
                nn.SiLU(),
                nn.Linear(2 * width, VOCABULARY),
            )


def train(network: Network, text: Text, steps: int, targets: Targets, teacher: Network | None, seed: int) -> None:
    """Trains in place with AdamW, a warm-up and a cosine, on batches that depend on the seed alone."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    for positions in _batches(len(text.labels) - VALIDATED, steps, seed):
        contexts, labels = text.contexts[positions], text.labels[positions]
        with torch.no_grad():
            target, settings = targets(teacher(contexts) if teacher else contexts, positions)
        kd_loss(network(contexts), target, labels=labels, **settings).loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _batches(positions: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Yields `steps` batches of positions, epoch by epoch in a new order."""
    draw, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(positions, generator=draw)
        yield order[:BATCH]
        order = order[BATCH:]


def students() -> dict[str, tuple[Targets, int]]:
    """Name → the targets of a student, and their bytes per token."""
    found: dict[str, tuple[Targets, int]] = {
        "labels alone": (lambda *_: (None, {"kd_ratio": 0.0}), 0),
        "all logits": (
            lambda logits, _: (DenseLogits(logits), {}),
            target_bytes_per_token("logits", VOCABULARY, WIRE_BYTES),
        ),
    }
    for entries in ENTRIES:
        size = target_bytes_per_token("topk", entries, WIRE_BYTES)
        for tail in reversed(TAILS):
            found[f"top {entries}, {tail}"] = (_top(entries, tail), size)
        found[f"{entries} draws"] = (_drawn(entries), target_bytes_per_token("sampled", entries, WIRE_BYTES))
    return found


def _top(k: int, tail: str) -> Targets:
    return lambda logits, _: (vocab_parallel_topk(logits, k), {"tail": tail})


def _drawn(n: int) -> Targets:
    return lambda logits, positions: (vocab_parallel_sample(logits, n, keys=positions), {})


@torch.no_grad()
def validate(network: Network, teacher: Network, text: Text) -> dict[str, float]:
    """KD with the teacher and CE with the text, in nats; calibration error and acceptance, in percent."""
    contexts, labels = text.contexts[-VALIDATED:], text.labels[-VALIDATED:]
    logits, theirs = network(contexts), DenseLogits(teacher(contexts))
    output = kd_loss(logits, theirs, labels=labels)
    agreement = token_agreement(logits, theirs)
    assert output.ce_loss is not None
    return {
        "kd": float(output.kd_loss),
        "ce": float(output.ce_loss),
        "calibration_error_percent": 100 * calibration_error(logits, labels),
        "acceptance_percent": 100 * float(agreement.acceptance) / VALIDATED,
    }


def calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """The expected calibration error of the most likely token: |accuracy − confidence|, averaged over bins of confidence."""
    confidence, best = logits.softmax(1).max(1)
    right = (best == labels).float()
    bin_of = (confidence * bins).long().clamp_max(bins - 1)
    gaps = torch.zeros(bins).index_add_(0, bin_of, right - confidence)
    return float(gaps.abs().sum() / len(labels))


@torch.no_grad()
def described(teacher: Network, text: Text) -> dict[str, float]:
    """What the teacher's distributions are like: entropy in nats, mass of the top k, and distinct ids among the draws."""
    logits = teacher(text.contexts[-VALIDATED:])
    logprobs = logits.log_softmax(1)
    facts = {
        "teacher_ce": float(-logprobs.gather(1, text.labels[-VALIDATED:, None]).mean()),
        "teacher_entropy": float(-(logprobs.exp() * logprobs).sum(1).mean()),
    }
    for entries in ENTRIES:
        facts[f"mass_of_top_{entries}"] = float(logprobs.topk(entries).values.exp().sum(1).mean())
        drawn = vocab_parallel_sample(logits, entries, keys=torch.arange(VALIDATED))
        facts[f"distinct_ids_of_{entries}_draws"] = float((drawn.ids >= 0).sum(1).float().mean())
    return facts


def measure(folder: Path, *, seeds: int = 3, steps: int = 600) -> dict[str, Any]:
    """Trains teachers and students.

    Args:
        seeds: number of texts, teachers and initial students.
        steps: of every training.
    """
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in students()}
    facts = []
    for seed in range(seeds):
        text, teacher = Text(seed), Network(64, seed)
        train(teacher, text, 2 * steps, lambda *_: (None, {"kd_ratio": 0.0}), None, seed)
        facts.append(described(teacher, text))
        for name, (targets, _) in students().items():
            student = Network(24, seed + 1000)
            train(student, text, steps, targets, teacher, seed)
            rows[name].append(validate(student, teacher, text))
            print(f"seed {seed}, {name}: {rows[name][-1]}", file=sys.stderr, flush=True)
    return {
        "settings": {"vocabulary": VOCABULARY, "seeds": seeds, "steps": steps, "batch": BATCH},
        "teacher": _summary(facts),
        "students": {name: {"bytes_per_token": size, **_summary(rows[name])} for name, (_, size) in students().items()},
    }


def _summary(records: list[dict[str, float]]) -> dict[str, Any]:
    """Means over the seeds; with several seeds also the standard deviation of kd and ce."""
    found: dict[str, Any] = {key: statistics.mean(record[key] for record in records) for key in records[0]}
    if len(records) > 1:
        found |= {
            f"{key}_deviation": statistics.stdev(record[key] for record in records)
            for key in ("kd", "ce")
            if key in records[0]
        }
    return found


def verdict(figures: dict[str, Any]) -> list[str]:
    """Draws must beat what ignores the tail, at equal bytes."""
    rows = figures["students"]
    return harness.missed(
        *(
            (rows[f"{n} draws"]["kd"] >= rows[f"top {n}, {tail}"]["kd"], f"missed: {n} draws against top {n}, {tail}")
            for n in ENTRIES
            for tail in ("truncate", "renormalize")
        )
    )


main = harness.program("sampled", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
