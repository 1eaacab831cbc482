"""What prefetching saves: how long a step waits for alignment at prefetch.depth 0 and 1.

Trains two tokenizers and writes two random models to a temporary folder, with documents of random words, numbers and
punctuation. Like web pages, the documents are several times longer than `data.max_length`: a whole document is tokenised
and aligned on both sides, but only its beginning is trained on. The real command line trains on them once per depth, and
the waits are read from the metrics of the runs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from distill_rl.bench import harness
from distill_rl.bench.material import train_tokenizer, write_llama, write_texts

DEPTHS = (0, 1)
LEAST_AT_0, MOST_AT_1 = 0.20, 0.02
"""Smallest share of a step spent waiting for alignment at depth 0, and largest share at depth 1."""
WARM_UP = 5
"""First steps, which are not counted: processes start and caches fill."""
CONFIG = """\
run: {{name: depth-{depth}, dir: {root}/runs}}
student: {{model: {root}/student, dtype: fp32}}
teachers: [{{name: teacher, model: {root}/teacher, dtype: fp32}}]
data: {{path: {root}/text.jsonl, max_length: {length}}}
loss: {{top_k: 16}}
optimizer: {{lr: 1.0e-3}}
train: {{steps: {steps}, global_batch_size: {batch}, micro_batch_size: {batch}}}
aligner: {{workers: 1}}
prefetch: {{depth: {depth}}}
observe: {{tensorboard: false}}
"""


def write_material(root: Path, *, rows: int, words_per_row: int, length: int) -> None:
    """Write student/, teacher/ and text.jsonl."""
    texts = write_texts(root / "text.jsonl", rows=rows, words_per_row=words_per_row)
    for name, size, end in (("student", 2000, "</s>"), ("teacher", 1000, "<|end|>")):
        tokenizer = train_tokenizer(texts[:64], size, end)
        write_llama(root / name, tokenizer, hidden=64, intermediate=128, layers=2, positions=length)
        tokenizer.save_pretrained(root / name)


def run(root: Path, depth: int, **sizes: int) -> dict[str, Any]:
    """Train at one depth; return medians over the steps after the warm-up, in seconds and as shares of a step."""
    config = root / f"depth-{depth}.yaml"
    config.write_text(CONFIG.format(root=root, depth=depth, **sizes), "utf-8")
    harness.train(config, environment=harness.ONE_THREAD)
    return waits(root / "runs" / f"depth-{depth}" / "metrics.jsonl")


def waits(metrics: Path) -> dict[str, Any]:
    """How long a run waited for alignment, from its metrics.jsonl."""
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


def compare(folder: Path, **sizes: int) -> dict[str, Any]:
    """Run both depths on the same material; the losses must be equal bit for bit."""
    found = {depth: run(folder, depth, **sizes) for depth in DEPTHS}
    losses = [found[depth].pop("losses") for depth in DEPTHS]
    return {"depths": {str(depth): found[depth] for depth in DEPTHS}, "same_losses": losses[0] == losses[1]}


def verdict(figures: dict[str, Any]) -> list[str]:
    """Missed targets, one line each."""
    at = {depth: figures["depths"][str(depth)]["wait_aligner_share_median"] for depth in DEPTHS}
    problems = []
    if at[0] < LEAST_AT_0:
        problems.append(
            f"depth 0 waits {at[0]:.1%} of a step for alignment; must be at least {LEAST_AT_0:.0%} to show a difference"
        )
    if at[1] >= MOST_AT_1:
        problems.append(f"depth 1 waits {at[1]:.1%} of a step for alignment; must be below {MOST_AT_1:.0%}")
    if not figures["same_losses"]:
        problems.append("the losses of the two depths differ")
    return problems


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps per run; default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="documents per step; default: %(default)s")
    parser.add_argument("--length", type=int, default=128, help="tokens trained on per document; default: %(default)s")
    parser.add_argument("--words", type=int, default=1500, help="words per document; default: %(default)s")
    options = parser.parse_args()
    sizes = {"steps": options.steps, "batch": options.batch, "length": options.length}
    with tempfile.TemporaryDirectory() as folder:
        write_material(Path(folder), rows=4 * options.batch, words_per_row=options.words, length=options.length)
        figures = compare(Path(folder), **sizes) | {"workload": sizes | {"words_per_document": options.words}}
    print(f"\n{'depth':>5}{'step':>9}{'waits for alignment':>22}{'share':>8}{'align':>9}")
    for depth in DEPTHS:
        one = figures["depths"][str(depth)]
        seconds = one["seconds_median"]
        print(
            f"{depth:>5}{seconds['step']:>8.3f}s{seconds['wait_aligner']:>21.4f}s"
            f"{one['wait_aligner_share_median']:>8.1%}{seconds['aligner/align']:>8.3f}s"
        )
    return harness.finish("prefetch", figures, options.out, verdict(figures))


if __name__ == "__main__":
    sys.exit(main())
