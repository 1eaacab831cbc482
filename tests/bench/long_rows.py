"""Memory of a student's rank whose rows are divided over ranks (`student.parallel.sp`), on CPUs.

Writes a random Llama with small tables to a temporary folder, so that activations dominate. Each case trains on one row per
micro-batch, in a process per rank, first on short rows and then on long ones. The higher peak is compared with the estimate of
`config/memory/`; its difference from the lower one is what the positions take.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.bench import harness
from tests.bench.memory import SHAPE, TOLERANCE, Case, configuration, estimate, peaks, write_model

SP = (1, 2, 4)
LENGTH, SHORT = 4096, 64
"""Positions of a row."""
MOST = 1.3
"""What the positions may take on a rank of sp, times sp, as a share of what they take on one."""
SMALL_TABLES = SHAPE | {
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "max_position_embeddings": LENGTH,
}
"""8.4M parameters."""
MIB = 2**20


def compare(folder: Path) -> dict[str, Any]:
    """Runs all cases on one model and prints a line for each; returns estimates, peaks and their parts in MiB."""
    facts = write_model(folder, SMALL_TABLES)
    cases = []
    for sp in SP:
        case = Case(f"sp {sp}", "student", sp=sp, rows=1, length=LENGTH, first_length=SHORT)
        expected = estimate(case, configuration(case, folder), facts).total
        short, peak = peaks(case, folder)
        row = {"sp": sp, "estimate": expected, "measured": peak, "short_rows": short, "positions": peak - short}
        cases.append({name: value if name == "sp" else round(value / MIB) for name, value in row.items()})
        print(cases[-1], flush=True)
    return {"parameters": facts.parameters, "length": LENGTH, "short": SHORT, "tolerance": TOLERANCE, "mib": cases}


def verdict(figures: dict[str, Any]) -> list[str]:
    """The missed targets: estimates that are too far off, and positions that take more than their share."""
    whole = figures["mib"][0]["positions"]
    far = [case for case in figures["mib"] if abs(case["estimate"] / case["measured"] - 1) > TOLERANCE]
    large = [case for case in figures["mib"] if case["positions"] * case["sp"] > MOST * whole]
    return [
        *(f"sp {case['sp']}: estimate {case['estimate']} MiB, measured {case['measured']} MiB" for case in far),
        *(f"sp {case['sp']}: the positions take {case['positions']} of {whole} MiB" for case in large),
    ]


main = harness.program("long_rows", compare, verdict)

if __name__ == "__main__":
    sys.exit(main())
