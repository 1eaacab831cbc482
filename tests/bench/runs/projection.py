"""What a trainable projection W changes in the cross-tokenizer quickstart: `xtoken` with W fixed and with W trained.

Both use the same material, steps, data and order, and are compared by the KD on the validation chats at the end. A
trained W can also lower the KD by changing which tokens correspond, so exact match is reported as well.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.bench import harness
from tests.bench.runs.quickstart_cross import SEEDS, train
from distill_rl.observe.sinks.sinks import read_records
from distill_rl.demo.material import make_material
from distill_rl.demo.recipe import CROSS


def measure_seed(seed: int, root: Path, *, learnable: bool) -> dict[str, Any]:
    """Trains a student on the material of a seed; returns its KD on the validation chats by step, and exact match.

    Args:
        seed: of material and run.
        root: folder of the material, made where it is missing, and of the runs.
        learnable: train W; otherwise it is fixed.
    """
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


def measure(folder: Path, *, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """Trains both ways with each seed below `folder`; returns `measure_seed` of each, as `fixed` and `learnt`."""
    rows = []
    for seed in seeds:
        root = folder / str(seed)
        ways = {name: measure_seed(seed, root, learnable=name == "learnt") for name in ("fixed", "learnt")}
        rows.append({"seed": seed, **ways})
    return {"seeds": rows}


main = harness.program("projection", measure)

if __name__ == "__main__":
    sys.exit(main())
