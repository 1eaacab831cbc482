"""Whole runs from the command line: what they write, and which settings must not change a bit of it."""

import importlib.metadata
import json
import math
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from distill_rl.system.environment import commit
from tests.helpers.command import distill_rl, distill_rl_in_process, records, series
from tests.unit.student.test_damage import replace_metadata, seal

pytestmark = pytest.mark.cli

LOSSES = ("train/kl_loss", "train/nll_loss", "train/loss", "train/grad_norm")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


def assert_equal_runs(run: Path, other: Path) -> None:
    for metric in LOSSES:
        assert series(run, metric) == series(other, metric)
        assert len(series(run, metric)) == 8
    assert_equal_weights(run, other)


def assert_equal_weights(run: Path, other: Path) -> None:
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_equal_but_for_sums(run: Path, other: Path) -> None:
    """A ring smaller than a batch trains in sub-batches, and their means are summed in another order in fp64."""
    assert_equal_weights(run, other)
    for metric in LOSSES:
        ours, theirs = ([value for _, value in series(folder, metric)] for folder in (run, other))
        assert ours == pytest.approx(theirs, rel=1e-14, abs=0)
    ours, theirs = (series(folder, "validation/kl_loss")[-1][1] for folder in (run, other))
    assert ours == pytest.approx(theirs, rel=1e-14, abs=0)


def shards(run: Path, step: int) -> dict[str, str]:
    """sha256 of the files that the student's ranks saved: weights and optimizer state."""
    manifest = json.loads((run / "checkpoints" / f"step-{step}" / "MANIFEST.json").read_text())
    return {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".distcp")}


def test_a_run_leaves_the_documented_files(straight):
    names = {path.name for path in straight.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "logs", "checkpoints", "export", "report.html"} <= names
    assert sorted(path.name for path in (straight / "checkpoints").iterdir()) == ["step-4", "step-8"]
    assert [step for step, _ in series(straight, "train/kl_loss")] == list(range(1, 9))
    assert [step for step, _ in series(straight, "validation/kl_loss")] == [4, 8]
    assert [step for step, _ in series(straight, "timing/save")] == [5], "saved after step 4, beside the training"
    assert {"timing/step", "timing/student", "transport/bytes", "train/tokens_per_second", "align/documents"} <= set(
        records(straight)[0]
    )


def test_validation_measures_agreement_with_the_teacher(straight):
    (first, before), (last, after) = series(straight, "validation/acceptance")
    assert (first, last) == (4, 8)
    assert 0 < before < 1 > after > 0
    assert [step for step, share in series(straight, "validation/top1_agreement") if 0 <= share <= 1] == [4, 8]
    assert not series(straight, "train/acceptance")


def test_every_worker_reports_how_busy_it_was_and_its_memory(straight):
    for worker in ("student", "big", "aligner"):
        assert all(share > 0 for _, share in series(straight, f"busy/{worker}"))
        assert 0.01 < series(straight, f"memory/{worker}")[-1][1] < 24
    assert {value for _, value in series(straight, "align/bad_rows")} == {0}
    assert all(0 < share <= 1 for _, share in series(straight, "align/labelled"))


def test_environment_of_the_attempt_is_recorded(straight):
    kept = json.loads((straight / "logs" / "attempt_1" / "environment.json").read_text())
    assert kept["commit"] == commit()["commit"]
    assert kept["packages"]["torch"] == importlib.metadata.version("torch")
    assert kept["host"] == socket.gethostname()
    assert kept["cores"] == os.cpu_count()
    assert len(kept["nodes"]) == 1
    assert kept["nodes"][0].endswith(" CPUs")


def test_training_lowers_the_validation_loss(straight):
    kd, ce = dict(series(straight, "validation/kl_loss")), dict(series(straight, "validation/nll_loss"))
    assert kd[8] + 0.5 * ce[8] < kd[4] + 0.5 * ce[4]


