"""What a trainable projection W changes in the cross-tokenizer quickstart: `xtoken` with W fixed and with W trained.

Both use the same material, steps, data and order, and are compared by the KD on the validation chats at the end. A
trained W can also lower the KD by changing which tokens correspond, so exact match is reported as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from distill_rl.bench import record
from distill_rl.observe.sinks.sinks import read_records

CONFIG = record.ROOT / "configs" / "quickstart-cross.yaml"


def measure(seed: int, root: Path, *, learnable: bool) -> dict[str, Any]:
    """Run once; return the validation KD by step, and exact match."""
    from distill_rl.quickstart.material import make_material
    from distill_rl.quickstart.recipe import CROSS

    made, name = make_material(root / "material", seed, CROSS), "learnt" if learnable else "fixed"
    settings = {
        "run.name": name,
        "run.dir": root / "runs",
        "run.seed": seed,
        "student.model": made.student,
        "teachers.0.model": made.teacher,
        "teachers.0.export": "logits",
        "data.path": made.train,
        "data.validation.path": made.validation,
        "evaluate.data": made.test,
        "loss.cross_tokenizer": "xtoken",
        "projection.learnable": str(learnable).lower(),
    }
    overrides = (f"{key}={value}" for key, value in settings.items())
    subprocess.run([sys.executable, "-m", "distill_rl", "train", "-c", str(CONFIG), *overrides], check=True)
    run = root / "runs" / name
    found = [each for each in read_records(run / "metrics.jsonl") if "validation/kl_loss" in each]
    score = json.loads((run / "evals" / "student" / "exact_match.json").read_text())
    return {
        "validation_kl": {str(each["step"]): each["validation/kl_loss"] for each in found},
        "exact_match": score["score"],
        "interval": score["interval"],
    }


def main() -> int:
    parser = record.parser(__doc__.splitlines()[0])
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
    print(f"written   {record.write('projection', {'seeds': seeds}, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
