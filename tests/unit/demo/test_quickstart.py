from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from distill_rl import cli
from distill_rl.cli import main
from distill_rl.config.load import load_config
from distill_rl.config.rules import problems
from distill_rl.demo import quickstart as run
from distill_rl.demo.quickstart import print_table
from distill_rl.demo.recipe import RECIPES
from distill_rl.errors import ConfigError
from distill_rl.system.fork_server import _READ_ON_IMPORT


def scores(after: float = 0.9, control: float = 0.6) -> dict[str, dict[str, Any]]:
    def result(score: float) -> dict[str, Any]:
        tasks = {"sort": {"score": score}, "sort words": {"score": score / 2}}
        return {"score": score, "interval": [score - 0.02, score + 0.02], "num_items": 600, "per_task": tasks}

    return dict(zip(run.ROWS, map(result, (0.99, 0.02, after, control, 0.7))))


def write_metrics(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def complain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(["quickstart", *arguments])
    return code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_configurations_are_valid_and_paths_follow_the_seed(name: str) -> None:
    config = load_config(run.CONFIGS / f"{name}.yaml", ["run.seed=7"])
    assert problems(config) == []
    folder = f".cache/quickstart/{RECIPES[name].folder}-7"
    assert (config.student.model, config.teachers[0].model) == (f"{folder}/student", f"{folder}/teacher")
    assert (config.data.path, config.data.validation.path) == (f"{folder}/train.jsonl", f"{folder}/validation.jsonl")
    assert config.evaluate.data == f"{folder}/test.jsonl"
    assert config.run.name == name


def test_cross_configuration_differs_only_where_it_must() -> None:
    one, other = (asdict(load_config(run.CONFIGS / f"{name}.yaml")) for name in RECIPES)
    same = ("optimizer", "schedule", "train", "loss", "student", "data", "prefetch", "checkpoint")
    differing = {f"{part}.{key}" for part in same for key in one[part] if one[part][key] != other[part][key]}
    assert differing == {
        "student.model", "data.path", "data.packing", "data.validation", "train.micro_batch_size", "loss.alm_tau",
    }  # fmt: skip
    assert other["loss"]["cross_tokenizer"] == "hybrid"


@pytest.mark.parametrize("name", RECIPES)
def test_control_differs_in_loss_weights_and_suites_only(name: str) -> None:
    path = run.CONFIGS / f"{name}.yaml"
    distilled, control = (asdict(load_config(path, extra)) for extra in ((), run.CONTROL_OVERRIDES))
    differing = {
        f"{section}.{key}"
        for section, values in distilled.items()
        if isinstance(values, dict)
        for key in values
        if values[key] != control[section][key]
    }
    assert differing == {"loss.kd_weight", "loss.ce_weight", "evaluate.suites"}
    assert control["teachers"] == distilled["teachers"]


def test_summary_contains_the_figures(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl", {"step": 1, "train/tokens": 100, "timing/step": 0.5})
    summary = run.summarise(scores(), seed=3, seconds=61.26, metrics=metrics)
    figures = {"teacher": 0.99, "student_before": 0.02, "student_after": 0.9, "ce_only": 0.6, "half_rows": 0.7}
    assert {name: summary[name] for name in figures} == figures
    assert (summary["seed"], summary["seconds"], summary["tokens_per_second"]) == (3, 61.3, 200.0)
    assert summary["tasks"]["ce_only"] == {"sort": 0.6, "sort words": 0.3}
    assert summary["num_questions"] == 600


def test_cross_summary_and_table_show_mean_alignment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        {"step": step, "train/tokens": 100, "timing/step": 0.5, "align/one_to_one": share, "align/coverage": 0.96}
        for step, share in ((1, 0.30), (2, 0.40))
    ]
    metrics = write_metrics(tmp_path / "metrics.jsonl", *steps, {"step": 2, "validation/kl_loss": 1.0})
    summary = run.summarise(scores(), seed=3, seconds=61.26, metrics=metrics)
    assert (summary["one_to_one_share"], summary["coverage"]) == (0.35, 0.96)
    print_table(scores(), summary)
    note = " ".join(capsys.readouterr().out.split())
    assert "35% are one token on either side" in note
    assert "cover 96% of the tokens" in note


def test_summary_of_one_tokenizer_has_no_alignment(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl", {"step": 1, "train/tokens": 100, "timing/step": 0.5})
    assert not set(run.ALIGNED) & set(run.summarise(scores(), seed=3, seconds=1.0, metrics=metrics))


@pytest.mark.parametrize(("after", "code"), [(0.9, 0), (0.6, 1), (0.5, 1)])
def test_quickstart_fails_unless_distillation_wins(capsys: pytest.CaptureFixture[str], after: float, code: int) -> None:
    assert run.verdict({"student_after": after, "ce_only": 0.6}) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == code
    assert all(f"{after:.3f}" in line and "0.600" in line for line in lines)


def test_table_shows_every_model_and_explains_the_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = {"num_questions": 600, "seed": 3, "seconds": 61.3, "tokens_per_second": 1234.5}
    print_table(scores(), summary)
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["student,", "distilled", "0.900", "0.880", "to", "0.920", "0.900", "0.450"] in rows
    assert sum("0.600" in row for row in rows) == 1
    assert ["student,", "half", "the", "rows", "0.700", "0.680", "to", "0.720", "0.700", "0.350"] in rows
    assert "600 held-out questions, seed 3" in text
    assert "Without wrong answers the two would tie" in " ".join(text.split())


@pytest.mark.parametrize(("flags", "used"), [((), "quickstart-ce"), (("--cross",), "quickstart-cross-half")])
def test_occupied_run_directory_is_rejected_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], used: str
) -> None:
    (tmp_path / "runs" / used).mkdir(parents=True)
    (tmp_path / "runs" / used / "config.yaml").touch()
    material = tmp_path / "material"
    code, lines = complain(capsys, "--runs", str(tmp_path / "runs"), "--material", str(material), *flags)
    assert code == 2
    assert len(lines) == 1
    assert f"{used}: the run directory is in use; start over with --clean" in lines[0]
    assert not material.exists()


