"""What the quickstart across tokenizers reaches on several seeds: `hybrid`, 1:1 chunks alone, and no teacher at all.

For each seed the quickstart runs with `--cross`; its material then trains the same student once more by `hybrid`, but with a
temperature of the chunk likelihoods at which all of them are 1: chunks of several tokens then teach nothing. Steps, data
and order are the same for all three.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from distill_rl.bench import record

SEEDS = (0, 1, 2)
ONLY_ONE_TO_ONE = "loss.alm_tau=1e9"
CONFIG = record.ROOT / "configs" / "quickstart-cross.yaml"
COLUMNS = {"hybrid": "student_after", "one_to_one_only": "one_to_one_only", "control": "ce_only", "teacher": "teacher"}
"""heading → name in the figures"""


def measure(seed: int, root: Path) -> dict[str, Any]:
    """The quickstart's summary of one seed, with exact match and interval of the third student beside the others."""
    runs, material = root / "runs", root / "material"
    _run("distill_rl.quickstart", "--cross", "--seed", str(seed), "--runs", str(runs), "--material", str(material))
    summary = json.loads((runs / "quickstart-cross" / "summary.json").read_text())
    made = material / f"cross-seed-{seed}"
    settings = {
        "run.name": "one-to-one-only",
        "run.dir": runs,
        "run.seed": seed,
        "student.model": made / "student",
        "teachers.0.model": made / "teacher",
        "data.path": made / "train.jsonl",
        "data.validation.path": made / "validation.jsonl",
        "evaluate.data": made / "test.jsonl",
    }
    _run(
        "distill_rl",
        "train",
        "-c",
        str(CONFIG),
        *(f"{key}={value}" for key, value in settings.items()),
        ONLY_ONE_TO_ONE,
    )
    scored = json.loads((runs / "one-to-one-only" / "evals" / "student" / "exact_match.json").read_text())
    summary["one_to_one_only"] = scored["score"]
    summary["intervals"]["one_to_one_only"] = scored["interval"]
    return {key: value for key, value in summary.items() if key != "tasks"}


def _run(*command: str) -> None:
    subprocess.run([sys.executable, "-m", *command], check=True)


def main() -> int:
    options = record.parser(__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seeds = [measure(seed, Path(folder, str(seed))) for seed in SEEDS]
    print(f"\n{'seed':>4}" + "".join(f"{heading:>26}" for heading in COLUMNS))
    for one in seeds:
        cells = ((one[name], *one["intervals"][name]) for name in COLUMNS.values())
        print(
            f"{one['seed']:>4}" + "".join(f"{f'{score:.3f} [{low:.3f}, {high:.3f}]':>26}" for score, low, high in cells)
        )
    print(f"written   {record.write('quickstart_cross', {'seeds': seeds}, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
