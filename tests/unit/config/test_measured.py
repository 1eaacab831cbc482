"""Which metrics checkpoints can be compared by, and which of two values is better."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill_rl.config.facts import Facts, TeacherFacts
from distill_rl.config.load import load_config
from distill_rl.config.measured import higher_is_better, unmeasured, validation_metrics
from distill_rl.config.rules import notes, problems

TEXT = """
{student: {model: s}, teachers: [{model: t, name: big}], data: {path: d, validation: {fraction: 0.1}},
 train: {steps: 10}, evaluate: {every: 5}, checkpoint: {keep_best: 1, every: 5}}
"""
TWO = "teachers.1={model: u, name: wide}"
AT_2 = "loss.temperature=2"
DENSE = "teachers.0.export=logits"
SAME, OTHER = TeacherFacts(None, 8, None), TeacherFacts(None, 9, "hybrid")


@pytest.fixture
def configured(tmp_path: Path):
    def _configured(*overrides: str):
        path = tmp_path / "run.yaml"
        path.write_text(TEXT)
        return load_config(path, overrides)

    return _configured


@pytest.mark.parametrize(("overrides", "teachers", "without"), [
    ((DENSE,), (SAME,), set()),
    ((DENSE,), (), set()),
    ((), (SAME,), {"acceptance"}),
    ((), (OTHER,), {"acceptance"}),
    (("teachers.0.loss=alm",), (), {"acceptance"}),
    ((AT_2,), (SAME,), {"acceptance"}),
    ((AT_2, "teachers.0.export=hidden"), (SAME,), set()),
    (("teachers.0.export=sampled",), (SAME,), {"acceptance"}),
    (("loss.kd_weight=0", "loss.ce_weight=1"), (), {"kl_loss", "top1_agreement", "acceptance"}),
])  # fmt: skip
def test_metrics_of_validation_with_one_teacher(configured, overrides, teachers, without):
    found = validation_metrics(configured(*overrides), Facts(vocabulary_size=8, teachers=teachers))
    names = [name for name in ("kl_loss", "nll_loss", "top1_agreement", "acceptance") if name not in without]
    assert found == [f"validation/{name}" for name in names]


def test_each_of_several_teachers_has_its_own(configured):
    found = validation_metrics(configured(TWO, DENSE), Facts(vocabulary_size=8, teachers=(SAME, OTHER)))
    assert found == [
        "validation/kl_loss", "validation/nll_loss", "validation/kl_loss/big", "validation/kl_loss/wide",
        "validation/top1_agreement/big", "validation/top1_agreement/wide", "validation/acceptance/big",
    ]  # fmt: skip


@pytest.mark.parametrize(("metric", "overrides", "line"), [
    ("validation/acceptance", (DENSE,), None),
    ("validation/acceptance", (),
     "is not measured for teacher big: its top k tells bounds only (acceptance_low and acceptance_high); got "
     "validation/acceptance; set checkpoint.best_by=validation/top1_agreement"),
    ("validation/top1_agreement", (), None),
    ("validation/acceptance/big", (TWO, DENSE), None),
    ("validation/kl_loss/wide", (TWO,), None),
    ("validation/acceptance", (AT_2,),
     "is not measured for teacher big: its top k is taken at loss.temperature 2, not at 1; got validation/acceptance; "
     "set checkpoint.best_by=validation/top1_agreement"),
    ("validation/acceptance", ("teachers.0.export=sampled",),
     "is not measured for teacher big: its draws (export: sampled) tell no probabilities; got validation/acceptance; "
     "set checkpoint.best_by=validation/top1_agreement"),
    ("validation/acceptance/wide", (TWO, "teachers.1.loss=uld", "teachers.1.export=hidden"),
     "is not measured for teacher wide: it is not compared token by token; got validation/acceptance/wide; "
     "set checkpoint.best_by=validation/top1_agreement/wide"),
    ("validation/top1_agreement", (TWO, DENSE, "teachers.1.export=hidden"),
     "must be a metric that this run measures (validation/kl_loss, validation/nll_loss, validation/kl_loss/big, "
     "validation/kl_loss/wide, validation/top1_agreement/big, validation/top1_agreement/wide, "
     "validation/acceptance/big, validation/acceptance/wide); got validation/top1_agreement"),
    ("validation/acceptance/big", (DENSE,),
     "must be a metric that this run measures (validation/kl_loss, validation/nll_loss, validation/top1_agreement, "
     "validation/acceptance); got validation/acceptance/big"),
    ("validation/top1_agreement", ("loss.kd_weight=0", "loss.ce_weight=1"),
     "needs teachers, and loss.kd_weight above 0; got validation/top1_agreement; set checkpoint.best_by=validation/nll_loss"),
])  # fmt: skip
def test_a_metric_that_no_validation_measures_is_one_problem(configured, metric, overrides, line):
    found = problems(configured(*overrides, f"checkpoint.best_by={metric}"))
    assert found == ([] if line is None else [f"checkpoint.best_by: {line}"])


def test_acceptance_is_refused_when_the_tokenizers_are_known(configured):
    config = configured("checkpoint.best_by=validation/acceptance", DENSE)
    assert list(unmeasured(config, Facts(vocabulary_size=8, teachers=(SAME,)))) == []
    (line,) = unmeasured(config, Facts(vocabulary_size=8, teachers=(OTHER,)))
    assert "teacher big: it is not compared token by token; got validation/acceptance" in line


def test_a_problem_is_worded_alike_before_and_after_the_files_are_read(configured):
    config = configured("checkpoint.best_by=validation/acceptance", AT_2)
    assert problems(config) == list(unmeasured(config, Facts(vocabulary_size=8, teachers=(OTHER,))))


@pytest.mark.parametrize(("metric", "higher"), [
    ("validation/kl_loss", False), ("validation/nll_loss", False), ("validation/kl_loss/big", False),
    ("validation/top1_agreement", True), ("validation/acceptance/big", True), ("eval/gsm8k", True),
])  # fmt: skip
def test_scores_and_shares_are_better_if_higher(metric, higher):
    assert higher_is_better(metric) is higher


@pytest.mark.parametrize(("overrides", "teachers", "named"), [
    ((AT_2,), (SAME,), "big"),
    ((AT_2, TWO), (SAME, SAME), "big, wide"),
    ((AT_2, TWO), (SAME, OTHER), "big"),
    ((AT_2, "teachers.0.export=logits"), (SAME,), None),
    ((AT_2, "data.validation.fraction=0", "checkpoint.keep_best=0"), (SAME,), None),
    ((), (SAME,), None),
])  # fmt: skip
def test_a_missing_acceptance_is_noted_once(configured, overrides, teachers, named):
    lines = notes(configured(*overrides), Facts(vocabulary_size=8, teachers=teachers))
    about = [line for line in lines if "validation/acceptance" in line]
    assert len(about) == (named is not None)
    assert all(line.startswith(f"loss.temperature is 2, at which the top k of {named} is taken: ") for line in about)
