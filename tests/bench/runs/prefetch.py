"""What prefetching and more aligners save: how long a step waits for alignment.

At prefetch.depth 0 and 1 with one aligner; and with 1, 2 and 4 aligners, which share the work on each batch, at depth 0,
where nothing else hides it. More aligners than free cores save nothing.

Trains two tokenizers and writes two random models to a temporary folder, with documents of random words, numbers and
punctuation. Like web pages, the documents are several times longer than `data.max_length`: a whole document is
tokenised and aligned on both sides, but only its beginning is trained on. The real command line trains on them once per
case, and the waits are read from the metrics of the runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import harness
from tests.bench.material import train_tokenizer, write_config, write_llama, write_texts

DEPTHS = (0, 1)
WORKERS = (1, 2, 4)
LEAST_AT_0, MOST_AT_1 = 0.20, 0.02
"""Smallest share of a step spent waiting for alignment at depth 0, and largest share at depth 1."""
WARM_UP = 5
"""First steps, which are not counted: processes start and caches fill."""
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
"""Of either model."""


def write_material(root: Path, *, rows: int, words_per_row: int, length: int) -> None:
    """Writes student/, teacher/ (a tokenizer of its own and a random model each) and text.jsonl below `root`.

    Args:
        rows: documents.
        length: the most positions of the models.
    """
    texts = write_texts(root / "text.jsonl", rows=rows, words_per_row=words_per_row)
    for name, size, end in (("student", 2000, "</s>"), ("teacher", 1000, "<|end|>")):
        tokenizer = train_tokenizer(texts[:64], size, end)
        write_llama(root / name, tokenizer, **SHAPE, max_position_embeddings=length)
        tokenizer.save_pretrained(root / name)


def configuration(root: Path, depth: int, workers: int = 1, **sizes: Any) -> Path:
    """Writes the configuration of a run with prefetch.depth = `depth` and returns its path.

    Args:
        workers: aligners.
        sizes: `steps`, `batch` and `length`; a micro-batch is the whole batch.
    """
    name = f"depth-{depth}-workers-{workers}"
    return write_config(
        root,
        name,
        micro_batch=sizes["batch"],
        **sizes,
        data={"path": f"{root}/text.jsonl", "max_length": sizes["length"], "long_documents": "cut"},
        prefetch={"depth": depth},
        aligner={"workers": workers},
    )


def run(root: Path, depth: int, workers: int = 1, **sizes: int) -> dict[str, Any]:
    """Trains in one case; returns what `waits` reads from its metrics. Raises SystemExit if the run fails.

    Args:
        depth, workers, sizes: as in `configuration`.
    """
    path = configuration(root, depth, workers, **sizes)
    folder = root / "runs" / path.stem
    harness.train(path, folder, environment=harness.ONE_THREAD)
    return waits(folder / "metrics.jsonl")


def waits(metrics: Path) -> dict[str, Any]:
    """How long the steps of a run after its warm-up waited for alignment, from its metrics.jsonl.

    Returns:
        The share of a step spent waiting (median and largest), the median seconds of a step and its parts, and the
        losses.
    """
    steps = [step for step in harness.step_records(metrics) if step["step"] > WARM_UP]
    shares = [step["timing/wait_aligner"] / step["timing/step"] for step in steps]
    parts = ("step", "wait_aligner", "wait_teachers", "student", "aligner/align")
    return {
        "steps": len(steps),
        "wait_aligner_share_median": round(median(shares), 4),
        "wait_aligner_share_max": round(max(shares), 4),
        "seconds_median": {part: round(median(step[f"timing/{part}"] for step in steps), 4) for part in parts},
        "losses": [step["train/loss"] for step in steps],
    }


def measure(
    folder: Path, *, steps: int = 60, batch: int = 16, length: int = 128, words: int = 1500, long_words: int = 2700
) -> dict[str, Any]:
    """Runs all cases; `same_losses` says whether the losses on the same material are equal bit for bit.

    Args:
        steps: optimizer steps per run.
        batch: documents per step.
        length: tokens trained on per document.
        words: words per document at the two depths.
        long_words: words per document for 1, 2 and 4 aligners; 2700 are about 4,000 tokens.
    """
    sizes = {"steps": steps, "batch": batch, "length": length}
    depths = _compare(folder / "depths", {str(depth): (depth, 1) for depth in DEPTHS}, words, sizes)
    workers = _compare(folder / "workers", {str(count): (0, count) for count in WORKERS}, long_words, sizes)
    losses = [[figures.pop("losses") for figures in cases.values()] for cases in (depths, workers)]
    same_losses = all(run_losses == cases[0] for cases in losses for run_losses in cases)
    workload = sizes | {"words_per_document": words, "words_per_long_document": long_words}
    return {"depths": depths, "workers": workers, "same_losses": same_losses, "workload": workload}


def _compare(
    root: Path, cases: Mapping[str, tuple[int, int]], words: int, sizes: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Runs all cases, each a depth and a number of aligners, on documents of `words` words; returns what `run` does."""
    root.mkdir()
    write_material(root, rows=4 * sizes["batch"], words_per_row=words, length=sizes["length"])
    return {name: run(root, depth, workers, **sizes) for name, (depth, workers) in cases.items()}


def verdict(figures: dict[str, Any]) -> list[str]:
    """Missed targets, one line each."""
    at_0, at_1 = (figures["depths"][str(depth)]["wait_aligner_share_median"] for depth in DEPTHS)
    return harness.missed(
        (
            at_0 < LEAST_AT_0,
            f"depth 0 waits {at_0:.1%} of a step for alignment; must be at least {LEAST_AT_0:.0%} to show a difference",
        ),
        (at_1 >= MOST_AT_1, f"depth 1 waits {at_1:.1%} of a step for alignment; must be below {MOST_AT_1:.0%}"),
        (not figures["same_losses"], "the losses depend on depth or workers"),
    )


main = harness.program("prefetch", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
