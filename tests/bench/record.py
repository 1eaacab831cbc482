"""The machine, package versions and commit, which every benchmark writes beside its figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distill_rl.system.environment import ROOT, commit, cpu_name, memory_gib, package_version
from distill_rl.system.files import write_json


def environment() -> dict[str, Any]:
    """Hardware, load, date, package versions and commit; with `gpu` and `cuda` where torch finds a GPU."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": memory_gib(),
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