def test_the_export_loads_and_its_card_names_the_teacher(straight, material):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(straight / "export")
    tokenizer = AutoTokenizer.from_pretrained(straight / "export")
    ids = tokenizer("kalomi ter", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()
    card = (straight / "export" / "README.md").read_text()
    assert str(material.root / "teacher").replace("_", "") in card.replace("_", "").replace("\\", "")
    assert f"{series(straight, 'validation/kl_loss')[-1][1]:.4f}" in card


@pytest.fixture(scope="module")
def small_ring(material, cluster, tmp_path_factory) -> Path:
    """The straight run with a ring smaller than a batch, which keeps the checkpoint with the best agreement."""
    folder = tmp_path_factory.mktemp("small-ring")
    settings = ("prefetch.depth=2", "transport=shared_memory", "prefetch.slots=2", "evaluate.every=1")
    best = "checkpoint={every: 1, keep_last: 1, keep_best: 2, best_by: validation/top1_agreement}"
    ended = distill_rl("train", "-c", material.config(folder), *settings, best, cluster=cluster)
    assert ended.code == 0, ended.err
    return folder / "runs" / "tiny"


def test_a_ring_smaller_than_a_batch_changes_no_weight(straight, small_ring):
    assert_equal_but_for_sums(small_ring, straight)


def test_checkpoints_with_the_best_agreement_are_kept(small_ring):
    shares = dict(series(small_ring, "validation/top1_agreement"))
    assert list(shares) == list(range(1, 9))
    best = sorted(shares, key=lambda step: (-shares[step], step))[:2]
    kept = {int(path.name.removeprefix("step-")) for path in (small_ring / "checkpoints").glob("step-*")}
    assert kept == {*best, 8}
    assert min(shares[step] for step in best) > min(shares.values()), "the order would not show"


def boxes(run: Path, call: str, row: str) -> list[tuple[float, float]]:
    """(start, end) of one worker's calls of a method, from the run's timeline."""
    events = json.loads((run / "logs" / "latest" / "timeline.json").read_text())["traceEvents"]
    rows = {event["args"]["name"]: (event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    calls = [event for event in events if event["name"] == call and (event["pid"], event["tid"]) == rows[row]]
    return [(event["ts"], event["ts"] + event["dur"]) for event in calls]


def overlap(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> bool:
    return any(start < end and begin < stop for start, stop in some for begin, end in others)


def test_the_timeline_and_the_time_table_show_the_workers(straight):
    student, teacher = boxes(straight, "train", "student-dp0-tp0"), boxes(straight, "forward", "big/dp0-tp0")
    # Documents that are split make more rows than a sub-batch has, which is as many as a batch has documents.
    batch_size = OmegaConf.load(straight / "config.yaml").train.global_batch_size
    calls = sum(math.ceil(rows / batch_size) for _, rows in series(straight, "align/rows"))
    assert calls > 8
    assert len(student) == calls
    assert len(teacher) >= calls + 2, "those of two validation passes, too"
    assert [len(boxes(straight, call, "aligner-0")) for call in ("align", "assemble")] == [8 + 2, 8 + 2]
    assert overlap(student, teacher), "the teacher never worked while the student did"
    log = (straight / "logs" / "latest" / "driver.log").read_text()
    assert "where the time went, steps 1 to 4" in log
    assert "where the time went, steps 5 to 8" in log
    assert records(straight)[0]["transport/bytes_per_token"] == 16 * 8 + 8


def test_resume_refuses_another_teacher_order_or_data(straight, material):
    config = straight.parent.parent / "tiny.yaml"
    ended = distill_rl_in_process(
        "train", "-c", config, "--resume", "train.steps=9", "run.seed=4", f"teachers.0.model={material.root}/student",
        "data.validation.fraction=0.2",
    )  # fmt: skip
    assert ended.code == 2
    assert len(ended.errors) == 3
    for name in ("teacher big", "order of the data", "data of this run"):
        assert any(name in line for line in ended.errors), ended.errors


def test_any_checkpoint_can_be_exported_later(straight, tmp_path):
    ended = distill_rl_in_process("export", straight, "--checkpoint", "8", "--out", tmp_path / "again")
    assert ended.code == 0, ended.err
    ours, theirs = load_file(tmp_path / "again" / "model.safetensors"), weights(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert distill_rl_in_process("export", straight, "--checkpoint", "5", "--out", tmp_path / "no").code == 2
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    refused = distill_rl_in_process("export", straight, "--out", tmp_path / "thesis")
    assert refused.code == 2
    assert "--out" in refused.err
    assert (tmp_path / "thesis" / "thesis.tex").exists()


def test_code_in_a_received_run_folder_is_not_run(straight, tmp_path, cluster):
    run, mark = tmp_path / "runs" / "tiny", tmp_path / "ran"
    shutil.copytree(straight, run, symlinks=True)
    replace_metadata(run / "checkpoints" / "step-8" / "student", mark)
    seal(run / "checkpoints" / "step-8")
    exported = distill_rl_in_process("export", run, "--out", tmp_path / "export")
    config = straight.parent.parent / "tiny.yaml"
    resumed = distill_rl("train", "-c", config, "--resume", "train.steps=9", f"run.dir={run.parent}", cluster=cluster)
    assert not mark.exists()
    for ended in (exported, resumed):
        assert ended.code == 2, ended.err
        (line,) = ended.errors
        assert "step-8" in line
        assert "its metadata must be what torch writes for tensors" in line
    assert not (tmp_path / "export").exists()


def test_a_run_is_not_overwritten_and_check_changes_nothing(straight, material):
    folder = straight.parent.parent
    before = sorted(path.name for path in straight.rglob("*"))
    again = distill_rl_in_process("train", "-c", folder / "tiny.yaml")
    assert again.code == 2
    assert "--resume" in again.err
    assert "--clean" in again.err
    checked = distill_rl_in_process("check", "-c", folder / "tiny.yaml", "train.steps=9")
    assert checked.code == 0, checked.err
    assert "steps: 9" in checked.out
    assert "bytes per token" in checked.out
    assert sorted(path.name for path in straight.rglob("*")) == before
