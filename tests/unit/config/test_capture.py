"""What a capture makes of a training configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distill_rl.config.capture import CAPTURES, stores_of, to_capture
from distill_rl.config.schema import Config, DataConfig, EvaluateConfig, StudentConfig, TeacherConfig
from distill_rl.config.schema.backends import StoreConfig
from distill_rl.config.schema.fields import MISSING

OUT = Path("/targets")


def config(*teachers: str, **changes: object) -> Config:
    made = Config(student=StudentConfig(model="org/student"))
    made.teachers = [TeacherConfig(name=name, model=f"org/{name}") for name in teachers or ("big",)]
    return replace(made, **changes)


def captured(made: Config, problems: list[str] | None = None) -> Config:
    found: list[str] = []
    capture = to_capture(made, found if problems is None else problems, OUT)
    assert problems is not None or found == []
    return capture


def test_one_teacher_is_stored_in_the_folder_itself():
    capture = captured(config())
    assert [teacher.cache for teacher in capture.teachers] == [str(OUT)]
    assert stores_of(capture) == [OUT]
    assert capture.run.dir == str(OUT / CAPTURES)


def test_several_teachers_have_a_store_each_by_name():
    capture = captured(config("one", "other"))
    assert stores_of(capture) == [OUT / "one", OUT / "other"]


def test_what_decides_rows_and_targets_stays():
    made = config(data=DataConfig(path="x.jsonl", max_length=77, packing=True))
    made.loss.top_k, made.loss.temperature, made.train.global_batch_size = 9, 2.0, 24
    capture = captured(made)
    assert (capture.data, capture.student, capture.loss, capture.prefetch) == (
        made.data, made.student, made.loss, made.prefetch,
    )  # fmt: skip
    assert capture.train.global_batch_size == 24
    assert replace(capture.teachers[0], cache=None) == made.teachers[0]


def test_what_only_training_needs_is_switched_off():
    made = config()
    made.teachers[0].score = "entropy"
    made.faults.lost_teacher = "drop"
    made.checkpoint = replace(made.checkpoint, every=5, keep_best=2)
    made.evaluate = EvaluateConfig(suites=["gsm8k"], suites_every=10)
    capture = captured(made)
    assert capture.teachers[0].score == "static"
    assert capture.faults.lost_teacher == "fail", "a teacher that is lost would leave a hole"
    assert (capture.checkpoint.every, capture.checkpoint.keep_best, capture.checkpoint.resume) == (0, 0, "auto")
    assert capture.evaluate == EvaluateConfig()
    assert made.teachers[0].cache is None, "the training configuration is not changed"


@pytest.mark.parametrize(("steps", "epochs", "wanted"), [
    (None, 3.0, (None, 1.0)),
    (None, 0.5, (None, 0.5)),
    (100, None, (100, 1.0)),
    (100, 3.0, (100, 1.0)),
])  # fmt: skip
def test_documents_are_read_once_and_no_more_than_in_training(steps, epochs, wanted):
    made = config()
    made.train = replace(made.train, steps=steps, epochs=epochs)
    train = captured(made).train
    assert (train.steps, train.epochs) == wanted


@pytest.mark.parametrize("data", [
    {"concatenate": True},
    {"sources": [{"path": "a.jsonl", "weight": 3.0}, {"path": "b.jsonl", "weight": 1.0}]},
], ids=["joined texts", "a mixture"])  # fmt: skip
def test_epochs_that_differ_in_their_documents_are_all_read(data):
    """A mixture reads some sources in part in an epoch, and joined texts depend on the batch that they are in."""
    made = config()
    made.data = replace(made.data, **data)
    made.train = replace(made.train, steps=None, epochs=3.0)
    assert captured(made).train.epochs == 3.0
    made.train = replace(made.train, steps=100, epochs=None)
    assert (captured(made).train.steps, captured(made).train.epochs) == (100, None)
    made.train = replace(made.train, steps=None, epochs=None, minutes=5.0)
    assert (captured(made).train.epochs, captured(made).train.minutes) == (1.0, None), "how many are read is not known"


def test_without_a_student_the_only_teacher_takes_its_place():
    made = config(student=StudentConfig(model=MISSING))
    made.teachers[0] = replace(made.teachers[0], tokenizer="org/tokenizer", revision="v2", dtype="fp32")
    problems = ["student.model: missing value; set it", "data.path: missing value"]
    student = captured(made, problems).student
    assert (student.model, student.tokenizer, student.revision, student.dtype) == (
        "org/big",
        "org/tokenizer",
        "v2",
        "fp32",
    )
    assert problems == ["data.path: missing value"]


def test_several_teachers_need_a_student():
    problems = ["student.model: missing value; set it in the file"]
    captured(config("one", "other", student=StudentConfig(model=MISSING)), problems)
    (line,) = problems
    assert line.startswith("student.model: several teachers are captured together for the rows of a student")
    assert "name the student, or capture one teacher at a time" in line


def test_a_capture_without_a_teacher_that_runs_is_refused():
    alone = config()
    alone.loss.kd_weight = 0.0
    stored = config()
    stored.teachers[0] = replace(stored.teachers[0], backend="store", store=StoreConfig("elsewhere"))
    for made, words in (
        (replace(config(), teachers=[]), "teachers: a capture needs a teacher, and loss.kd_weight above 0"),
        (alone, "teachers: a capture needs a teacher, and loss.kd_weight above 0"),
        (stored, "teachers.0.backend: a capture runs the teacher; this one is read from a store; got store"),
    ):
        problems: list[str] = []
        teachers = captured(made, problems).teachers
        assert len([line for line in problems if line.startswith(words)]) == 1, problems
        assert made is not stored or teachers[0].cache is None  # which a store may not have
