"""The duration and peak memory of the quickstart, starting with empty caches, and the response time of --help.

Memory is the largest sum of PSS over the process tree, sampled twice a second; PSS counts shared pages once.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from distill_rl.bench import harness

_SAMPLE_S = 0.5
_HELP_RUNS = 11


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    help_s = [_seconds("-m", "distill_rl", "--help") for _ in range(_HELP_RUNS)]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        peak = _peak_pss("-m", "distill_rl.quickstart", "--runs", f"{folder}/runs", "--material", f"{folder}/material")
        seconds = time.perf_counter() - start
        summary = json.loads(Path(folder, "runs", "quickstart", "summary.json").read_text())
    scores = {name: summary[name] for name in ("teacher", "student_before", "student_after", "ce_only")}
    figures = {
        "help_seconds_median": round(statistics.median(help_s), 3),
        "seconds": round(seconds, 1),
        "peak_pss_gib": round(peak / 2**30, 2),
        "tokens_per_second": summary["tokens_per_second"],
        "exact_match": scores,
        "seed": summary["seed"],
    }
    print(json.dumps(figures, indent=2))
    return harness.finish("quickstart", figures, options.out)


def _seconds(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def _peak_pss(*arguments: str) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
