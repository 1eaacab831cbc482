"""The machine, package versions and commit, which every benchmark writes beside its figures."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distill_rl.system.files import write_json

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, Any]:
    """Hardware, load, date, package versions and commit; with `gpu` and `cuda` where torch finds a GPU."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        **commit(),
    }
    facts |= {name: package_version(name) for name in ("torch", "transformers", "ray")}
    import torch

    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def write(name: str, figures: Mapping[str, Any], out: Path | None = None) -> Path:
    """Write figures and environment to `out` (default: docs/benchmarks/NAME.json); return the path."""
    path = out or ROOT / "docs" / "benchmarks" / f"{name}.json"
    write_json(path, {"benchmark": name, "environment": environment(), **figures})
    return path


def peak_bytes() -> int:
    """Peak resident bytes of this process: VmHWM, on Linux only.

    `ru_maxrss` would include what its parent held at the time of the fork.
    """
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def commit() -> dict[str, Any]:
    """`commit`, the hash of HEAD, and `dirty`: whether tracked files outside docs/benchmarks differ from it.

    Outside a git clone they are empty and False.
    """
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/benchmarks")),
    }


def cpu_name() -> str:
    """The processor's name as Linux reports it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def package_version(name: str) -> str:
    """The version of an installed package, or `not installed`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str:
    """The output of a git command in the repository; empty if git is missing or fails."""
    try:
        result = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    except OSError:  # git is not installed
        return ""
    return result.stdout.strip()
