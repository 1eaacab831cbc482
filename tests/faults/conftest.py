"""Deliberately disturbed runs, and the undisturbed runs that they must equal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.conftest import Material, material
from tests.helpers.command import (
    distill_rl,
    leftovers,
    running,
    series,
    shared_memory,
    survivors,
    temporary,
    until,
)
from tests.helpers.ray_state import actors
from tests.ray.conftest import one_ray

__all__ = ["material"]

STEPS = 120
RESTART_S = 120
"""Deadline of the tests for a restart. The restart times themselves are measured by `launch/bench.sh faults`."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """Ends with its module, because runs that other modules start would inherit its token."""
    with one_ray() as ray:
        yield ray


@dataclass
class Disturbed:
    """A running training, with the process ids of its actors by name."""

    process: psutil.Popen
    run: Path
    log: Path
    actors: dict[str, int]

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def errors(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("distill-rl: error:")]

    @property
    def steps(self) -> int:
        return len(series(self.run, "train/loss"))

    def wait_for_checkpoint(self) -> None:
        saved = self.run / "checkpoints"
        until(lambda: list(saved.glob("step-*")) or self.process.poll() is not None, "a checkpoint", RESTART_S)

    def look_again(self) -> None:
        """Looks up the process ids of the actors again, with the driver stopped meanwhile."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self.actors = actors(self.process.pid)
        os.kill(self.process.pid, signal.SIGCONT)

    def look_again_after(self, steps: int) -> None:
        """`look_again` once the run has got past this number of steps."""
        until(lambda: self.steps > steps or self.process.poll() is not None, f"step {steps + 1}", RESTART_S)
        assert self.process.poll() is None, self.text
        self.look_again()

    def kill_idle(self, name: str) -> None:
        """Kills an actor while all actors are idle: the driver is stopped and hands out no work."""
        os.kill(self.process.pid, signal.SIGSTOP)
        busy = [psutil.Process(pid) for actor, pid in self.actors.items() if "aligner" not in actor]
        until(lambda: not _working(busy), "all actors to be idle")
        os.kill(self.actors[name], signal.SIGKILL)
        os.kill(self.process.pid, signal.SIGCONT)

    def kill_busy(self, name: str) -> None:
        """Kills an actor while it computes."""
        victim = psutil.Process(self.actors[name])
        until(lambda: _working([victim]), f"{name} to be busy")
        victim.kill()

    def wait_for_output(self, word: str) -> None:
        """Waits until the run has printed this text."""
        until(lambda: word in self.text or self.process.poll() is not None, repr(word), RESTART_S)
        assert word in self.text, self.text

    def end(self) -> int:
        return self.process.wait(timeout=2 * RESTART_S)


def _working(processes: list[psutil.Process]) -> bool:
    """Whether any of the processes uses the processor within a tenth of a second."""
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(0.1)
    return any(sum(process.cpu_times()[:2]) > seconds for process, seconds in zip(processes, before))


@pytest.fixture
def disturb(material: Material, tmp_path: Path) -> Callable[..., object]:
    """`with disturb(settings…) as run:` yields a training in its first steps. Afterwards nothing of it may be left."""

    @contextmanager
    def disturbed(*settings: str, folder: Path = tmp_path) -> Iterator[Disturbed]:
        before, log = shared_memory(), folder / "log"
        config = material.config(folder)
        with running("train", "-c", config, *settings, log=log) as process:
            run = folder / "runs" / "tiny"
            until(lambda: series(run, "train/loss") or process.poll() is not None, "the first step")
            training = Disturbed(process, run, log, {})
            assert process.poll() is None, training.text
            training.look_again()
            family = leftovers(process.pid)
            yield training
            family |= leftovers(process.pid) if process.is_running() and process.poll() is None else {}
        assert not survivors(family.values())
        until(lambda: shared_memory() <= before, "shared memory given back")
        assert not temporary(process.pid)

    return disturbed


@pytest.fixture(scope="session")
def undisturbed(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a complete run with the given settings. Each combination of settings runs once."""
    runs: dict[tuple[str, ...], Path] = {}

    def run(*settings: str) -> Path:
        if settings not in runs:
            folder = tmp_path_factory.mktemp("undisturbed")
            ended = distill_rl("train", "-c", material.config(folder), *settings)
            assert ended.code == 0, ended.err
            runs[settings] = folder / "runs" / "tiny"
        return runs[settings]

    return run


def assert_resumes(run: Disturbed, *settings: str) -> None:
    """Resumes a run that has ended, to its last step."""
    ended = distill_rl("train", "-c", run.run.parents[1] / "tiny.yaml", *settings, "--resume")
    assert ended.code == 0, ended.err


def assert_same_student(run: Path, expected: Path) -> None:
    """Losses and gradient norms of every step, and the exported weights, are equal bit for bit."""
    for metric in ("train/loss", "train/kl_loss", "train/grad_norm", "validation/kl_loss"):
        assert series(run, metric) == series(expected, metric), metric
    ours, theirs = ((folder / "export" / "model.safetensors").read_bytes() for folder in (run, expected))
    assert ours == theirs
