"""The student is called on a step while it is in the one before: real actors, and a student that ends a step only when it is called on the next."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill_rl.observe.metrics import Metric
from distill_rl.run.driver import Driver
from distill_rl.system.processes import call_in_child
from distill_rl.types import RankBatch
from distill_rl.workers.pipeline.sub_batch import SubBatch
from tests.bench import harness
from tests.bench.material import write_config
from tests.bench.scale.scale import write_material
from tests.bench.scale.stubs import StubStudent, StubTeacher
from tests.helpers.command import until

pytestmark = pytest.mark.ray

STEPS, SAVES, VALIDATES, SKIPPED, LAST = 12, 4, 6, 8, 12
"""Steps; every so many are saved, or validated; this one is skipped, so that the one after it is saved; and the last one."""
BARRIERS = (4, 6, 8, 9, LAST)
"""Steps whose results are read before the student is called again."""
DIES, STOPS = 7, 5
"""Steps in which the student dies, or the run is told to stop, when the student has been called on the step after it."""


class Events:
    """What happens in which step, in the order in which it does, of all processes."""

    def __init__(self, folder: Path):
        self._path = folder / "events"

    def add(self, what: str, step: int) -> None:
        with self._path.open("a") as file:  # appended as a whole
            file.write(f"{what} {step}\n")

    def all(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []


class Student(StubStudent):
    """A rank that ends no step before it is called on the next one, but where the driver has to wait for the results."""

    def train(self, rows: list[RankBatch], sub_batch: int, *arguments: Any) -> Any:
        folder = Path(self._config.run.dir).parent
        events, step = Events(folder), rows[sub_batch].index + 1
        events.add("begins", step)
        if step not in BARRIERS:
            until(lambda: f"calls {step + 1}" in events.all(), f"the call of step {step + 1}")
        hit = folder / "hit"
        if step == DIES and hit.exists() and hit.read_text() == "die":
            hit.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == STOPS and hit.exists() and hit.read_text() != "die":
            os.kill(int(hit.read_text()), signal.SIGTERM)
        result = super().train(rows, sub_batch, *arguments)
        assert isinstance(result, dict)
        events.add("ends", step)
        return result | {"train/skipped": Metric(float(step == SKIPPED), "max"), "train/nll_loss": Metric(1.0)}

    def start(self, *arguments: Any) -> None:
        super().start(*arguments)
        losses = {name: Metric(1.0) for name in ("validation/kl_loss", "validation/nll_loss")}
        self._engine.evaluate = lambda *_: losses

    def save(self, directory: str, marker: str | None) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "step").write_text(str(self._engine.step))

    def load(self, directory: str) -> None:
        self._engine.step = int((Path(directory) / "step").read_text())

    def checkpoint_bytes(self) -> int:
        return 0

    def finish_saving(self) -> None:
        """Nothing is written in the background."""


def drive(config_path: Path, hit: str | None) -> int:
    """Runs a configuration; returns the exit code of the run. In a process of its own."""
    from distill_rl.config.load import load_config
    from distill_rl.observe.log import log_file
    from distill_rl.run import run_directory
    from distill_rl.run.job import prepare
    from distill_rl.run.opened import open_rows
    from distill_rl.run.start import Roles
    from distill_rl.system.signals import Signals

    events = Events(config_path.parent)
    if hit is not None:
        (config_path.parent / "hit").write_text(str(os.getpid()) if hit == "stop" else hit)

    class Told(Driver):
        """Tells what it does."""

        def record(self, step: int, *arguments: Any) -> None:
            events.add("reads", step)
            super().record(step, *arguments)

        def save(self, **keywords: Any) -> None:
            super().save(**keywords)
            events.add("saved", self.state.step)

        def validate(self) -> None:
            super().validate()
            events.add("validated", self.state.step)

        def finish(self) -> int:
            return 0

    config, signals = load_config(config_path), Signals()
    with (
        run_directory.occupy(config, clean=True) as paths,
        log_file(paths.logs / "driver.log"),
        signals,
        Told.open(prepare(open_rows(config), paths), signals, Roles(Student, StubTeacher)) as driver,
    ):
        call = driver.student._call_student

        def told(progress: Any, sub_batch: SubBatch) -> None:
            if progress.method == "train":
                events.add("calls", progress.batch.documents.index + 1)
            call(progress, sub_batch)

        driver.student._call_student = told  # type: ignore[method-assign]
        return driver.run()


@pytest.fixture
def run(tmp_path) -> Iterator[Any]:
    write_material(tmp_path, rows=64)
    config = write_config(
        tmp_path,
        "ahead",
        steps=STEPS,
        batch=2,
        micro_batch=2,
        length=32,
        data={
            "path": f"{tmp_path}/text.jsonl",
            "max_length": 32,
            "long_documents": "cut",
            "validation": {"fraction": 0.05},
        },
        checkpoint={"every": SAVES, "async_save": False, "keep_last": STEPS},
        evaluate={"every": VALIDATES},
        transport="shared_memory",
        ray={"dashboard": False},
    )

    def go(hit: str | None = None) -> tuple[int, list[str]]:
        code = call_in_child("ahead", drive, config, hit, deadline_s=300)
        return code, Events(tmp_path).all()

    return go


def test_steps_are_called_ahead_unless_something_is_due_between_them(run):
    code, events = run()
    at = {event: place for place, event in enumerate(events)}
    assert code == 0
    assert len(at) == len(events), "nothing happens twice"
    assert [event for event in events if event.startswith("ends")] == [f"ends {i}" for i in range(1, STEPS + 1)]
    ahead = [step for step in range(1, STEPS) if at[f"calls {step + 1}"] < at[f"reads {step}"]]
    assert ahead == [step for step in range(1, STEPS) if step not in BARRIERS]
    assert [event for event in events if event.startswith("saved")] == ["saved 4", "saved 9", "saved 12"]
    for event in ("saved 4", "validated 6", "saved 9", "validated 12"):
        step = int(event.split()[1])
        assert at[f"reads {step}"] < at[event] < at.get(f"calls {step + 1}", len(events))


def test_a_student_that_dies_when_it_has_been_called_on_the_next_step_goes_back_once(run, tmp_path):
    code, events = run("die")
    assert code == 0
    ended = [event for event in events if event.startswith("ends")]
    assert ended == [f"ends {i}" for i in [*range(1, DIES), *range(SAVES + 1, STEPS + 1)]]
    assert events.count(f"calls {DIES + 1}") == 2, "the first of these calls has died with the student"
    records = harness.step_records(tmp_path / "runs" / "ahead" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["faults/student_restarts"] == 1


def test_a_request_to_stop_waits_for_the_step_that_the_student_has_been_called_on(run, tmp_path):
    code, events = run("stop")
    assert code == 85
    assert f"reads {STOPS + 1}" in events
    assert events[-1] == f"saved {STOPS + 1}"
    assert f"calls {STOPS + 2}" not in events
    assert (tmp_path / "runs" / "ahead" / "checkpoints" / f"step-{STOPS + 1}").is_dir()
