"""The benchmark of equal stages: every step of its workload is alike, its figures are read right, a broken promise is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill_rl.system.environment import ROOT
from tests.bench.runs import pipeline
from distill_rl.config.load import load_config
from distill_rl.config.rules import problems

RECORD = ROOT / "docs/benchmarks/pipeline.json"
SIZES = {"steps": 6, "batch": 4, "micro_batch": 2, "length": 32}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipeline")
    pipeline.write_material(root, rows=8, length=32)
    pipeline.write_teacher(root, 5, 32)
    return root


def measured(depth_1: float, *, teacher: float = 0.2, student: float = 0.2, same: bool = True) -> dict[str, Any]:
    def runs(step: float) -> list[dict[str, float]]:
        return [{"step": step, "teacher": teacher, "student": student, "waited_for_teacher": 0.0}] * 3

    return pipeline.summary({0: runs(teacher + student), 1: runs(depth_1), 2: runs(depth_1)}) | {"same_losses": same}


def test_every_document_fills_its_row_and_both_models_read_the_same_ids(material: Path) -> None:
    from transformers import AutoTokenizer

    student, teacher = (AutoTokenizer.from_pretrained(material / name) for name in ("student", "teacher"))
    assert student.get_vocab() == teacher.get_vocab()
    texts = [json.loads(line)["text"] for line in (material / "text.jsonl").read_text().splitlines()]
    assert len(set(texts)) == 8
    assert all(len(student(text)["input_ids"]) > 32 for text in texts)


def test_a_new_teacher_replaces_the_one_before_with_the_layers_asked_for(material: Path) -> None:
    layers = [
        json.loads((material / name / "config.json").read_text())["num_hidden_layers"]
        for name in ("student", "teacher")
    ]
    assert layers == [pipeline.STUDENT_LAYERS, 5]
    pipeline.write_teacher(material, 2, 32)
    assert json.loads((material / "teacher/config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.parametrize("depth", [*pipeline.DEPTHS, pipeline.FURTHER])
def test_the_configuration_is_one_that_could_run(material: Path, depth: int) -> None:
    config = load_config(pipeline.configuration(material, "x", depth, **SIZES))
    assert problems(config) == []
    assert config.prefetch.depth == depth
    assert config.teachers[0].name == pipeline.TEACHER


def test_a_step_lasts_from_record_to_record_and_the_warm_up_is_not_counted(tmp_path: Path) -> None:
    ends = [100.0 * step for step in range(1, pipeline.WARM_UP + 1)]
    ends += [ends[-1] + after for after in (2.0, 4.0, 7.0)]
    records = [
        {
            "step": step, "time": end, "timing/step": 0.5, "timing/wait_teachers": 0.0, "train/loss": float(step),
            f"timing/{pipeline.TEACHER}/forward": 1.0 if step > pipeline.WARM_UP else 99.0,
            "timing/student/step": 0.25 if step > pipeline.WARM_UP else 99.0,
        }
        for step, end in enumerate(ends, start=1)
    ]  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [*records, {"step": 8, "validation/loss": 1.0}]))
    found = pipeline.figures(path)
    assert (found["step"], found["teacher"], found["student"]) == (2.0, 1.0, 0.25)
    assert found["losses"] == [one["train/loss"] for one in records], "of all steps, the first too"


def test_a_step_is_compared_with_the_longer_stage_as_it_is_alone() -> None:
    runs = [{"step": 1.0, "teacher": 0.4, "student": 0.5, "waited_for_teacher": 0.4}] * 3
    slowed = [{"step": step, "teacher": 0.55, "student": 0.55, "waited_for_teacher": 0.0} for step in (0.6, 9.0, 0.55)]
    found = pipeline.summary({0: runs, 1: slowed})
    assert found["stages"] == {"teacher": 0.4, "student": 0.5, "longer": 0.5, "sum": 0.9}
    assert found["depths"]["0"]["over_longer_stage"] == 2.0
    assert found["depths"]["1"]["over_longer_stage"] == 1.2
    assert found["depths"]["1"]["over_longer_stage_as_it_ran"] == pytest.approx(0.6 / 0.55, abs=1e-3)


def test_a_kept_promise_has_nothing_to_tell() -> None:
    assert pipeline.verdict(measured(0.22)) == []


@pytest.mark.parametrize(
    ("measured", "word"),
    [
        (measured(0.24), "1.20 times"),
        (measured(0.2, student=0.16), "must be about equal"),
        (measured(0.09, teacher=0.09, student=0.09), "must be at least 0.1 s"),
        (measured(0.2, same=False), "losses differ"),
    ],
)
def test_a_broken_promise_is_told(measured: dict[str, Any], word: str) -> None:
    (problem,) = pipeline.verdict(measured)
    assert word in problem


def test_with_one_core_there_is_nothing_to_measure(monkeypatch, capsys) -> None:
    monkeypatch.setattr(pipeline.os, "sched_getaffinity", lambda _: {0})
    assert pipeline.main([]) == 2
    assert capsys.readouterr().err == "pipeline: error: needs two cores, one for each model\n"


def test_the_published_record_keeps_its_promise_and_names_its_machine() -> None:
    record = json.loads(RECORD.read_text())
    assert pipeline.verdict(record) == []
    assert record["environment"]["commit"]
    assert record["repeats"] == 5
