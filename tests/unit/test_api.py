"""The forms of a configuration that `distill` and `check` take; whole runs are in `tests/cli/test_python.py`."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import distill_rl
from distill_rl.observe.log import console
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    write_tiny_model(folder / "student", hidden=16, seed=2)
    write_tiny_model(folder / "teacher", hidden=16, seed=1)
    write_corpus(folder / "corpus.jsonl", rows=20, seed=5)
    (folder / "run.yaml").write_text(
        f"student: {{model: {folder}/student}}\nteachers: [{{model: {folder}/teacher}}]\n"
        f"data: {{path: {folder}/corpus.jsonl, max_length: 64}}\nloss: {{top_k: 8}}\n"
        f"train: {{steps: 2, global_batch_size: 4}}\nrun: {{dir: {folder}/runs}}\n"
    )
    return folder


def test_every_form_gives_the_same_configuration(root: Path):
    file = distill_rl.check(root / "run.yaml")
    assert file, file.problems
    keywords = {
        "student": root / "student",
        "teachers": str(root / "teacher"),
        "data": {"path": root / "corpus.jsonl", "max_length": 64},
        "loss.top_k": 8,
        "train": {"steps": 2, "global_batch_size": 4},
        "run": {"dir": root / "runs", "name": "run"},
    }
    in_dict = {**keywords, "teachers": [str(root / "teacher")]}
    assert distill_rl.check(**keywords).config == file.config
    assert distill_rl.check(in_dict).config == file.config
    assert distill_rl.check(file.config).config == file.config
    assert file.summary
    assert str(file) == "\n".join(file.summary)
    assert any(line.startswith("note       teachers.0.tokenizer: writes no <s>") for line in file.summary)
    assert distill_rl.check(root / "run.yaml", **{"checkpoint.resume": "auto"})


def test_keywords_come_after_the_configuration_and_change_nothing_of_it(root: Path):
    config = distill_rl.check(root / "run.yaml").config
    config = replace(config, run=replace(config.run, name="a ${run.dir} b"))
    later = distill_rl.check(config, train={"steps": 3}, **{"optimizer.lr": 1e-4}).config
    assert (later.train.steps, later.optimizer.lr, config.train.steps) == (3, 1e-4, 2)
    assert later.run.name == "a ${run.dir} b"


@pytest.mark.parametrize(
    ("given", "keywords", "line"),
    [
        (None, {"studnt": "x"}, "studnt: unknown key; did you mean student?"),
        (None, {"lr": 1e-4}, "lr: unknown key; did you mean optimizer.lr?"),
        (5, {}, "the configuration: must be the path of a YAML file, a mapping, or a Config; got int; or give the"),
        ("absent.yaml", {}, "absent.yaml: no such file"),
        ({"train": {"steps": "many"}}, {}, "train.steps: must be a whole number"),
    ],
    ids=["name", "name of another section", "type", "no file", "value"],
)
def test_bad_input_is_one_error_and_prints_nothing(given, keywords, line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(distill_rl.ConfigError) as refused:
        distill_rl.distill(given, **keywords)
    assert len([problem for problem in refused.value.problems if problem.startswith(line)]) == 1, refused.value
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_advises_what_python_can_give(root: Path, tmp_path: Path):
    used = tmp_path / "runs" / "mine"
    used.mkdir(parents=True)
    (used / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(distill_rl.ConfigError) as caught:
        distill_rl.distill(root / "run.yaml", run={"dir": str(used.parent), "name": "mine"})
    (line,) = [line for line in caught.value.problems if "in use" in line]
    assert line.endswith("in use; no checkpoint is saved: start over with clean=True, or choose another run.name")
    (used / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(distill_rl.ConfigError) as caught:
        distill_rl.distill(root / "run.yaml", run={"dir": str(used.parent), "name": "mine"})
    (line,) = [line for line in caught.value.problems if "in use" in line]
    assert line.endswith("in use; go on with resume=True, start over with clean=True, or choose another run.name")


def test_console_leaves_a_program_its_own_handlers(monkeypatch):
    logger, root_logger = logging.getLogger("distill_rl"), logging.getLogger()
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(root_logger, "handlers", [])
    level = logger.level
    with console():
        assert len(logger.handlers) == 1
    assert (logger.handlers, logger.level) == ([], level)
    monkeypatch.setattr(root_logger, "handlers", [logging.NullHandler()])
    with console():
        assert logger.handlers == []


def test_the_package_is_light_and_names_what_it_has():
    program = (
        "import sys, distill_rl\nprint(*({'torch', 'ray', 'omegaconf'} & set(sys.modules)), len(distill_rl.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(distill_rl.__all__))]
    assert all(hasattr(distill_rl, name) for name in distill_rl.__all__)
    assert not hasattr(distill_rl, "nothing_of_that_name")
