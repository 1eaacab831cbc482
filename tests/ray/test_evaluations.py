"""Evaluations beside a training, by an evaluator that does what the test says: it answers, raises, dies or hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill_rl.config.schema import Config, RayConfig, TeacherConfig
from distill_rl.evals.run import Model
from distill_rl.run.run_directory import paths_of
from distill_rl.workers.actors.evaluator import Evaluated
from distill_rl.workers.actors.rank import Worker
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.placement import ActorPlacement, PlacementPlan, reserve
from distill_rl.workers.evaluation import Evaluations

pytestmark = pytest.mark.ray


class Evaluator(Worker):
    """Finds in the folder of the weights what it shall do; its score is a number that is in the folder, too."""

    def __init__(self, rank: int):
        pass

    def evaluate(self, model: Model, *_: Any) -> Evaluated:
        deed = (model.folder / "deed").read_text()
        if deed == "raise":
            raise ValueError("the suite is broken")
        if deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "hang":
            threading.Event().wait()
        score = float((model.folder / "score").read_text())
        result = {"score": score, "interval": (0.0, 1.0), "num_items": 4, "resumed_items": 0, "seconds": 1.0}
        return Evaluated({"sums": result}, [])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    config.run.dir, config.run.name = os.fspath(tmp_path), "played"
    config.teachers = [TeacherConfig(name="big", model="big")]
    config.evaluate.suites, config.evaluate.timeout_s = ["sums"], 60.0
    return config


@pytest.fixture
def group(ray_cluster) -> Iterator[WorkerGroup]:
    plan = PlacementPlan(({"CPU": 1.0},), {"evaluator": ActorPlacement(0, 0.0)})
    with reserve(lambda: plan, RayConfig(), "evaluations", interrupted=lambda: None) as (_, placement):
        group = WorkerGroup(Evaluator, ("evaluator",), plan, placement, Calls(interrupted=lambda: None))
        group.identify(60)
        yield group
        group.kill()


class Played:
    """Evaluations of a student whose "weights" are what the evaluator shall do."""

    def __init__(self, group: WorkerGroup, config: Config):
        self.deeds: dict[int, str] = {}
        self.recorded: list[tuple[int, dict[str, float]]] = []
        self.compared: list[int] = []
        paths = paths_of(config)
        paths.evals.mkdir(parents=True)
        self.folder = paths.evals
        self.evaluations = Evaluations(
            group, config, group._calls, paths,
            copy=self._copy, record=lambda step, scores: self.recorded.append((step, dict(scores))),
            compare=lambda step, scores: self.compared.append(step), stopping=lambda: False,
        )  # fmt: skip

    def _copy(self, folder: Path) -> str | None:
        step = int(folder.name.rpartition("-")[2])
        if self.deeds[step] == "full":
            return "no space left"
        folder.mkdir()
        (folder / "deed").write_text(self.deeds[step])
        (folder / "score").write_text(str(step / 100))
        return None

    def run(self, **deeds: str) -> None:
        self.deeds = {int(step.removeprefix("step")): deed for step, deed in deeds.items()}
        for step in self.deeds:
            self.evaluations.start(step)
        self.evaluations.wait()


def test_scores_are_recorded_under_their_steps_and_failures_only_logged(group, config, caplog):
    played = Played(group, config)
    played.run(step2="done", step4="raise", step6="full", step8="die", step9="done", step12="done")
    assert played.recorded == [(2, {"eval/sums": 0.02}), (9, {"eval/sums": 0.09}), (12, {"eval/sums": 0.12})]
    assert played.compared == [2, 9, 12]
    for said in ("step 4 failed, training goes on", "the suite is broken", "no evaluation of step 6", "step 8 failed"):
        assert said in caplog.text
    assert not list(played.folder.glob(".weights-*"))
    assert played.evaluations.unfinished == frozenset()


def test_an_evaluation_that_hangs_is_given_up_and_the_next_one_goes_on(group, config, caplog):
    config.evaluate.timeout_s = 1.0
    played = Played(group, config)
    played.run(step1="hang")
    config.evaluate.timeout_s = 60.0
    played.run(step2="done")
    assert [step for step, _ in played.recorded] == [2]
    assert "evaluator: must be done within evaluate.timeout_s=1" in caplog.text


def test_weights_that_an_earlier_start_has_left_are_evaluated_and_later_ones_are_not(group, config):
    played = Played(group, config)
    played.deeds = {3: "done", 5: "done"}
    for step in played.deeds:
        played._copy(played.folder / f".weights-{step}")
    played.evaluations.recover(4)
    assert played.evaluations.unfinished == {3}
    played.evaluations.wait()
    assert played.recorded == [(3, {"eval/sums": 0.03})]
    assert not list(played.folder.glob(".weights-*"))
