"""Whole runs in which a column of the data chooses the teacher."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distill_rl.config.load import load_config
from distill_rl.data.batch.tokenization import name_of
from distill_rl.store.store import Store
from tests.helpers.command import Cluster, distill_rl, distill_rl_in_process, records, series
from tests.helpers.corpus import corpus_rows
from tests.helpers.one_process import train as train_in_process

pytestmark = pytest.mark.cli

LOSSES = (
    "train/kl_loss",
    "train/kl_loss/big",
    "train/kl_loss/other",
    "train/nll_loss",
    "train/loss",
    "train/grad_norm",
)
CHOSEN = (
    "teachers.0.where={domain: [maths, physics]}",
    "teachers.1.name=other",
    "teachers.1.dtype=fp32",
    "teachers.1.where={domain: code}",
    "teachers.1.weight_column=use",
    "data.packing=true",
    "evaluate.every=4",
    "aligner.workers=1",
)


def write_domains(path: Path) -> list[dict]:
    """Documents of four domains in turn; nobody is asked for the fourth, nor for a seventh of the third."""
    rows = [
        row | {"domain": ("maths", "physics", "code", "poetry")[i % 4], "use": (0, 1, 1, 2, 0.5, 1, 3)[i % 7]}
        for i, row in enumerate(corpus_rows(80, seed=5))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def train(material, folder: Path, other: str, *overrides: str, cluster: Cluster) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_domains(folder / "domains.jsonl")
    settings = (*CHOSEN, f"data.path={folder}/domains.jsonl", f"teachers.1.model={material.root}/{other}", *overrides)
    ended = distill_rl("train", "-c", material.config(folder), *settings, cluster=cluster)
    assert ended.code == 0, ended.err
    return folder / "runs" / "tiny"


def assert_equal_runs(run: Path, other: Path, *, rel: float = 0.0) -> None:
    for metric in LOSSES:
        ours, theirs = ([value for _, value in series(folder, metric)] for folder in (run, other))
        assert len(ours) > 4
        assert ours == pytest.approx(theirs, rel=rel, abs=0), metric
    if not rel:
        ours, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (run, other))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def routed(material, cluster, tmp_path_factory) -> Path:
    """A run whose first teacher writes its targets to a cache, which shows what it was asked for."""
    folder = tmp_path_factory.mktemp("routed")
    return train(material, folder, "teacher", f"teachers.0.cache={folder}/cache", cluster=cluster)


def test_every_teacher_is_asked_for_its_rows(routed):
    first = records(routed)[0]
    assert {"train/taught/big", "train/taught/other", "train/kl_loss/big"} <= first.keys()
    shares = {name: [value for _, value in series(routed, f"train/taught/{name}")] for name in ("big", "other")}
    assert 0.3 < sum(shares["big"]) / 8 < 0.7
    assert 0.05 < sum(shares["other"]) / 8 < 0.35
    assert all(big + other < 1 for big, other in zip(*shares.values())), "nobody is asked for poetry"
    assert series(routed, "validation/taught/big")
    folder = routed.parents[1]
    rows = [*map(json.loads, (folder / "domains.jsonl").read_text().splitlines())]
    store = Store(folder / "cache")
    held = {row["domain"] for row in rows if store.has_whole(name_of(row["text"]))}
    assert held == {"maths", "physics"}, "a teacher computes what it is asked for, and nothing else"


@pytest.mark.long_run
@pytest.mark.parametrize("depth", [0, 3])
def test_look_ahead_changes_no_bit(routed, material, cluster, tmp_path, depth):
    assert_equal_runs(train(material, tmp_path, "teacher", f"prefetch.depth={depth}", cluster=cluster), routed)


@pytest.mark.long_run
def test_a_resumed_run_has_the_bits_of_a_whole_one(routed, material, cluster, tmp_path):
    train(material, tmp_path, "teacher", "train.steps=3", cluster=cluster)
    assert_equal_runs(train(material, tmp_path, "teacher", "--resume", cluster=cluster), routed)


@pytest.mark.long_run
def test_stores_of_the_rows_that_teachers_are_asked_for_teach_alike(routed, material, cluster, tmp_path):
    """One teacher is captured; then it is read from its store, and the other is live."""
    write_domains(tmp_path / "domains.jsonl")
    settings = (*CHOSEN, f"data.path={tmp_path}/domains.jsonl", f"teachers.1.model={material.root}/teacher")
    ended = distill_rl(
        "capture", "-c", material.config(tmp_path), "--out", tmp_path / "store", *settings, cluster=cluster
    )
    assert ended.code == 0, ended.err
    stored = ("teachers.0.model=null", "teachers.0.backend=store", f"teachers.0.store={tmp_path}/store/big")
    assert_equal_runs(train(material, tmp_path, "teacher", *stored, cluster=cluster), routed)


@pytest.mark.long_run
def test_two_ranks_have_the_same_losses(routed, material, cluster, tmp_path):
    settings = ("student.parallel.dp=2", "teachers.0.parallel.dp=2", "train.micro_batch_size=1")
    assert_equal_runs(train(material, tmp_path, "teacher", *settings, cluster=cluster), routed, rel=2e-4)


def test_a_teacher_of_another_tokenizer_is_chosen_by_row(material, cluster, tmp_path):
    """Its losses are those of a run in one process, which looks at one batch at a time."""
    run = train(material, tmp_path, "foreign", "prefetch.depth=3", cluster=cluster)
    alone = train_in_process(load_config(run / "config.yaml"), tmp_path / "alone")
    for metric in LOSSES:
        assert series(run, metric) == alone.series(metric), metric
        assert len(series(run, metric)) > 4
    exported = load_file(run / "export" / "model.safetensors")
    assert all(torch.equal(alone.weights[name], exported[name]) for name in exported)
    assert all(0 < value <= 1 for _, value in series(run, "align/coverage"))


def test_check_says_what_teachers_are_asked_for(material, tmp_path):
    write_domains(tmp_path / "domains.jsonl")
    settings = (f"data.path={tmp_path}/domains.jsonl", "teachers.0.where={domain: [maths, phisics]}")
    ended = distill_rl_in_process("check", "-c", material.config(tmp_path), *settings)
    assert ended.code == 0, ended.err
    assert re.search(r"teachers\.0: big is asked for 1\d of 72 rows of a sample", ended.out)
    assert "no row of a sample of 72 has 'phisics'; they have 'code', 'maths', 'physics', 'poetry'" in ended.out
