"""Log-likelihoods of five-shot questions: batched with the shared examples run once, against a forward per item and letter.

A tokenizer is learnt, a random model is written to a temporary folder, and questions of invented words are asked in the
shape of MMLU: per subject one header with five worked examples, then questions with four choices. All ways give the same
log-likelihoods, which is checked. Times are the best of rounds that take turns.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distill_rl.bench import record
from distill_rl.bench.prefetch import learn_tokenizer
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.suites.base import Item

LEAST = 3.0
"""The batched way must be this many times faster than a forward per item and letter."""
CLOSE = 1e-3
"""Log-likelihoods of the ways, in fp32, differ by less than this."""
LETTERS = "ABCD"
SHOTS = 5
LOOP, ITEMS, BATCHED, SHARED = "forward per item and letter", "forward per item", "batched", "batched, shared beginning"
Logprobs = list[tuple[float, ...]]


def invent(subjects: int, questions: int, seed: int = 0) -> list[Item]:
    """`subjects` times `questions` items about as long as MMLU's: 30 words to a question, 5 to a choice."""
    draw = random.Random(seed)
    syllables = ["ka", "lo", "mi", "ter", "an", "sol", "be", "ru", "ing", "est", "und", "oo", "pre", "con", "ti", "ve"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(2000)]

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(least, most)))

    def question() -> str:
        return "\n".join([text(10, 50) + "?", *(f"{letter}. {text(1, 9)}" for letter in LETTERS), "Answer:"])

    items = []
    for subject in range(subjects):
        header = f"The following are multiple choice questions (with answers) about {text(1, 3)}.\n\n"
        prefix = header + "".join(f"{question()} {draw.choice(LETTERS)}\n\n" for _ in range(SHOTS))
        for number in range(questions):
            choices = tuple(f" {letter}" for letter in LETTERS)
            items.append(Item(f"{subject}/{number}", question(), draw.choice(LETTERS), str(subject), prefix, choices))
    return items


def write_model(folder: Path, items: Sequence[Item], *, vocabulary: int, hidden: int, layers: int) -> None:
    """A random Llama with heads of 32, and a tokenizer that has seen such questions."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = learn_tokenizer([item.prefix for item in items], vocabulary, "</s>")
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.inference_mode()
def per_letter(generator: HfBackend, items: Sequence[Item]) -> Logprobs:
    """A forward pass over the whole text for every letter; the head only where it is needed."""
    found = []
    for item in items:
        choices, sums = generator.encoder.choices(item), []
        for ids in choices.continuations:
            row = torch.tensor([choices.context + ids], device=generator.device)
            logits = generator.model(row, use_cache=False, logits_to_keep=len(ids) + 1).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1)
            sums.append(float(logprobs.gather(1, torch.tensor(ids, device=logprobs.device)[:, None]).sum()))
        found.append(tuple(sums))
    return found


def chosen(generator: HfBackend, items: Sequence[Item], batch_size: int, *, share: bool) -> Logprobs:
    """What the backend makes of the items, with or without what they share made known to it."""
    generator.settings = replace(generator.settings, batch_size=batch_size)
    if not share:
        items = [replace(item, prompt=item.prefix + str(item.prompt), prefix="") for item in items]
    return [output.logprobs for _, output in sorted(generator.choose(items), key=lambda pair: pair[0])]


def compare(generator: HfBackend, items: Sequence[Item], batch_size: int, rounds: int) -> dict[str, Any]:
    """Seconds of every way, how much faster each is than the loop, and the greatest difference from it."""
    ways: dict[str, Callable[[], Logprobs]] = {
        LOOP: lambda: per_letter(generator, items),
        ITEMS: lambda: chosen(generator, items, 1, share=False),
        BATCHED: lambda: chosen(generator, items, batch_size, share=False),
        SHARED: lambda: chosen(generator, items, batch_size, share=True),
    }
    best, logprobs = dict.fromkeys(ways, float("inf")), {}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            logprobs[name] = way()
            best[name] = min(best[name], time.perf_counter() - start)
    reference = torch.tensor(logprobs[LOOP])
    return {
        name: {
            "seconds": round(best[name], 3),
            "items_per_second": round(len(items) / best[name], 2),
            "times_as_fast": round(best[LOOP] / best[name], 2),
            "greatest_difference": float((torch.tensor(logprobs[name]) - reference).abs().max()),
        }
        for name in ways
    }


def verdict(ways: dict[str, Any]) -> list[str]:
    """What is not as promised; nothing if all is."""
    problems = []
    if ways[SHARED]["times_as_fast"] < LEAST:
        problems.append(f"{SHARED}: {ways[SHARED]['times_as_fast']:.2f} times as fast; it must be {LEAST:g} at least")
    for name, way in ways.items():
        if way["greatest_difference"] >= CLOSE:
            problems.append(f"{name}: log-likelihoods differ by {way['greatest_difference']:.1e}")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.parser(__doc__.splitlines()[0])
    parser.add_argument("--subjects", type=int, default=2, help="%(default)s")
    parser.add_argument("--questions", type=int, default=32, help="per subject; %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="rows of a forward pass; %(default)s")
    parser.add_argument("--vocabulary", type=int, default=8000, help="tokens; %(default)s")
    parser.add_argument("--hidden", type=int, default=256, help="size of the model; %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="%(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    options = parser.parse_args(arguments)
    items = invent(options.subjects, options.questions)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {name: getattr(options, name) for name in ("vocabulary", "hidden", "layers")}
        write_model(Path(folder), items, **sizes)
        generator = HfBackend(folder, Settings(dtype="fp32", device="cpu"))
        lengths = [len(generator.encoder.encode(item)) for item in items]
        ways = compare(generator, items, options.batch, options.rounds)
    workload = {name: getattr(options, name) for name in ("subjects", "questions", "batch", "rounds")} | sizes
    workload |= {"shots": SHOTS, "prompt_tokens_mean": round(sum(lengths) / len(lengths), 1)}
    workload |= {"threads": torch.get_num_threads()}
    print(f"\n{'':<28}{'seconds':>9}{'items/s':>9}{'faster':>9}{'differs':>10}")
    for name, way in ways.items():
        cells = f"{way['seconds']:>9.2f}{way['items_per_second']:>9.1f}{way['times_as_fast']:>8.1f}x"
        print(f"{name:<28}{cells}{way['greatest_difference']:>10.0e}")
    print(f"written   {record.write('evals', {'workload': workload, 'ways': ways}, options.out)}")
    problems = verdict(ways)
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
