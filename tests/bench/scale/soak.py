"""What a long run holds: whether the memory of driver, head and workers still grows in its second half.

Two runs: one of ranks that compute nothing, for its number of steps, and one of the command line with tiny models. In the first half caches fill: Ray's
record of calls, allocators, the aligners' tokenizers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from distill_rl.system.processes import call_in_child
from tests.bench import harness
from tests.bench.material import write_config, write_pair
from tests.bench.scale import scale
from tests.bench.scale.watch import ROLES, Watch, watching

STEPS = 20_000
"""Of ranks that compute nothing."""
REAL_STEPS = 16_000
"""Of tiny models. Ray's bounded records of calls fill up within the first half."""
MOST_GROWTH = 0.01
"""Share by which the memory of a role may grow in the second half."""
_DEADLINE_S = 7200.0


def measure(folder: Path, *, steps: int = STEPS, real_steps: int = REAL_STEPS, every: float = 1.0) -> dict[str, Any]:
    """Runs both.

    Args:
        steps: of the ranks that compute nothing.
        real_steps: of the run with models.
        every: seconds from one look at the processes to the next.
    """
    return {
        "runs": {
            "stubs": _stubs(folder / "stubs", steps, every),
            "models": _models(folder / "models", real_steps, every),
        }
    }


def _stubs(folder: Path, steps: int, every: float) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    scale.write_material(folder, rows=4096)
    config = scale.configuration(folder, scale.Case(4, steps=steps))
    with watching(every) as watch:
        call_in_child(config.stem, scale.drive, config, 1, deadline_s=_DEADLINE_S)
    return _growth(watch, folder / "runs" / config.stem, steps)


def _models(folder: Path, steps: int, every: float) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    write_pair(folder, rows=64, words_per_row=60, length=64)
    config = write_config(
        folder, "models", steps=steps, batch=4, micro_batch=4, length=64, checkpoint={"every": steps // 20}
    )
    with watching(every) as watch:
        ended = subprocess.run(harness.train_command(config), capture_output=True, timeout=_DEADLINE_S, check=False)
    if ended.returncode:
        raise SystemExit(f"exit code {ended.returncode}; {harness.failure(folder / 'runs' / 'models')}")
    return _growth(watch, folder / "runs" / "models", steps)


def _growth(watch: Watch, run: Path, steps: int) -> dict[str, Any]:
    """MiB of every role in the last tenth of a run, the share by which it grew over the second half, and the bytes of metrics.jsonl."""
    by_time = scale.steps_by_time(harness.step_records(run / "metrics.jsonl"))
    slopes = watch.per_step(by_time, first=steps // 2)
    figures: dict[str, Any] = {"steps": steps, "metrics_mib": round((run / "metrics.jsonl").stat().st_size / 2**20, 1)}
    for role in ROLES:
        held = fmean(watch.resident[role][-len(watch.times) // 10 :])
        if (slope := slopes[f"{role}_resident_kib_per_step"]) is None:
            raise SystemExit(f"{run}: too short to tell how the memory of the {role} grows; ask for more steps")
        figures[role] = {"mib": round(held, 1), "growth": round(slope * steps / 2 / 1024 / held, 4)}
    return figures


def verdict(figures: Mapping[str, Any]) -> list[str]:
    """Missed targets, one line each."""
    return harness.missed(
        *(
            (
                run[role]["growth"] > MOST_GROWTH,
                f"{name}: the memory of the {role} grows by {run[role]['growth']:.1%} in the second half; must be at most {MOST_GROWTH:.0%}",
            )
            for name, run in figures["runs"].items()
            for role in ROLES
        )
    )


main = harness.program("soak", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
