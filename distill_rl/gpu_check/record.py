"""The output files gpu_check.json and gpu_check.txt, which are rewritten after every part."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distill_rl.gpu_check.page import render
from distill_rl.gpu_check.parts import Part
from distill_rl.gpu_check.process import FAILED, NOT_RUN, TIMED_OUT, Outcome
from distill_rl.system.files import write_atomic

FORMAT = 1
JSON, TEXT, LOG = "gpu_check.json", "gpu_check.txt", "gpu_check.log"


@dataclass
class Record:
    """The results so far."""

    out: Path
    call: Mapping[str, Any]
    """The command-line options."""
    parts: Sequence[Part]
    machine: Mapping[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By part; only parts that are done."""
    state: str = "running"
    """`running`, `done`, or `stopped by` a signal."""
    seconds: float = 0.0
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def failures(self) -> list[str]:
        """Parts that failed, timed out or were not run."""
        return [name for name, outcome in self.outcomes.items() if outcome.status in (FAILED, TIMED_OUT, NOT_RUN)]

    def as_json(self) -> dict[str, Any]:
        """The content of gpu_check.json.

        `parts` has one entry per part, in order: name, title, status (`waiting` if it has not run yet), reason, seconds,
        figures, and peak_gib on a GPU.
        """
        done = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        parts = [{"name": p.name, "title": p.title, **done.get(p.name, {"status": "waiting"})} for p in self.parts]
        return {
            "format": FORMAT,
            "state": self.state,
            "started": self.started,
            "seconds": round(self.seconds, 1),
            "call": dict(self.call),
            "machine": dict(self.machine),
            "failures": self.failures,
            "parts": parts,
        }

    def write(self) -> None:
        """Write both files. Raises OSError if the folder cannot be created or written to."""
        content = self.as_json()
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(self.out / JSON, json.dumps(content, indent=2, allow_nan=False) + "\n")
        write_atomic(self.out / TEXT, render(content))
