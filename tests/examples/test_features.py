"""Every file of configs/features that two cores can run, for three steps, in a folder with the quickstart's material."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distill_rl.demo.material import make_material
from distill_rl.demo.recipe import RECIPES
from tests.helpers.command import distill_rl, series
from tests.helpers.corpus import corpus_rows, write_corpus
from tests.helpers.served import StandIn

pytestmark = pytest.mark.cli

FILES = sorted((Path(__file__).parents[2] / "configs" / "features").glob("*.yaml"))
STEPS = 3
ELSEWHERE = {
    "trackers": "tests/monitoring/test_trackers.py, where W&B and MLflow are installed",
    "served-vllm": "tests/vllm/test_teacher_runs.py, where vLLM is installed",
    "quantised-teacher": "tests/cli/test_quantized_teacher.py, where torchao is installed",
    "endpoint": "test_a_served_teacher_teaches, with a server",
}
OVERRIDES = {
    "plain-text": ("data.path=corpus.jsonl",),
    "routed-teachers": ("data.path=domains.jsonl",),
    "several-sources": ("data.sources=[{path: corpus.jsonl, weight: 3}, {path: corpus.jsonl}]",),
}
"""The paths in these files are placeholders."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the quickstart's models, the teachers trained for a few steps only, and data."""
    folder = tmp_path_factory.mktemp("features")
    for recipe in RECIPES.values():
        make_material(folder / ".cache" / "quickstart", 0, replace(recipe, teacher_steps=20))
    write_corpus(folder / "corpus.jsonl", rows=400)
    chats = [
        row | {"domain": ("sorting", "other", "nobody's")[i % 3], "weight": 1 + i % 2}
        for i, row in enumerate(corpus_rows(400, messages=True))
    ]
    (folder / "domains.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    return folder


@pytest.mark.parametrize("file", [file for file in FILES if file.stem not in ELSEWHERE], ids=lambda file: file.stem)
def test_a_feature_trains_and_exports(file, folder, cluster):
    settings = (f"train.steps={STEPS}", "schedule.warmup_steps=1", "evaluate.suites=[]")
    ended = distill_rl("train", "-c", file, *settings, *OVERRIDES.get(file.stem, ()), cwd=folder, cluster=cluster)
    assert ended.code == 0, ended.err
    run = folder / "runs" / file.stem
    assert [step for step, _ in series(run, "train/loss")] == list(range(1, STEPS + 1))
    assert (run / "export" / "model.safetensors").exists()


def test_a_served_teacher_teaches(folder, cluster):
    """The file as it is, but for the port: a server of the name and with the vocabulary that it expects."""
    from distill_rl.models.files import read_tokenizer, vocabulary_size

    (file,) = [file for file in FILES if file.stem == "endpoint"]
    teacher = folder / ".cache" / "quickstart" / "seed-0" / "teacher"
    settings = (f"train.steps={STEPS}", "schedule.warmup_steps=1", "evaluate.suites=[]")
    with StandIn(model="sorter", vocabulary=vocabulary_size(read_tokenizer(teacher))) as server:
        ended = distill_rl(
            "train", "-c", file, *settings, f"teachers.0.endpoint.url={server.url}", cwd=folder, cluster=cluster
        )
        assert ended.code == 0, ended.err
        assert server.seen.prompts
    assert len(series(folder / "runs" / "endpoint", "train/loss")) == STEPS


def test_files_that_run_elsewhere_exist():
    assert ELSEWHERE.keys() <= {file.stem for file in FILES}
