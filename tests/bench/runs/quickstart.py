"""The duration and peak memory of the quickstart, starting with empty caches, and the response time of --help.

Memory is the largest sum of PSS over the process tree, sampled twice a second; PSS counts shared pages once.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from distill_rl.demo.quickstart import ROWS
from tests.bench import harness

_SAMPLE_S = 0.5
_HELP_RUNS = 11


def measure(folder: Path) -> dict[str, Any]:
    """Runs `--help` several times, then the quickstart once; returns the times, peak memory, speed and scores."""
    help_s = [_seconds("-m", "distill_rl", "--help") for _ in range(_HELP_RUNS)]
    runs, material = folder / "runs", folder / "material"
    start = time.perf_counter()
    peak = _peak_pss("-m", "distill_rl", "quickstart", "--runs", str(runs), "--material", str(material))
    seconds = time.perf_counter() - start
    summary = json.loads((runs / "quickstart" / "summary.json").read_text())
    return {
        "help_seconds_median": round(statistics.median(help_s), 3),
        "seconds": round(seconds, 1),
        "peak_pss_gib": round(peak / 2**30, 2),
        "tokens_per_second": summary["tokens_per_second"],
        "exact_match": {name: summary[name] for name in ROWS},
        "seed": summary["seed"],
    }


def _seconds(*arguments: str) -> float:
    """The wall-clock time of a Python process with these arguments; its output is discarded.

    Raises:
        subprocess.CalledProcessError: the process fails.
    """
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def _peak_pss(*arguments: str) -> int:
    """Runs Python with these arguments and returns the peak memory in bytes of the process with all its descendants.

    Memory is the proportional set size, sampled at intervals, so memory shared between processes counts once.

    Raises:
        SystemExit: with the process's exit code if it is not 0.
    """
    process = psutil.Popen([sys.executable, *arguments])
    peak = 0
    while process.poll() is None:
        total = 0
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += member.memory_full_info().pss
        peak = max(peak, total)
        time.sleep(_SAMPLE_S)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peak


main = harness.program("quickstart", measure)

if __name__ == "__main__":
    sys.exit(main())
