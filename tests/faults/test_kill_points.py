"""R3: `kill -9` of a whole run at twenty moments, each followed by `--resume auto`, leaves the student unchanged."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.conftest import assert_same_student
from tests.helpers.command import (
    distill_rl,
    leftovers,
    running,
    series,
    shared_memory,
    survivors,
    temporary,
    told,
    until,
)

pytestmark = pytest.mark.cli

STEPS, EPOCH, KILLS = 100, 9, 20
SETTINGS = (f"train.steps={STEPS}", f"schedule.steps={STEPS}", "checkpoint.keep_best=1", "evaluate.every=18")
DEADLINE_S = 240


@dataclass(frozen=True)
class Moment:
    """When to kill a run: `after_s` seconds after its start, a step, the begin of a save, or the end of an epoch.

    The kill comes at most three steps later, so that a fast machine does not reach the end of the run.
    """

    what: str
    after_s: float


def moments(seed: int, start_s: float) -> list[Moment]:
    """Moments over the whole life of a run, most of them while something is being written."""
    draw = random.Random(seed)
    kinds = ["start"] * 6 + ["step"] * 5 + ["save"] * (KILLS - 12)
    draw.shuffle(kinds)
    longest_s = {"start": start_s, "step": 0.5, "save": 0.1}
    return [Moment("epoch", 0.0), *(Moment(kind, draw.uniform(0, longest_s[kind])) for kind in kinds)]


def step_folders(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob("step-*")}


def drafts(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob(".tmp-step-*")}


def shards(run: Path) -> dict[str, str]:
    """sha256 of the weights and the optimizer state of the last step."""
    manifest = json.loads((run / "checkpoints" / f"step-{STEPS}" / "MANIFEST.json").read_text())
    return {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".distcp")}


def live_until(moment: Moment, arguments: list, run: Path, log: Path) -> int:
    """Starts the run, kills all of it at the given moment, and returns the driver's process id."""
    steps, writing, whole = len(series(run, "train/loss")), drafts(run), step_folders(run)
    reached = {
        "start": lambda: True,
        "step": lambda: len(series(run, "train/loss")) > steps,
        "save": lambda: drafts(run) - writing,
        "epoch": lambda: f"step-{EPOCH}" in step_folders(run),
    }[moment.what]
    with running(*arguments, log=log) as process:
        until(lambda: reached() or process.poll() is not None, moment.what, DEADLINE_S)
        deadline, family = time.monotonic() + moment.after_s, {}
        while time.monotonic() < deadline and process.poll() is None and len(series(run, "train/loss")) <= steps + 3:
            family |= leftovers(process.pid)
        assert process.poll() is None, log.read_text()
        family |= leftovers(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    alive = survivors(family.values(), deadline_s=20)
    assert not alive, told(alive)
    resumed = re.search(r"^resuming  from .*/(step-\d+)$", log.read_text(), re.MULTILINE)
    assert resumed is None or resumed[1] in whole, "only a committed checkpoint may be resumed"
    assert "damaged" not in log.read_text()
    return process.pid


def test_twenty_kills_at_any_moment_lose_nothing(material, undisturbed, tmp_path):
    before, began = shared_memory(), time.monotonic()
    expected = undisturbed(*SETTINGS, "checkpoint.every=1")
    start_s = 0.5 * (time.monotonic() - began)
    config, run = material.config(tmp_path), tmp_path / "runs" / "tiny"
    command, drivers = ["train", "-c", config, *SETTINGS, "--resume", "auto"], []
    for i, moment in enumerate(moments(11, start_s)):
        every = EPOCH if moment.what == "epoch" else 1 + i % 2
        settings = [f"checkpoint.every={every}", f"prefetch.depth={i % 3}"]
        drivers.append(live_until(moment, [*command, *settings], run, tmp_path / f"log-{i}"))
    assert len(drivers) == KILLS
    ended = distill_rl(*command, "checkpoint.every=1")
    assert ended.code == 0, ended.err
    assert_same_student(run, expected)
    assert shards(run) == shards(expected)
    assert not [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-")]
    assert not [left for pid in drivers for left in temporary(pid)]
    until(lambda: shared_memory() <= before, "shared memory given back")
