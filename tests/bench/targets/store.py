"""The compact format of stored targets: bytes per token, speed, and what it does to a KD loss.

The targets are those of small language models that are trained here on real text, so that ids and probabilities have a
real shape. They are small: a large model's lists follow the context more and the last token less, and cost more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill_rl.losses import TopKLogprobs, kd_loss
from distill_rl.store.compact import decode, encode, to_levels
from tests.bench import harness, language_models
from tests.bench.language_models import Family, Recipe

MOST_BYTES, MOST_RATIO, AT_K = 100, 1.1, 64
MOST_ERROR, LEAST_COSINE, LEAST_DECODED_PER_S = 0.01, 0.999, 300_000
TOKEN_BYTES = 4
"""A token's own id, which the store keeps beside the block."""
Targets = dict[str, np.ndarray]
Piece = tuple[np.ndarray, Targets]
"""(tokens int32 [n], targets of the n rows)"""


def pieces(family: Family, tokens: int, k: int, longest: int) -> list[Piece]:
    """Pieces of held-out documents in random order, until there are `tokens` of them, with the teacher's targets."""
    order = np.random.default_rng(0).permutation(len(family.held_out))
    made: list[Piece] = []
    count = 0
    for document in (family.held_out[i] for i in order):
        for start in range(0, len(document) - 1, longest):
            part = document[start : start + longest + 1]
            if len(part) < 2 or count >= tokens:
                break
            logprobs = language_models.log_probabilities(family.teacher, part[:-1])
            made.append((part[:-1], language_models.top_k(logprobs, part[1:], k)))
            count += len(part) - 1
    return made


def first_k(targets: Targets, k: int) -> Targets:
    """The targets with only the first k entries of each row; the rest gains the others."""
    logprobs = targets["logprobs"]
    dropped = np.exp(logprobs[:, k:].astype(np.float64)).sum(1)
    rest = np.log(np.exp(targets["rest_logprob"].astype(np.float64)) + dropped).astype(np.float32)
    return targets | {"ids": targets["ids"][:, :k], "logprobs": logprobs[:, :k], "rest_logprob": rest}


def divided(piece: Piece, longest: int) -> Iterator[Piece]:
    """The piece in parts of at most `longest` tokens."""
    tokens, targets = piece
    for start in range(0, len(tokens), longest):
        rows = slice(start, start + longest)
        yield tokens[rows], {name: array[rows] for name, array in targets.items()}


def entropy(values: np.ndarray) -> float:
    """Bits per value at the frequencies that the values have."""
    _, counts = np.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def bound_bytes(made: Sequence[Piece]) -> float:
    """Bytes per token of a coder that knows all frequencies of these very data beforehand, but no context.

    Ids: the entropy of their ranks among all ids of the lists, by frequency. Log-probabilities: of the quantised first
    one, and of the difference to the one before for each place of the row. Rest, label: of their quantised values. And
    the token's own id.
    """
    joined = {name: np.concatenate([targets[name] for _, targets in made]) for name in made[0][1]}
    levels = to_levels(joined["logprobs"])
    steps = np.diff(levels, axis=1, prepend=0)
    bits = levels.shape[1] * entropy(joined["ids"]) + sum(entropy(column) for column in steps.T)
    bits += sum(entropy(to_levels(joined[name])) for name in ("rest_logprob", "label_logprob"))
    return bits / 8 + TOKEN_BYTES


def size_of(made: Sequence[Piece], vocabulary: int, change: Callable[[Targets], Targets], **options: Any) -> float:
    """Bytes per token of the blocks of the changed targets."""
    size = sum(len(encode(tokens, change(targets), vocabulary_size=vocabulary, **options)) for tokens, targets in made)
    return size / sum(len(tokens) for tokens, _ in made)


def shares_of(made: Sequence[Piece], vocabulary: int) -> dict[str, float]:
    """Bytes per token by what they are spent on, from sizes of blocks that lack something. Headers count as values."""

    def only_lists(targets: Targets) -> Targets:
        return {name: targets[name] for name in ("ids", "logprobs")}

    def only_values(targets: Targets) -> Targets:
        """Every row has the same ids, which cost next to nothing. How values are coded does not depend on ids."""
        lists = only_lists(targets)
        return lists | {"ids": np.broadcast_to(np.arange(lists["ids"].shape[1], dtype=np.int32), lists["ids"].shape)}

    everything, lists = (size_of(made, vocabulary, change) for change in (dict, only_lists))
    values = size_of(made, vocabulary, only_values)
    return {"ids": lists - values, "values": values, "rest_and_label": everything - lists, "token": TOKEN_BYTES}


