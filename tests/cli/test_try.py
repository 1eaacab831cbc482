"""`distill-rl try` on tiny models: the whole command once, what it refuses, and that its YAML repeats the training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distill_rl.config.load import load_config
from distill_rl.demo import trial_setup
from distill_rl.models.attention import installed
from tests.helpers.command import Ended, distill_rl, distill_rl_in_process, records
from tests.helpers.corpus import write_corpus
from tests.helpers.one_process import train

pytestmark = pytest.mark.cli

MODELS = ("teacher", "student_before", "without_teacher", "with_teacher")
LR = 0.01


@dataclass(frozen=True)
class Tried:
    root: Path
    """Where the command ran."""
    ended: Ended

    @property
    def out(self) -> Path:
        return self.root / "tried"


@pytest.fixture(scope="module")
def tried(material, cluster, tmp_path_factory) -> Tried:
    root = tmp_path_factory.mktemp("try")
    models = material.root / "student", material.root / "teacher"
    ended = distill_rl(
        "try", *models, material.root / "corpus.jsonl", "--minutes", "0.02", "--out", "tried", f"optimizer.lr={LR}",
        cwd=root, cluster=cluster,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    return Tried(root, ended)


def test_both_students_are_compared_with_the_teacher_and_with_the_start(tried):
    result = json.loads((tried.out / "result.json").read_text())
    per_byte = result["bits_per_byte"]
    assert set(per_byte) == set(MODELS)
    assert per_byte["with_teacher"] < per_byte["student_before"]
    assert per_byte["without_teacher"] < per_byte["student_before"]
    saved = result["saved_by_teacher"]
    assert saved["bits_per_byte"] == pytest.approx(per_byte["without_teacher"] - per_byte["with_teacher"])
    assert saved["interval"][0] <= saved["bits_per_byte"] <= saved["interval"][1]
    assert result["held_out"]["documents"] == 8  # a tenth of 80
    assert len(result["samples"]) == 3
    assert all({"prompt", "text", *MODELS[1:]} == set(sample) for sample in result["samples"])


def test_the_terminal_says_what_is_chosen_shown_and_next(tried):
    out = tried.ended.out
    for words in (
        "same tokenizer: token by token", "rate      0.01: ", "yours     optimizer.lr=0.01", "8 are held out", "time      0.02 min with the teacher",
        "bits per byte", "student, trained with the teacher", result_of(tried)["verdict"], "  with teacher     ",
        "go on     distill-rl train -c tried/try.yaml run.name=longer train.steps=",
    ):  # fmt: skip
        assert words in out, words


def result_of(tried: Tried) -> dict:
    return json.loads((tried.out / "result.json").read_text())


def test_everything_is_in_one_folder(tried):
    assert [entry.name for entry in tried.root.iterdir()] == ["tried"]
    names = {entry.name for entry in tried.out.iterdir()}
    assert names == {"try.yaml", "result.json", "report.html", "with-teacher", "without-teacher"}
    assert result_of(tried)["export"] == str(tried.out / "with-teacher" / "export")
    page = (tried.out / "report.html").read_text()
    assert "with-teacher" in page
    assert "without-teacher" in page


def test_the_trainings_differ_in_their_losses_alone_and_record_their_steps(tried):
    taught, control = (load_config(tried.out / name / "config.yaml") for name in ("with-teacher", "without-teacher"))
    assert (taught.loss.kd_weight, taught.loss.ce_weight) == (1.0, 0.5)
    assert (control.loss.kd_weight, control.loss.ce_weight) == (0.0, 1.0)
    assert (taught.data, taught.student, taught.optimizer, taught.run.seed) == (
        control.data, control.student, control.optimizer, control.run.seed,
    )  # fmt: skip
    assert (taught.train, taught.schedule) == (control.train, control.schedule), "as many steps, at the same rates"
    for config, name in ((taught, "with-teacher"), (control, "without-teacher")):
        last = max(record["step"] for record in records(tried.out / name))
        assert (config.train.steps, config.train.minutes) == (last, None)
        assert result_of(tried)["trainings"][name.replace("-", "_")]["steps"] == last


def test_the_configuration_repeats_the_training_bit_for_bit(tried, tmp_path, monkeypatch):
    """Read in another directory; its length was chosen while the first training ran, and the schedule with it."""
    path = tried.out / "try.yaml"
    assert path.read_text().startswith("# Chosen by `distill-rl try ")
    monkeypatch.chdir(tmp_path)
    checked = distill_rl_in_process("check", "-c", path, "run.name=again", f"run.dir={tmp_path}")
    assert checked.code == 0, checked.err
    again = train(load_config(path), tmp_path / "export")
    first = load_file(tried.out / "with-teacher" / "export" / "model.safetensors")
    assert first.keys() == again.weights.keys()
    assert all(torch.equal(first[name], again.weights[name]) for name in first)


def test_a_trial_is_not_overwritten(tried, material):
    models = material.root / "student", material.root / "teacher"
    ended = distill_rl_in_process("try", *models, material.root / "corpus.jsonl", "--out", tried.out)
    assert ended.code == 2
    assert ended.err == (
        f"distill-rl: error: {tried.out}: the folder is in use; start over with --clean, or choose another --out\n"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("STUDENT", "STUDENT", "CORPUS"), ["STUDENT and TEACHER: must be two models: a model has nothing to learn"]),
        (("LARGE", "STUDENT", "CORPUS"), ["STUDENT: has ", "give the smaller model first: distill-rl try "]),
        (("/nowhere/a", "STUDENT", "/nowhere/no.jsonl"), ["STUDENT: ", "TEXT: "]),
        (("STUDENT", "TEACHER", "FEW"), ["TEXT: must have at least 16 documents, of which some are held out; got 5 in "]),
        (("STUDENT", "TEACHER", "CORPUS", "--minutes", "0"), ["--minutes: must be greater than 0; got 0.0"]),
        (("STUDENT", "TEACHER", "CORPUS", "train.minutes=3", "train.stepz=1"),
         ["train.minutes=3: is set by --minutes; use --minutes", "train.stepz: unknown key"]),
    ],
    ids=["one model", "wrong order", "nothing there", "little text", "no time", "settings"],
)  # fmt: skip
def test_what_cannot_be_tried_is_refused_at_once(material, large, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "few.jsonl", rows=5)
    places = {
        "STUDENT": material.root / "student", "TEACHER": material.root / "teacher", "LARGE": large,
        "CORPUS": material.root / "corpus.jsonl", "FEW": tmp_path / "few.jsonl",
    }  # fmt: skip
    ended = distill_rl_in_process("try", *(str(places.get(argument, argument)) for argument in arguments))
    assert ended.code == 2
    assert len(ended.errors) == len(ended.err.splitlines())
    for words in expected:
        assert any(words in line for line in ended.errors), ended.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["few.jsonl"], "nothing is written"


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    from tests.helpers.models import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("large") / "large", hidden=64)


def test_models_that_do_not_fit_are_refused_with_their_sizes(material, tmp_path, monkeypatch):
    """On a machine with 64 KiB of memory."""
    monkeypatch.setattr("distill_rl.preflight.total_bytes", lambda: 2**16)
    monkeypatch.setattr(trial_setup, "total_bytes", lambda: 2**16)
    models = material.root / "student", material.root / "teacher"
    ended = distill_rl_in_process("try", *models, material.root / "corpus.jsonl", "--out", tmp_path / "out")
    assert ended.code == 2
    (line,) = ended.errors
    assert "memory: the workers need about " in line
    assert (
        "and this machine has 0.1 MiB, even with one row at a time, activations computed again and adapters in place of all weights"
        in line
    )
    assert ("with weights in 4 bits; take a" in line) == installed("torchao")
    assert ("make room with weights in 8 or 4 bits (" in line) != installed("torchao")
