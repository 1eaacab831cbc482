"""What a trainable projection W changes in the cross-tokenizer quickstart: `xtoken` with W fixed and with W trained.

Both use the same material, steps, data and order, and are compared by the KD on the validation chats at the end. A
trained W can also lower the KD by changing which tokens correspond, so exact match is reported as well.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from distill_rl.bench import harness
from distill_rl.bench.quickstart_cross import train
from distill_rl.observe.sinks.sinks import read_records


def measure(seed: int, root: Path, *, learnable: bool) -> dict[str, Any]:
    """Run once; return the validation KD by step, and exact match."""
    from distill_rl.quickstart.material import make_material
    from distill_rl.quickstart.recipe import CROSS

    name = "learnt" if learnable else "fixed"
    material, runs = make_material(root / "material", seed, CROSS), root / "runs"
    learns = f"projection.learnable={str(learnable).lower()}"
    score = train(name, material.root, seed, runs, "teachers.0.export=logits", "loss.cross_tokenizer=xtoken", learns)
    records = read_records(runs / name / "metrics.jsonl")
    return {
        "validation_kl": {
            str(row["step"]): row["validation/kl_loss"] for row in records if "validation/kl_loss" in row
        },
        "exact_match": score["score"],
        "interval": score["interval"],
    }


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    options = parser.parse_args()
    seeds: list[dict[str, Any]] = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            ways = {name: measure(seed, Path(folder), learnable=name == "learnt") for name in ("fixed", "learnt")}
        seeds.append({"seed": seed, **ways})
    print(f"\n{'seed':>4}{'W':>8}{'validation KD':>16}{'exact match':>14}")
    for one in seeds:
        for name in ("fixed", "learnt"):
            last = list(one[name]["validation_kl"].values())[-1]
            print(f"{one['seed']:>4}{name:>8}{last:>16.4f}{one[name]['exact_match']:>14.3f}")
    return harness.finish("projection", {"seeds": seeds}, options.out)


if __name__ == "__main__":
    sys.exit(main())
