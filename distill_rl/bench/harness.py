"""What benchmarks share: their options, runs of the real command line, and the end of a program."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from distill_rl.bench import record

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Sizes = Mapping[str, Mapping[str, int]]
"""Default sizes by device (cuda, cpu) and name."""
OFFLINE = {"HF_HUB_OFFLINE": "1"}
ONE_THREAD = OFFLINE | {"OMP_NUM_THREADS": "1"}


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all benchmarks have; the description is the first line of what is passed."""
    parser = argparse.ArgumentParser(description=str(description).partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="JSON", help="default: docs/benchmarks/<name>.json")
    return parser


def device_parser(description: str | None, sizes: Sizes) -> argparse.ArgumentParser:
    """A parser with `--device`, and an option for every size, whose default depends on the device."""
    device_parser = parser(description)
    device_parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, to see that it works"
    )
    for name, large in sizes["cuda"].items():
        text = f"default: {large}; {sizes['cpu'][name]} on a CPU"
        device_parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    return device_parser


def chosen_sizes(options: argparse.Namespace, sizes: Sizes) -> dict[str, int]:
    return {name: getattr(options, name) or default for name, default in sizes[options.device].items()}


def lacks_device(name: str, device: str) -> bool:
    """Whether the CUDA device that a benchmark needs is missing; prints an error if so."""
    import torch

    missing = device == "cuda" and not torch.cuda.is_available()
    if missing:
        print(f"{name}: error: no CUDA device; --device cpu runs its small twin", file=sys.stderr)
    return missing


def finish(
    name: str, figures: Mapping[str, Any], out: Path | None, problems: Iterable[str] = (), *, device: str = ""
) -> int:
    """Write the figures and print the problems; return the exit code, 1 if there are any problems.

    Args:
        out: the file; None: docs/benchmarks/NAME.json.
        device: where a GPU benchmark ran, `cuda` or `cpu`; its figures of a CPU are written only if `out` is given.
            Empty for any other benchmark.
    """
    if device == "cpu" and out is None:
        print("not written: figures of a CPU are no record; --out keeps them")
    else:
        print(f"written: {record.write(name, figures, out)}")
    lines = list(problems)
    for line in lines:
        print(line)
    return int(bool(lines))


def run_on_device(
    name: str,
    description: str | None,
    sizes: Sizes,
    *,
    repeats: int,
    compare: Callable[[Sequence[int], str, int], Sequence[Any]],
    show: Callable[[Sequence[Any], str], None],
    settings: Mapping[str, Any],
    argv: Sequence[str] | None,
) -> int:
    """The program of a benchmark that compares cases on one device.

    Args:
        repeats: default of `--repeats`.
        compare: sizes, device and repeats → figures, as dataclasses.
        show: prints figures under a title.
        settings: recorded in addition to the sizes, the device, the repeats and the dtype.
    """
    parser = device_parser(description, sizes)
    parser.add_argument("--repeats", type=int, default=repeats, help="timed runs of each case; default: %(default)s")
    options = parser.parse_args(argv)
    device = options.device
    if lacks_device(name, device):
        return 2
    chosen = chosen_sizes(options, sizes)
    figures = compare(list(chosen.values()), device, options.repeats)
    dtype = "bfloat16" if device == "cuda" else "float32"
    recorded = {**chosen, "device": device, "repeats": options.repeats, "dtype": dtype, **settings}
    show(figures, ", ".join(f"{key} {value}" for key, value in recorded.items()))
    results = [asdict(line) for line in figures]
    return finish(name, {"settings": recorded, "results": results}, options.out, device=device)


def best_times(
    runs: Mapping[Name, Callable[[], Result]], rounds: int, *, warm_up: bool
) -> tuple[dict[Name, float], dict[Name, Result]]:
    """The best time of each run in seconds, and its last result. They take turns, so that a slow moment hits all.

    With `warm_up`, the first of `rounds` + 1 rounds is not counted.
    """
    best, results = dict.fromkeys(runs, float("inf")), {}
    for i in range(rounds + warm_up):
        for name, run in runs.items():
            start = time.perf_counter()
            results[name] = run()
            seconds = time.perf_counter() - start
            if i >= warm_up:
                best[name] = min(best[name], seconds)
    return best, results


def train(config: Path, *overrides: str, environment: Mapping[str, str], quiet: bool = False) -> None:
    """Train with the real command line; raise SystemExit if it fails. With `quiet`, its output is shown only then."""
    command = [sys.executable, "-m", "distill_rl", "train", "-c", str(config), *overrides]
    done = subprocess.run(command, env=os.environ | environment, capture_output=quiet, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout or ''}{done.stderr or ''}the run of {config.name} failed")


def step_records(metrics: Path) -> list[dict[str, Any]]:
    """The records of training steps in a metrics.jsonl, which may still be missing or end in half a line."""
    lines = metrics.read_text("utf-8").splitlines(keepends=True) if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [step for step in records if "train/loss" in step]