def speeds(made: Sequence[Piece], vocabulary: int, rounds: int = 20) -> dict[str, float]:
    """Tokens per second of CPU time, the best of some rounds, after one that is not timed."""
    blocks = [(tokens, encode(tokens, targets, vocabulary_size=vocabulary)) for tokens, targets in made]
    best = {"encode": float("inf"), "decode": float("inf")}
    for _ in range(rounds):
        start = time.process_time()
        for tokens, targets in made:
            encode(tokens, targets, vocabulary_size=vocabulary)
        middle = time.process_time()
        for tokens, block in blocks:
            decode(tokens, block, vocabulary_size=vocabulary)
        best["encode"] = min(best["encode"], middle - start)
        best["decode"] = min(best["decode"], time.process_time() - middle)
    count = sum(len(tokens) for tokens, _ in made)
    return {f"{name}_per_s": round(count / seconds) for name, seconds in best.items()}


def _loss(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """The sum of the rows' losses, those with equally many entries together."""
    kept = (targets["ids"] >= 0).sum(1)
    losses = []
    for k in np.unique(kept):
        rows = torch.from_numpy((kept == k).nonzero()[0])
        present = {name: torch.from_numpy(array)[rows] for name, array in targets.items()}
        present |= {name: present[name][:, :k] for name in ("ids", "logprobs")}
        losses.append(kd_loss(logits[rows], TopKLogprobs.from_tensors(present, 1.0), reduction="sum").loss)
    return torch.stack(losses).sum()


def loss_errors(family: Family, made: Sequence[Piece], rows: int, **options: Any) -> dict[str, float]:
    """A student's forward KL (`kd_loss`, with the rest as one more outcome) from stored targets against exact ones.

    Returns:
        kl: per token, from exact targets.
        loss_error: of the mean, relative.
        cosine: of the gradients with respect to the student's logits.
    """
    sums = torch.zeros(5, dtype=torch.float64)
    count = 0
    for tokens, targets in (part for piece in made for part in divided(piece, 64)):
        if count >= rows:
            break
        block = encode(tokens, targets, vocabulary_size=family.vocabulary, **options)
        stored = decode(tokens, block, vocabulary_size=family.vocabulary)
        logits = language_models.log_probabilities(family.student, tokens)
        values, gradients = [], []
        for each in (targets, stored):
            leaf = logits.clone().requires_grad_()
            loss = _loss(leaf, each)
            loss.backward()
            assert leaf.grad is not None
            values.append(loss.detach().double())
            gradients.append(leaf.grad.flatten())
        a, b = gradients
        sums += torch.stack([*values, *((x * y).sum().double() for x, y in ((a, b), (a, a), (b, b)))])
        count += len(tokens)
    exact, near, product, square_a, square_b = sums.tolist()
    return {
        "kl": exact / count,
        "loss_error": abs(near / exact - 1),
        "cosine": product / (square_a * square_b) ** 0.5,
    }


def measure(
    _: Path,
    *,
    data: str = "",
    models: str = ".cache/bench/language_models",
    tokenizers: tuple[str, ...] = ("qwen3", "mistral-tekken", "cl100k_base"),
    texts: tuple[str, ...] = ("corpus/en/*.txt", "evals/gsm8k/train.jsonl"),
    k: tuple[int, ...] = (32, 64, 128),
    tokens: int = 6000,
    block: int = 1024,
    mass: float = 0.98,
    loss_rows: int = 256,
    cpu_seconds: float = 40.0,
) -> dict[str, Any]:
    """Trains the models that are missing, and measures every tokenizer at every k.

    Args:
        data: a folder with tokenizers/NAME/tokenizer.json and texts.
        models: where trained models are kept.
        tokenizers: names of the tokenizers.
        texts: patterns of .txt and .jsonl files below the data.
        k: entries per token.
        tokens: held-out tokens whose targets are encoded.
        block: most tokens of a block.
        mass: of the lists with an adaptive k.
        loss_rows: tokens whose loss is compared.
        cpu_seconds: training time of a model.
    """
    if not data:
        raise harness.Refused("needs --data FOLDER, with tokenizers/NAME/tokenizer.json and texts")
    read = language_models.read_texts(Path(data), texts)
    recipe = replace(Recipe(), cpu_seconds=cpu_seconds)
    figures: dict[str, Any] = {"models": {}, "compact": [], "blocks": []}
    for name in tokenizers:
        family = language_models.load(Path(data, "tokenizers", name), name, read, Path(models), recipe)
        figures["models"][name] = family.facts
        wide = pieces(family, tokens, max(k), block)
        for width in k:
            made = [(given, first_k(targets, width)) for given, targets in wide]
            figures["compact"].append(_figures(family, made, width, loss_rows))
            if width == AT_K:
                figures["compact"].append(_figures(family, made, width, loss_rows, mass=mass))
                figures["blocks"] += [_by_length(family, made, longest) for longest in (64, 256, block)]
    return figures


def _figures(family: Family, made: Sequence[Piece], k: int, loss_rows: int, **options: Any) -> dict[str, Any]:
    """The figures of a tokenizer at one k; `options` are those of `encode`."""
    total = size_of(made, family.vocabulary, dict, **options) + TOKEN_BYTES
    record: dict[str, Any] = {"tokenizer": family.name, "k": k, "mass": options.get("mass"), "bytes": total}
    if not options:
        record["bound"] = bound_bytes(made)
        record["ratio"] = total / record["bound"]
        record["raw"] = 8 * k + 8 + TOKEN_BYTES
        record["of_which"] = shares_of(made, family.vocabulary)
        record |= speeds(made, family.vocabulary)
    else:
        record["entries"] = _entries(family, made, **options)
    return record | loss_errors(family, made, loss_rows, **options)


def _entries(family: Family, made: Sequence[Piece], **options: Any) -> float:
    """The mean number of entries that a token keeps."""
    blocks = [(tokens, encode(tokens, each, vocabulary_size=family.vocabulary, **options)) for tokens, each in made]
    kept = [decode(tokens, block, vocabulary_size=family.vocabulary)["ids"] >= 0 for tokens, block in blocks]
    return float(np.concatenate(kept).sum(1).mean())


def _by_length(family: Family, made: Sequence[Piece], longest: int) -> dict[str, Any]:
    """Bytes per token if blocks have at most `longest` tokens."""
    parts = [part for piece in made for part in divided(piece, longest)]
    return {
        "tokenizer": family.name,
        "longest": longest,
        "mean_tokens": sum(len(tokens) for tokens, _ in parts) / len(parts),
        "bytes": size_of(parts, family.vocabulary, dict) + TOKEN_BYTES,
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """The missed targets."""
    problems = []
    for row in figures["compact"]:
        name = f"{row['tokenizer']}, k={row['k']}" + (f", mass={row['mass']}" if row["mass"] else "")
        problems += harness.missed(
            (row["loss_error"] > MOST_ERROR, f"missed: {name}: a loss error of {row['loss_error']:.2%}"),
            (row["cosine"] < LEAST_COSINE, f"missed: {name}: a gradient cosine of {row['cosine']:.5f}"),
        )
        if row["k"] == AT_K and not row["mass"]:
            most = max(MOST_BYTES, MOST_RATIO * row["bound"])
            problems += harness.missed(
                (row["bytes"] > most, f"missed: {name}: {row['bytes']:.1f} bytes per token, the target is {most:.1f}"),
                (
                    row["decode_per_s"] < LEAST_DECODED_PER_S,
                    f"missed: {name}: {row['decode_per_s']} tokens/s decoded, the target is {LEAST_DECODED_PER_S}",
                ),
            )
    return problems


COLUMNS = (
    "tokenizer", "k", "mass", "entries", "bytes", "bound", "ratio", "raw", "of_which", "encode_per_s", "decode_per_s",
    "kl", "loss_error", "cosine", "longest", "mean_tokens",
    "vocabulary", "ids_in_the_training_text", "parameters", "steps", "loss",
)  # fmt: skip
main = harness.program("store", measure, verdict, columns=COLUMNS)

if __name__ == "__main__":
    sys.exit(main())
