"""Log-likelihoods of five-shot questions: batched with a shared prefix, against a forward pass per item and letter.

The benchmark trains a tokenizer, writes a random model to a temporary folder, and invents questions in the shape of
MMLU: per subject one header with five worked examples, then questions with four choices. It checks that all variants
give the same log-likelihoods. The time of a variant is its best of several rounds, in which the variants take turns.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distill_rl.evals.backends.base import Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.suites.base import Item
from tests.bench import harness
from tests.bench.material import invent_words, train_tokenizer, write_llama

MIN_SPEEDUP = 3.0
"""Required speed-up of batches with a shared prefix over a forward pass per item and letter."""
MAX_DIFFERENCE = 1e-3
"""Bound on the difference of log-likelihoods between variants, in fp32."""
LETTERS = "ABCD"
SHOTS = 5
LOOP, ITEMS, BATCHED, SHARED = "forward per item and letter", "forward per item", "batched", "batched, shared beginning"
Logprobs = list[tuple[float, ...]]


def invent(subjects: int, questions: int, seed: int = 0) -> list[Item]:
    """`subjects` × `questions` items about as long as MMLU's: 30 words per question, 5 per choice."""
    draw = random.Random(seed)
    words = invent_words(draw, 2000, most_syllables=3)

    def text(min_words: int, max_words: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(min_words, max_words)))

    def question() -> str:
        return "\n".join([text(10, 50) + "?", *(f"{letter}. {text(1, 9)}" for letter in LETTERS), "Answer:"])

    items = []
    for subject in range(subjects):
        header = f"The following are multiple choice questions (with answers) about {text(1, 3)}.\n\n"
        prefix = header + "".join(f"{question()} {draw.choice(LETTERS)}\n\n" for _ in range(SHOTS))
        for i in range(questions):
            choices = tuple(f" {letter}" for letter in LETTERS)
            items.append(Item(f"{subject}/{i}", question(), draw.choice(LETTERS), str(subject), prefix, choices))
    return items


def write_model(folder: Path, items: Sequence[Item], *, vocabulary: int, hidden: int, layers: int) -> None:
    """Writes a random Llama with heads of size 32 to `folder`, and a tokenizer trained on the prefixes of the items.

    Args:
        hidden: size of the hidden states, a multiple of 64.
    """
    tokenizer = train_tokenizer([item.prefix for item in items], vocabulary, "</s>")
    torch.manual_seed(0)
    write_llama(
        folder,
        tokenizer,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
    )
    tokenizer.save_pretrained(folder)


@torch.inference_mode()
def per_letter(backend: HfBackend, items: Sequence[Item]) -> Logprobs:
    """Log-probabilities of each item's choices, computed the simple way: the reference for the backend.

    One forward pass over the whole text per choice, with the output layer at the needed positions only.
    """
    results = []
    for item in items:
        (context, continuations), sums = backend.encoder.choices(item), []
        for ids in continuations:
            row = torch.tensor([context + ids], device=backend.device)
            logits = backend.model(row, use_cache=False, logits_to_keep=len(ids) + 1).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1)
            sums.append(float(logprobs.gather(1, torch.tensor(ids, device=logprobs.device)[:, None]).sum()))
        results.append(tuple(sums))
    return results


def by_backend(backend: HfBackend, items: Sequence[Item], batch_size: int, *, share: bool) -> Logprobs:
    """The backend's log-likelihoods of each item's choices, in the order of the items.

    Args:
        backend: its batch size is changed, and stays so.
        share: keep the shared prefix in `Item.prefix`; otherwise it becomes part of every prompt.
    """
    backend.settings = replace(backend.settings, batch_size=batch_size)
    if not share:
        items = [replace(item, prompt=item.prefix + str(item.prompt), prefix="") for item in items]
    return [output.logprobs for _, output in sorted(backend.choose(items), key=lambda pair: pair[0])]


def compare(backend: HfBackend, items: Sequence[Item], batch_size: int, rounds: int) -> dict[str, Any]:
    """The best time of every variant, its speed, its speed-up over the loop, and its greatest difference from the loop.

    The loop is `per_letter`. Differences are absolute ones of log-likelihoods.
    """
    variants: dict[str, Callable[[], Logprobs]] = {
        LOOP: lambda: per_letter(backend, items),
        ITEMS: lambda: by_backend(backend, items, 1, share=False),
        BATCHED: lambda: by_backend(backend, items, batch_size, share=False),
        SHARED: lambda: by_backend(backend, items, batch_size, share=True),
    }
    best, logprobs = harness.best_times(variants, rounds, warm_up=False)
    reference = torch.tensor(logprobs[LOOP])
    return {
        name: {
            "seconds": round(best[name], 3),
            "items_per_second": round(len(items) / best[name], 2),
            "times_as_fast": round(best[LOOP] / best[name], 2),
            "greatest_difference": float((torch.tensor(logprobs[name]) - reference).abs().max()),
        }
        for name in variants
    }


def verdict(results: dict[str, Any]) -> list[str]:
    """The missed targets of the figures, one line each; empty if all are met."""
    speedup = results[SHARED]["times_as_fast"]
    differences = {name: result["greatest_difference"] for name, result in results.items()}
    return harness.missed(
        (speedup < MIN_SPEEDUP, f"{SHARED}: {speedup:.2f} times as fast; it must be at least {MIN_SPEEDUP:g}"),
        *(
            (worst >= MAX_DIFFERENCE, f"{name}: log-likelihoods differ by {worst:.1e}")
            for name, worst in differences.items()
        ),
    )


def measure(
    folder: Path,
    *,
    subjects: int = 2,
    questions: int = 32,
    batch: int = 16,
    vocabulary: int = 8000,
    hidden: int = 256,
    layers: int = 4,
    rounds: int = 3,
) -> dict[str, Any]:
    """Compare all variants on one model and one set of questions.

    Args:
        subjects: number of subjects.
        questions: per subject.
        batch: rows of a forward pass.
        vocabulary: tokens.
        hidden: size of the model.
        layers: of the model.
        rounds: timed rounds.
    """
    items = invent(subjects, questions)
    sizes = {"vocabulary": vocabulary, "hidden": hidden, "layers": layers}
    write_model(folder, items, **sizes)
    backend = HfBackend(folder, Settings(dtype="fp32", device="cpu"))
    lengths = [len(backend.encoder.encode(item)) for item in items]
    results = compare(backend, items, batch, rounds)
    workload = {"subjects": subjects, "questions": questions, "batch": batch, "rounds": rounds, **sizes}
    workload |= {"shots": SHOTS, "threads": torch.get_num_threads()}
    return {"workload": workload | {"prompt_tokens_mean": round(sum(lengths) / len(lengths), 1)}, "ways": results}


main = harness.program("evals", measure, lambda figures: verdict(figures["ways"]))

if __name__ == "__main__":
    sys.exit(main())