def test_settings_replaced_by_flags_are_rejected_together(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = complain(capsys, "--clean", "run.seed=3", "run.dir=x", "train.steps=5", "data.path=y")
    assert code == 2
    assert len(lines) == 3
    assert "--seed" in lines[0]
    assert "--runs" in lines[1]
    assert "--material" in lines[2]


def test_a_wrong_setting_is_reported_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    material = tmp_path / "material"
    code, lines = complain(
        capsys, "--runs", str(tmp_path / "runs"), "--material", str(material), "loss.top_k=0", "loss.draws=0"
    )
    assert code == 2
    assert [line.split(": ")[2] for line in lines] == ["loss.top_k", "loss.draws"]
    assert not material.exists()


def test_missing_configuration_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = complain(capsys, "--clean", "-c", "/does/not/exist.yaml")
    assert code == 2
    assert "/does/not/exist.yaml" in lines[0]


def test_a_run_of_the_quickstart_has_one_thread_in_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from distill_rl.run.start import threads_per_worker

    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.delenv("DISTILL_RL_THREADS", raising=False)
    assert [threads_per_worker(count) for count in (1, 3, 16)] == [8, 2, 1]
    for name, value in run.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert threads_per_worker(1) == 1
    monkeypatch.setenv("DISTILL_RL_THREADS", "many")
    with pytest.raises(ConfigError, match="DISTILL_RL_THREADS: must be a number of threads, 1 or more; got many"):
        threads_per_worker(1)


def test_the_fork_server_has_the_settings_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read them when they are imported, and a run with others would be no fork."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    entered: list[dict[str, str]] = []
    monkeypatch.setattr(cli, "ForkServer", lambda: nullcontext(entered.append(dict(os.environ))))
    monkeypatch.setattr(cli, "_run", lambda _: 0)
    assert main(["quickstart"]) == 0
    read = {name: value for name, value in run.ENVIRONMENT.items() if name.startswith(_READ_ON_IMPORT)}
    assert read
    assert read.items() <= entered[0].items()
